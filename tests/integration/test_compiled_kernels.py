"""Triton compiles the kernels for an H100, without one.

Accesses of memory are wide, and registers suffice.
"""

import json
from pathlib import Path

import pytest

from tests.support.ranks.run import outputs, start

pytestmark = pytest.mark.integration


def test_kernels_compile_and_threads_read_and_write_sixteen_bytes_of_a_tensor_at_once(
    tmp_path: Path,
):
    (printed,) = outputs([start(tmp_path, "support.compiled_kernels", anew=True)])
    found = json.loads(printed)
    assert not [name for name, one in found.items() if one["spilled"]]
    widths = {name: one["widths"] for name, one in found.items()}
    assert widths.pop("SwiGLU") == widths.pop("SwiGLU's gradients") == [128]
    assert 128 in widths["hash of words"]
    # Others read numbers of each token too: an expert's weight, cosines, a target, statistics.
    narrower = {name: wide for name, wide in widths.items() if {*wide} - {32, 64, 128}}
    assert widths
    assert not narrower
