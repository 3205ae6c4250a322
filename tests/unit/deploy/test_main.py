import argparse
from pathlib import Path

import pytest

from slipstream.deploy import main as deploy_main
from slipstream.deploy.commands import render
from slipstream.wire.process.command_line import EXIT_INTERRUPTED


def test_ctrl_c_while_a_command_is_imported_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
):
    def interrupted(_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["slipstream", "top"])
    monkeypatch.setattr(deploy_main.importlib, "import_module", interrupted)
    assert deploy_main.main() == EXIT_INTERRUPTED


@pytest.mark.parametrize(
    "words",
    [
        ["a.toml", "--out", "x", "run.steps=3"],
        ["--config", "a.toml", "--out", "x", "run.steps=3"],
        ["run.steps=3", "--out", "x", "a.toml"],
    ],
)
def test_the_settings_file_may_stand_among_the_words(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
):
    called: list[tuple[Path, list[str]]] = []

    def note(arguments: argparse.Namespace) -> int:
        called.append((arguments.config, arguments.overrides))
        return 0

    monkeypatch.setattr("sys.argv", ["slipstream", "render", "slurm", *words])
    monkeypatch.setattr(render, "main", note)
    assert deploy_main.main() == 0
    assert called == [(Path("a.toml"), ["run.steps=3"])]


@pytest.mark.parametrize("words", [[], ["run.steps=3"], ["a.toml", "b.toml"], ["run.model=a.toml"]])
def test_a_command_without_one_settings_file_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
):
    monkeypatch.setattr("sys.argv", ["slipstream", "run", *words])
    with pytest.raises(SystemExit, match="2"):
        deploy_main.main()
    assert "name one settings file: --config RUN.toml" in capsys.readouterr().err
