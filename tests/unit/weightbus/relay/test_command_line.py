import json
import sys
from pathlib import Path

import pytest

from slipstream.weightbus.relay.main import main
from slipstream.wire.process.command_line import role_parser, settings_arguments


@pytest.mark.parametrize("of_learner", [[], ["--resume", "auto", "--begun-after", "3"]])
def test_a_relay_has_the_settings_of_its_learner_and_none_of_its_other_arguments(
    of_learner: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    (tmp_path / "a run.toml").write_text("[weightbus]\nlinger_s = 7.0\n")
    learner = role_parser("start-learner", "", [])
    learner.add_argument("--resume")
    learner.add_argument("--begun-after")
    given = ["--config", str(tmp_path / "a run.toml"), "run.name=b", *of_learner]
    handed_on = settings_arguments(learner.parse_args(given))
    monkeypatch.setattr(sys, "argv", ["relay", *handed_on, "--dry-run"])
    assert main() == 0
    settings = json.loads(capsys.readouterr().out)
    assert (settings["run"]["name"], settings["weightbus"]["linger_s"]) == ("b", 7.0)


def test_a_relay_refuses_an_argument_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["relay", "--config", "run.toml", "--resume", "auto"])
    with pytest.raises(SystemExit, match="2"):
        main()
