"""Triton's interpreter runs kernels on a CPU with the triton that `make setup` installs."""

import os
import subprocess
import sys

import pytest

from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration


def test_row_kernel_on_the_interpreter_gives_the_log_sum_of_torch():
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.row_kernel"],
        env={**os.environ, "TRITON_INTERPRET": "1"},  # noqa: TID251 handed on
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5
