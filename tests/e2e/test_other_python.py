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
SERIES = "3.12"
_FREE_BYTES = 15e9  # torch's CUDA build takes half of it once unpacked


@pytest.fixture(scope="module")
def checkout() -> Path:
    """The files that git tracks, in a folder of the cache that keeps its environment."""
    folder = ROOT / ".cache" / f"checkout-{SERIES}"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        shutil.copy2(ROOT / name, path, follow_symlinks=False)
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
def test_setup_and_quickstart_on_another_python(checkout: Path, capsys: pytest.CaptureFixture[str]):
    python = find_python(SERIES)
    if python is None:
        pytest.skip(f"no CPython {SERIES} is here")
    if shutil.disk_usage(checkout).free < _FREE_BYTES:
        pytest.skip(f"less than {_FREE_BYTES / 1e9:.0f} GB of disk are free")
    done = make(checkout, "setup", PYTHON=python)
    with capsys.disabled():
        sys.stdout.write(f"\n{done.stdout}")
    log = checkout / ".cache" / "setup.log"
    if done.returncode and "error: Failed to fetch" in log.read_text():
        pytest.skip(f"the index does not give what is needed:\n{done.stdout}")
    assert done.returncode == 0, done.stdout
    shutil.rmtree(checkout / "runs", ignore_errors=True)
    done = make(checkout, "quickstart")
    assert done.returncode == 0, done.stdout
    summary = json.loads((checkout / "runs" / "quickstart" / "summary.json").read_text())
    assert summary["equation"]["unaccounted"] == 0
    points = {point["step"]: point["overall"]["metrics"]["mean@1"] for point in summary["eval"]}
    with capsys.disabled():
        sys.stdout.write(f"\nCPython {SERIES}: {points}\n")
    assert max(points.values()) >= 0.85 > points[0]
