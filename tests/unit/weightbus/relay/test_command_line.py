import sys
from pathlib import Path

import pytest

from slipstream.weightbus.relay.main import main


@pytest.mark.parametrize(
    "of_learner", [["--replay", "a.trajectories"], ["--resume", "auto", "--begun-after", "3"]]
)
def test_a_relay_is_started_with_the_command_line_of_its_learner(
    of_learner: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "run.toml").write_text("")
    arguments = ["relay", "--config", str(tmp_path / "run.toml"), *of_learner, "--dry-run"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert main() == 0
