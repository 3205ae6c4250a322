"""A role's second start reads the bytecode that its first one wrote."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.toml"


def test_second_start_compiles_little_though_a_variable_forbids_bytecode(tmp_path: Path):
    """The folder of bytecode is empty at first; Python says of each import where it is from."""
    variables = {
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPYCACHEPREFIX": os.fspath(tmp_path),
        "PYTHONVERBOSE": "1",
    }
    compiled, read = [], []
    for _ in range(2):
        started = subprocess.run(
            [sys.executable, "-m", "slipstream.broker.main", "--config", CONFIG, "--dry-run"],
            capture_output=True,
            text=True,
            check=False,
            timeout=HANG_S,
            env={**os.environ, **variables},  # noqa: TID251 handed on
        )
        compiled.append(started.stderr.count("\n# code object from /"))
        read.append(started.stderr.count(f"\n# code object from '{tmp_path}"))
    assert read[0] == 0
    assert compiled[1] < compiled[0] / 3, "modules imported before the role's first line"
    assert read[1] > compiled[0] / 2
