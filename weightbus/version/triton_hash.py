"""The Triton kernel of gpu_hash.py: each word of a tensor is read once.

A program adds the words of one tile. Tiles begin at multiples of 8,192 words of the tensor, however
its words lie in memory.
"""
# ruff: noqa: ANN001, ANN202, N803 - Triton's language has types and names of its own
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import logging
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from slipstream.weightbus.version.gpu_hash import FACTORS, MIXERS, SEEDS, TILE, TURNS, Words

_log = logging.getLogger(__name__)
_BLOCK = 1024  # words at a time: 16 bytes twice for each of 128 threads
_MEMORY_BYTES = 64 << 20


class GpuTiles:
    """64 MiB of a tensor on a GPU, and 16 KiB for its sums."""

    def __init__(self, device: torch.device, num_bytes: int = _MEMORY_BYTES) -> None:
        """Take the memory; ``num_bytes`` is a multiple of a tile's."""
        self.num_bytes = num_bytes
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def write(self, at: int, data: NDArray[np.uint8]) -> None:
        """Write bytes, [n], from the byte ``at`` of the memory on.

        Pinned memory is read until ``sums`` or ``read`` returns, other memory is read at once.
        """
        self._bytes[at : at + len(data)].copy_(torch.from_numpy(data), non_blocking=True)

    def read(self, at: int, end: int) -> bytes:
        """Return bytes of the memory."""
        return bytes(self._bytes[at:end].tolist())

    def sums(self, first: int, end: int, number: int) -> Words:
        """Return both sums of each tile, [tiles, 2]; arguments are those of ``Tiles``."""
        words = self._bytes.view(torch.int32)[first:end]
        sums: Words = sums_of(words, number).cpu().numpy().view(np.uint32)
        return sums


def sums_of(words: Tensor, number: int) -> Tensor:
    """Return both sums of each tile that has words, [tiles, 2] int32, on the device of the words.

    Args:
        words: [n] int32, in a row; with what precedes them in their tile fewer than 2^31.
        number: number of the first one in its tensor.
    """
    absent = number % TILE  # words of the first tile that are not here
    sums = words.new_empty(triton.cdiv(absent + len(words), TILE), 2)
    if len(sums):
        tile = number // TILE
        _add_words[(len(sums),)](words, sums, absent, len(words), tile, BLOCK=_BLOCK)
    return sums


@cache
def runs_on(device: torch.device) -> bool:
    """Return True if the kernel can run there; the log says why not, once."""
    try:
        for num_words in (1, 2, 16):  # Triton compiles a kernel for each of these kinds
            GpuTiles(device, 4 * TILE).sums(0, num_words, 0)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # noqa: BLE001 of Triton, its compiler, or the C compiler
        what = "what engines must hold is hashed on the host"
        _log.warning("%s: %s: %s", what, type(error).__name__, error)
        return False
    return True


_TILE = tl.constexpr(TILE)
_FIRST_SEED, _SECOND_SEED = map(tl.constexpr, SEEDS)
_FIRST_FACTOR, _SECOND_FACTOR = map(tl.constexpr, FACTORS)
_FIRST_TURN, _SECOND_TURN = map(tl.constexpr, TURNS)
_FIRST_MIXER, _SECOND_MIXER = map(tl.constexpr, MIXERS)


@triton.jit(do_not_specialize=["tile"])
def _add_words(words, sums, absent, num_words, tile, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    first_sum, second_sum = tl.zeros([BLOCK], tl.uint32), tl.zeros([BLOCK], tl.uint32)
    for start in range(0, _TILE, BLOCK):
        place = start + tl.arange(0, BLOCK)
        at = program * _TILE - absent + place
        is_here = (at >= 0) & (at < num_words)
        word = tl.load(words + at, is_here, other=0).to(tl.uint32, bitcast=True)
        number = (tile + program).to(tl.uint32) * _TILE + place.to(tl.uint32)
        first = number * _FIRST_FACTOR + _FIRST_SEED ^ _rotated(number, _FIRST_TURN)
        second = number * _SECOND_FACTOR + _SECOND_SEED ^ _rotated(number, _SECOND_TURN)
        first_sum += tl.where(is_here, _mixed(word ^ first), 0)
        second_sum += tl.where(is_here, _mixed(word ^ second), 0)
    tl.store(sums + 2 * program, tl.sum(first_sum, 0).to(tl.int32, bitcast=True))
    tl.store(sums + 2 * program + 1, tl.sum(second_sum, 0).to(tl.int32, bitcast=True))


@triton.jit
def _rotated(number, turn: tl.constexpr):
    return number << turn | number >> 32 - turn


@triton.jit
def _mixed(word):
    word = (word ^ word >> 16) * _FIRST_MIXER
    word = (word ^ word >> 13) * _SECOND_MIXER
    return word ^ word >> 16
