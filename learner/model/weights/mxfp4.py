"""Pure: weights of 4 bits in blocks of 32 with a scale each, as gpt-oss is published (MXFP4).

OCP Microscaling Formats Specification 1.0, sections 5.2 and 5.3: a number is a sign, two bits of
exponent and one of mantissa (E2M1), a scale a power of two (E8M0). Two numbers share a byte, the
first in its low half. Of a tensor NAME there are NAME_blocks and NAME_scales. All values have an
exact form in bfloat16.

Shapes: R rows of C numbers in G = C / 32 blocks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.wire.models.hf_config import MXFP4_BLOCK

BLOCKS, SCALES = "_blocks", "_scales"  # suffixes
LARGEST_SCALE = 252  # 6 times the next power of two overflows float32; 255 is no number
_BIAS = 127  # exponent of the scale 0
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])


def packed_shapes(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the blocks and the scales of a tensor [..., R, C]."""
    *rows, columns = shape
    groups = columns // MXFP4_BLOCK
    return (*rows, groups, MXFP4_BLOCK // 2), (*rows, groups)


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers times the scales of their blocks, [R, C] float32.

    Args:
        blocks: [R, G, 16] uint8.
        scales: [R, G] uint8.
    """
    halves = torch.stack([blocks & 15, blocks >> 4], dim=-1)  # [R, G, 16, 2]
    numbers = _NUMBERS[halves.int()].flatten(2)
    return torch.ldexp(numbers, scales.int()[..., None] - _BIAS).flatten(1)
