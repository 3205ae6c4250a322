"""What a CPU computes in place of the kernels of fp8, against weights and rows in float64."""

import pytest
import torch

from slipstream.generators.sglang.fp8 import product, rounded
from slipstream.learner.model.weights.shards import in_fp8

DRAW = torch.Generator().manual_seed(2)


def test_rows_are_rounded_in_groups_of_128_channels():
    row = torch.cat([torch.linspace(-3, 3, 128), 1e-3 * torch.linspace(0, 1, 128)])[None]
    found = rounded(row)
    # Half of the last of three bits, or half of a group's smallest number.
    assert ((found - row).abs()[:, :128] <= row.abs()[:, :128] / 16 + 3 / 448 * 2**-10).all()
    assert ((found - row).abs()[:, 128:] <= row[:, 128:] / 16 + 1e-3 / 448 * 2**-10).all()
    assert rounded(torch.zeros(2, 256)).eq(0).all()
    with pytest.raises(RuntimeError):  # as the kernel asserts
        rounded(torch.zeros(2, 200))
    assert torch.equal(rounded(found), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_of_what_blocks_stand_for(dtype: torch.dtype):
    weight = torch.randn(200, 256, generator=DRAW) * torch.logspace(-3, 3, 200)[:, None]
    x = torch.randn(2, 5, 256, generator=DRAW).to(dtype)
    numbers, scales = in_fp8(weight)
    by_row = scales.double().repeat_interleave(128, 0)[:200]
    meant = numbers.double() * by_row.repeat_interleave(128, 1)
    expected = rounded(x).double() @ meant.T
    found = product(x, numbers, scales)
    assert (found.dtype, found.shape) == (dtype, (2, 5, 200))
    precision = 1e-4 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(
        found.double(), expected, rtol=precision, atol=precision * float(expected.abs().max()) / 100
    )
