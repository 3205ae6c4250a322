"""Tests of operators, and of the hash of words, again with kernels that Triton interprets."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration
FILES = (
    "tests/unit/algos/test_linear_logprobs.py",
    "tests/unit/algos/test_golden_logprobs.py",
    "tests/unit/learner/model/test_rotary.py",
    "tests/unit/learner/model/test_swiglu.py",
    "tests/unit/weightbus/version/test_gpu_hash.py",
)


def test_operators_agree_as_kernels():
    plugins = ("-p", "tests.support.interpreted_kernels", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, "-m", "not slow", *FILES],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},  # noqa: TID251 handed on
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout
