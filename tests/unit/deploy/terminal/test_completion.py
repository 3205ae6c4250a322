"""What a shell offers at a place of a command line."""

import subprocess
from pathlib import Path

import pytest

from slipstream.deploy.commands.completion import programs
from slipstream.deploy.main import COMMANDS, make_parser
from slipstream.deploy.terminal.completion import SHELLS, script

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_slipstream
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    (folder / "complete.bash").write_text(script("bash", programs(make_parser)))
    for name in ("demo", "demo-2", "other run"):
        (folder / "runs" / name).mkdir(parents=True)
    (folder / "runs" / "demo.txt").touch()
    return folder


def offered(folder: Path, *words: str) -> list[str]:
    command = ["bash", "--norc", "-c", ASK, "bash", "complete.bash", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1] if done.stdout.strip() else []


def test_commands_are_offered(bash: Path):
    assert set(offered(bash, "slipstream", "")) == {*COMMANDS, "--help", "--version"}
    assert offered(bash, "slipstream", "da") == ["dashboard", "data"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "--dr"], ["--dry-run"]),
        (["run", "--on", ""], ["local", "ray", "hosts"]),
        (["show", "runs/demo", "--ev"], ["--eval"]),
        (["dead-letters", "re"], ["retry"]),
        (["status", "runs/d"], ["runs/demo", "runs/demo-2"]),
        (["export", "runs/o"], ["runs/other\\ run"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["run", "--config", ""], []),  # names of files, by the shell itself
        (["data", "c"], ["check"]),
    ],
)
def test_what_a_command_takes_is_offered(bash: Path, words: list[str], expected: list[str]):
    assert sorted(offered(bash, "slipstream", *words)) == sorted(expected)


def test_programs_of_roles_are_completed(bash: Path):
    assert offered(bash, "start-generator", "--off") == ["--offline"]
    assert offered(bash, "/usr/bin/start-learner", "--resume", "") == ["auto"]


def test_scripts_name_every_command_and_program():
    known = programs(make_parser)
    for shell in SHELLS:
        text = script(shell, known)
        assert text.endswith("\n")
        for command in COMMANDS:
            assert command in text, (shell, command)
        for program in known:
            assert program in text, (shell, program)


def test_fish_gets_a_line_for_each_option():
    lines = script("fish", programs(make_parser)).splitlines()
    seen = "complete -c slipstream -n '__fish_seen_subcommand_from"
    assert f"{seen} top' -l json -d 'print the figures once, for programs'" in lines
    assert any(line.startswith(f"{seen} run' -l on -x -a 'local ray hosts' -d") for line in lines)
    assert f"{seen} top' -a '(for run in runs/*/; string trim --right --chars=/ -- $run; end)'" in (
        lines
    )
    assert all(line.count("'") % 2 == 0 for line in lines if "\\'" not in line)
