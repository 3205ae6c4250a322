"""The README's commands on a CPython that this environment is not made of."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pythons import find_python
from tests.support.waiting import HANG_S

ROOT = Path(__file__).parents[2]
SERIES = ("3.12", "3.13")
_FREE_BYTES = 15e9  # torch's CUDA build takes half of it once unpacked


def checkout(series: str) -> Path:
    """Return a folder of the cache with the files that git tracks; it keeps its environment."""
    folder = ROOT / ".cache" / f"checkout-{series}"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if old.is_dir() and not old.is_symlink() and old.name != ".venv":
            shutil.rmtree(old)
        elif old.name != ".venv":
            old.unlink()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
        if os.path.lexists(ROOT / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def make(folder: Path, target: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    clean = {
        name: value
        for name, value in os.environ.items()  # noqa: TID251 handed on
        if not name.startswith(("MAKE", "MFLAGS", "VIRTUAL_ENV", "PYTHON"))
    }
    return subprocess.run(
        ["make", target],
        cwd=folder,
        env={**clean, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=6 * HANG_S,
    )


@pytest.mark.e2e
@pytest.mark.slow  # the pins are resolved for it in tests/integration/test_resolution.py
@pytest.mark.parametrize("series", SERIES)
def test_setup_and_quickstart_on_another_python(series: str, capsys: pytest.CaptureFixture[str]):
    python = find_python(series)
    if python is None:
        pytest.skip(f"no CPython {series} is here")
    folder = checkout(series)
    if shutil.disk_usage(folder).free < _FREE_BYTES:
        pytest.skip(f"less than {_FREE_BYTES / 1e9:.0f} GB of disk are free")
    done = make(folder, "setup", PYTHON=python)
    with capsys.disabled():
        sys.stdout.write(f"\n{done.stdout}")
    if done.returncode and "failed at 1 of 5, torch" in done.stdout:
        pytest.skip(f"torch cannot be had for CPython {series}:\n{done.stdout}")
    assert done.returncode == 0, done.stdout
    done = make(folder, "quickstart")
    assert done.returncode == 0, done.stdout
    summary = json.loads((folder / "runs" / "quickstart" / "summary.json").read_text())
    assert summary["equation"]["unaccounted"] == 0
    points = {point["step"]: point["overall"]["metrics"]["mean@1"] for point in summary["eval"]}
    with capsys.disabled():
        sys.stdout.write(f"\nCPython {series}: {points}\n")
    assert max(points.values()) >= 0.85 > points[0]
