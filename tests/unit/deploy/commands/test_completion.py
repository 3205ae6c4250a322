"""What a shell offers at a place of a command line."""

import subprocess
from pathlib import Path

import pytest

from slipstream.deploy.commands.completion import ROLES, SHELLS, script
from slipstream.deploy.main import COMMANDS, make_parser

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
function="_shtab_${1##*/}"
"${function//-/_}" "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    (folder / "complete.bash").write_text(script("bash", make_parser))
    for name in ("demo", "demo-2", "other run"):
        (folder / "runs" / name).mkdir(parents=True)
    (folder / "run.toml").touch()
    return folder


def offered(folder: Path, *words: str) -> list[str]:
    command = ["bash", "--norc", "-c", ASK, "bash", "complete.bash", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1] if done.stdout.strip() else []


def test_commands_are_offered(bash: Path):
    assert set(COMMANDS) <= set(offered(bash, "slipstream", ""))
    assert offered(bash, "slipstream", "da") == ["dashboard", "data"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "--dr"], ["--dry-run"]),
        (["run", "--on", ""], ["local", "ray", "hosts"]),
        (["show", "runs/demo", "--ev"], ["--eval"]),
        (["dead-letters", "re"], ["retry"]),
        (["top", "runs/d"], ["runs/demo", "runs/demo-2"]),
        (["export", "runs/o"], ["runs/other run"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["run", "--config", "run."], ["run.toml"]),
        (["data", "c"], ["check"]),
    ],
)
def test_what_a_command_takes_is_offered(bash: Path, words: list[str], expected: list[str]):
    assert sorted(offered(bash, "slipstream", *words)) == sorted(expected)


def test_programs_of_roles_are_completed(bash: Path):
    assert offered(bash, "start-generator", "--off") == ["--offline"]
    assert offered(bash, "/usr/bin/start-learner", "--resume", "") == ["auto"]


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_name_every_command_and_program(shell: str):
    text = script(shell, make_parser)
    assert text.endswith("\n")
    assert all(name in text for name in (*COMMANDS, *ROLES))
