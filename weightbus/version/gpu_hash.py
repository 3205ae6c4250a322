"""The hash that SGLang computes of a tensor on a GPU, without its kernels (sglang 0.5.23).

Two sums of 32-bit words, each mixed with its position (the finalizer of MurmurHash3), per tile of
8,192 words; the tiles are added, and mixed once more (SplitMix64).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

_TILE = 8192  # words
_CHUNK = 256 * _TILE  # hashed at a time: 64 MiB where words are held as int64
_SEED = 0x243F6A88
_SEEDS = (_SEED, (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF)
_POSITIONS = ((0x27D4EB2D, 15), (0x165667B1, 13))  # factor and rotation of a word's number
_WORD = 0xFFFFFFFF
_HASH = (1 << 64) - 1


def gpu_hash(tensor: Tensor, device: torch.device, *, chunk: int = _CHUNK) -> str:
    """Return the hash of a tensor's bytes in hexadecimal, computed on ``device`` part by part.

    A part is ``chunk`` words, a multiple of the tile.
    """
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    words = pad(data, (0, -len(data) % 4)).view(torch.int32)
    if not len(words):
        return f"{0:016x}"
    total = 0
    for start in range(0, len(words), chunk):
        part = words[start : start + chunk].to(device).long().bitwise_and_(_WORD)
        high, low = (
            _tiles(part, start, 4 * len(words) & _WORD, seed, factor, turn)
            for seed, (factor, turn) in zip(_SEEDS, _POSITIONS, strict=True)
        )
        # Words of 32 bits: torch has no sum of unsigned numbers of 64 bits.
        total += (int(high.sum()) << 32) + int(low.sum())
    return f"{_split_mix(total & _HASH):016x}"


def _tiles(words: Tensor, start: int, num_bytes: int, seed: int, factor: int, turn: int) -> Tensor:
    """Return the mixed sum of each tile, [ceil(n / 8192)] int64, of words [n] int64."""
    number = torch.arange(start, start + len(words), device=words.device) & _WORD
    position = (number * factor + seed & _WORD) ^ (number << turn | number >> (32 - turn)) & _WORD
    mixed = _mixed(words ^ position)
    sums = pad(mixed, (0, -len(mixed) % _TILE)).view(-1, _TILE).sum(-1) & _WORD
    return _mixed(sums ^ num_bytes)


def _mixed(words: Tensor) -> Tensor:
    words = _times(words ^ words >> 16, 0x85EBCA6B)
    words = _times(words ^ words >> 13, 0xC2B2AE35)
    return words ^ words >> 16


def _times(words: Tensor, factor: int) -> Tensor:
    """Return the lower 32 bits of a product; a product of two such words may not fit 63 bits."""
    return (words * (factor & 0xFFFF) + ((words * (factor >> 16) & 0xFFFF) << 16)) & _WORD


def _split_mix(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _HASH
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _HASH
    return word ^ word >> 31
