"""Triton compiles the kernels for an H100, without one, and their accesses of memory are wide."""

import json
from pathlib import Path

import pytest

from tests.support.ranks.run import outputs, start

pytestmark = pytest.mark.integration


def test_kernels_compile_and_threads_read_and_write_sixteen_bytes_of_a_tensor_at_once(
    tmp_path: Path,
):
    (printed,) = outputs([start(tmp_path, "support.compiled_kernels", anew=True)])
    widths = json.loads(printed)
    assert widths.pop("SwiGLU") == widths.pop("SwiGLU's gradients") == [128]
    # Others read a number in float32 of each token too: an expert's weight, cosines.
    narrower = {name: found for name, found in widths.items() if {*found} - {32, 128}}
    assert widths
    assert not narrower
