"""The hash that SGLang computes of a tensor on a GPU, from its parts (sglang 0.5.23).

Two sums of 32-bit words, each mixed with its number (the finalizer of MurmurHash3), per tile of
8,192 words; tiles are mixed with the tensor's length and added, and mixed once more (SplitMix64).
Before that all is sums, to which parts of a tensor add in any order. Zeros fill the last word.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.wire.messages.part_relays import HashPart

TILE = 8192  # words
_TILE_BYTES = 4 * TILE
WORD = 0xFFFFFFFF
_SEED = 0x243F6A88
# Seeds of both sums; factor and rotation of a word's number in each.
SEEDS = (_SEED, (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & WORD)
FACTORS, TURNS = (0x27D4EB2D, 0x165667B1), (15, 13)
MIXERS = (0x85EBCA6B, 0xC2B2AE35)  # factors of MurmurHash3's finalizer
_HASH = (1 << 64) - 1

Words = NDArray[np.uint32]


class Tiles(Protocol):
    """A few tiles of a tensor, in the memory of what adds their words."""

    num_bytes: int  # a multiple of a tile's

    def write(self, at: int, data: NDArray[np.uint8]) -> None:
        """Write bytes, [n], from the byte ``at`` of the memory on."""

    def read(self, at: int, end: int) -> bytes:
        """Return bytes of the memory."""

    def sums(self, first: int, end: int, number: int) -> Words:
        """Return both sums of each tile that has words, [tiles, 2].

        Args:
            first: index of the first word in the memory.
            end: index after the last word.
            number: number of the first word in the tensor; tiles begin at multiples of 8,192.
        """


def joined_hash(parts: Sequence[HashPart]) -> str:
    """Return a tensor's hash from parts that together are its bytes, in hexadecimal.

    Raises:
        ValueError: bytes are missing, or there twice, or the parts are of several tensors.
    """
    totals, there = {part.total for part in parts}, sum(part.num_bytes for part in parts)
    if parts and totals != {there}:
        raise ValueError(f"{there} bytes are there, of {sorted(totals)}")
    edges: dict[int, Words] = {}
    cut: dict[int, int] = {}
    for part in parts:
        for tile, sums in part.edges.items():
            edges[tile] = edges.get(tile, np.zeros(2, np.uint32)) + np.array(sums, np.uint32)
        for number, word in part.cut.items():
            cut[number] = cut.get(number, 0) + word
    for number, word in cut.items():
        edges[number // TILE] = edges.get(number // TILE, np.zeros(2, np.uint32)) + _sums_in_tile(
            np.array([word & WORD], np.uint32), number
        )
    of_edges = np.array(list(edges.values()), np.uint32).reshape(-1, 2)
    whole = sum((high << 32) + low for high, low in (part.whole for part in parts))
    return f"{_split_mix(whole + _added(of_edges, there)):016x}"


def _added(sums: Words, total: int) -> int:
    """Return tiles [n, 2] of a tensor of ``total`` bytes, mixed and added."""
    length = np.uint32(-(-total // 4) * 4 & WORD)
    high, low = _mixed(sums ^ length).sum(0, dtype=np.uint64)
    return (int(high) << 32) + int(low) & _HASH


@dataclass(frozen=True)
class TileSums:
    """Sums of a tensor's tiles over some of its bytes."""

    num_bytes: int  # from the tensor's first byte to the last one here
    sums: Words  # both sums of each tile from the first one on, [tiles, 2]
    cut: dict[int, int]  # what is here of words that are not whole, by their number

    def hash(self) -> str:
        """Return the hash of a tensor whose bytes are all here, in hexadecimal."""
        return joined_hash([self.reduced(0, self.num_bytes)])

    def reduced(self, start: int, total: int) -> "HashPart":
        """Return what a hash needs of the bytes from ``start`` on, which are in a row.

        Args:
            start: First byte that is here.
            total: Bytes of the tensor.
        """
        first, end = -(-start // _TILE_BYTES), self.num_bytes // _TILE_BYTES
        if self.num_bytes == total:
            end = len(self.sums)
        inside = slice(first, max(first, end))
        sums = self.sums.copy()
        cut = dict(self.cut)
        for number in self.cut:
            if inside.start <= number // TILE < inside.stop:
                word = np.array([cut.pop(number)], np.uint32)
                sums[number // TILE] += _sums_in_tile(word, number)
        edges = {
            tile: (int(sums[tile][0]), int(sums[tile][1]))
            for tile in {start // _TILE_BYTES, len(sums) - 1}
            if not inside.start <= tile < inside.stop and 0 <= tile < len(sums)
        }
        return HashPart(
            total=total,
            num_bytes=self.num_bytes - start,
            whole=divmod(_added(sums[inside], total), WORD + 1),
            edges=edges,
            cut=cut,
        )


def tile_sums(parts: Iterable[NDArray[Any]], tiles: Tiles, start: int = 0) -> TileSums:
    """Return the sums of tiles over parts of a tensor, which lie end to end.

    Args:
        parts: arrays of any type and shape, each in memory once it is asked for.
        tiles: memory that holds their bytes, a few tiles at a time.
        start: byte of the tensor at which the first part begins.
    """
    sums: list[tuple[int, Words]] = []
    cut: dict[int, int] = {}
    begin = end = start
    for begin, end in _written(parts, tiles, start):
        base = begin // tiles.num_bytes * tiles.num_bytes
        first, last = _whole_words(begin, end)
        if first < last:
            there = tiles.sums((first - base) // 4, (last - base) // 4, first // 4)
            sums.append((first // 4 // TILE, there))
        for left, right in ((begin, first), (last, end)):
            if left < right:
                value = int.from_bytes(tiles.read(left - base, right - base), "little")
                cut[left // 4] = value << 8 * (left % 4)
    total = np.zeros((-(-end // (4 * TILE)), 2), np.uint32)
    for tile, there in sums:
        total[tile : tile + len(there)] = there
    return TileSums(end, total, cut)


def _written(parts: Iterable[NDArray[Any]], tiles: Tiles, start: int) -> Iterator[tuple[int, int]]:
    """Yield the first byte and the end of what the memory holds of a tensor, each time it is full.

    What it holds begins where a multiple of its size does, but at ``start`` the first time.
    """
    begin = end = start
    for part in parts:
        data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        while len(data):
            place = end % tiles.num_bytes
            fitting = data[: tiles.num_bytes - place]
            tiles.write(place, fitting)
            end, data = end + len(fitting), data[len(fitting) :]
            if end % tiles.num_bytes == 0:
                yield begin, end
                begin = end
    if begin < end:
        yield begin, end


def _whole_words(begin: int, end: int) -> tuple[int, int]:
    """Return the first byte and the end of the whole words between two bytes; equal if none is."""
    first = min(end, -(-begin // 4) * 4)
    return first, max(first, end // 4 * 4)


class HostTiles:
    """One tile, which fits a core's cache with all that is computed of it."""

    num_bytes = 4 * TILE

    def __init__(self) -> None:
        """Take the memory."""
        self._bytes = np.empty(self.num_bytes, np.uint8)
        self._words = self._bytes.view(np.uint32)

    def write(self, at: int, data: NDArray[np.uint8]) -> None:
        """Write bytes, [n], from the byte ``at`` of the memory on."""
        self._bytes[at : at + len(data)] = data

    def read(self, at: int, end: int) -> bytes:
        """Return bytes of the memory."""
        return self._bytes[at:end].tobytes()

    def sums(self, first: int, end: int, number: int) -> Words:
        """Return both sums of words, [1, 2]; arguments are those of ``Tiles``."""
        return _sums_in_tile(self._words[first:end], number)[None]


def _sums_in_tile(words: Words, number: int) -> Words:
    """Return both sums, [2], of words [n] in a row in one tile; the first one has this number.

    A word's number is that of its tile's first word plus its place in the tile. The two have no bit
    in common, so their rotations are joined by an exclusive or.
    """
    place = number % TILE
    base = number - place & WORD
    products, rotations = (table[:, place : place + len(words)] for table in _of_places())
    of_base = zip(FACTORS, SEEDS, TURNS, strict=True)
    added, turned = np.array(
        [[base * factor + seed & WORD, _rotated(base, turn)] for factor, seed, turn in of_base],
        np.uint32,
    ).T[..., None]
    mixed = products + added
    mixed ^= rotations
    mixed ^= words
    mixed ^= turned
    sums: Words = _mixed(mixed).sum(-1, dtype=np.uint32)
    return sums


@cache
def _of_places() -> tuple[Words, Words]:
    """Return products and rotations of a word's place in its tile, [2, 8192] each."""
    products = [[place * factor & WORD for place in range(TILE)] for factor in FACTORS]
    rotations = [[_rotated(place, turn) for place in range(TILE)] for turn in TURNS]
    return np.array(products, np.uint32), np.array(rotations, np.uint32)


def _rotated(number: int, turn: int) -> int:
    return (number << turn | number >> 32 - turn) & WORD


def _mixed(words: Words) -> Words:
    """Return words [...] through MurmurHash3's finalizer, in their place."""
    shifted = np.empty_like(words)
    for shift, factor in ((16, MIXERS[0]), (13, MIXERS[1]), (16, 1)):
        words ^= np.right_shift(words, np.uint32(shift), out=shifted)
        if factor != 1:
            words *= np.uint32(factor)
    return words


def _split_mix(word: int) -> int:
    word &= _HASH
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _HASH
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _HASH
    return word ^ word >> 31
