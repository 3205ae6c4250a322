"""What deploy/setup.sh says where it cannot do its work. Nothing is installed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = ("setup.sh", "uv_sources.py", "constraints-cpu.txt", "requirements-cpu.txt")
NODEPS = "requirements-cpu-nodeps.txt"


def fake_python(path: Path, words: str) -> Path:
    """Write a program that says which Python it is, and is none."""
    path.write_text(f"#!/bin/sh\necho '{words}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the script reads, in a folder with a space."""
    folder = tmp_path / "a folder"
    (folder / "deploy").mkdir(parents=True)
    for name in (*FILES, NODEPS):
        shutil.copy(ROOT / "deploy" / name, folder / "deploy" / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run_setup(checkout: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [checkout / "deploy" / "setup.sh"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": os.fspath(checkout), **environment},
    )


def test_a_python_that_cannot_be_run_is_named(checkout: Path):
    done = run_setup(checkout, PYTHON="/nope")
    assert done.returncode == 2
    assert "CPython 3.11 or 3.12 is needed; PYTHON=/nope cannot be run" in done.stderr
    assert "No such file" not in done.stderr
    assert not (checkout / ".venv").exists()


def test_other_versions_are_named_by_what_was_found(checkout: Path, tmp_path: Path):
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, words in {
        "python3.11": "PyPy 3.11",
        "python3.12": "CPython 3.13",
        "python3": "CPython 3.9",
        "python": "CPython 2.7",
    }.items():
        fake_python(bin_folder / name, words)
    done = run_setup(checkout, PATH=f"{bin_folder}:/usr/bin:/bin")
    assert done.returncode == 2
    for found in (
        "python3.11 is PyPy 3.11",
        "python3.12 is CPython 3.13",
        "python3 is CPython 3.9",
    ):
        assert found in done.stderr
    assert "PYTHON=/path/to/python3.11 make setup" in done.stderr


def test_the_part_that_failed_is_named_with_the_end_of_its_log(checkout: Path, tmp_path: Path):
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        "*'-m venv'*) echo 'no room for an environment'; exit 1 ;;\n"
        "*) echo CPython 3.11 ;;\nesac\n"
    )
    python.chmod(0o755)
    done = run_setup(checkout, PYTHON=str(python))
    assert done.returncode == 1
    assert "setup: failed at the environment; the end of" in done.stderr
    assert "no room for an environment" in done.stderr
    assert not (checkout / ".venv" / ".slipstream-setup").exists()
