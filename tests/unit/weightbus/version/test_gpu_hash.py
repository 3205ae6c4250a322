"""The hash of a GPU's engine, by numpy; TRITON_INTERPRET=1 has the kernel compute it, too."""

import itertools
import logging
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from slipstream.weightbus.version.engine_checksums import EngineLayout, expected_checksums
from slipstream.weightbus.version.gpu_hash import TILE, HostTiles, Tiles, joined_hash, tile_sums
from slipstream.weightbus.version.tensor_bits import bits_of
from slipstream.weightbus.version.triton_hash import GpuTiles, runs_on
from tests.conftest import ROOT

WORD = 0xFFFFFFFF
CPU = torch.device("cpu")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # noqa: TID251 Triton reads it, too
TILE_BYTES = 4 * TILE


def memories() -> list[Tiles]:
    """The memory of a host, and what the kernel reads: full after one tile, and after three."""
    on_gpu = [GpuTiles(CPU, count * TILE_BYTES) for count in (1, 3)] if IS_INTERPRETED else []
    return [HostTiles(), *on_gpu]


def mixed(word: int) -> int:
    word = (word ^ word >> 16) * 0x85EBCA6B & WORD
    word = (word ^ word >> 13) * 0xC2B2AE35 & WORD
    return word ^ word >> 16


def turned(number: int, by: int) -> int:
    return (number << by | number >> 32 - by) & WORD


def word_sums(word: int, number: int) -> tuple[int, int]:
    """Return what a word adds to both sums of its tile, by the definition."""
    number &= WORD
    second_seed = (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & WORD
    first = (number * 0x27D4EB2D + 0x243F6A88 & WORD) ^ turned(number, 15)
    second = (number * 0x165667B1 + second_seed & WORD) ^ turned(number, 13)
    return mixed(word ^ first), mixed(word ^ second)


def defined_sums(data: bytes, first: int = 0) -> list[tuple[int, int]]:
    """Return the sums of each tile of words, of which the first one has this number."""
    data += bytes(-len(data) % 4)
    tiles: dict[int, tuple[int, int]] = {}
    for number, word in enumerate(memoryview(data).cast("I"), first):
        pair = zip(tiles.get(number // TILE, (0, 0)), word_sums(word, number), strict=True)
        high, low = (before + more & WORD for before, more in pair)
        tiles[number // TILE] = high, low
    return list(tiles.values())


def defined_hash(sums: list[tuple[int, int]], num_bytes: int) -> str:
    length = -(-num_bytes // 4) * 4 & WORD
    total = sum((mixed(high ^ length) << 32) + mixed(low ^ length) for high, low in sums)
    total &= 2**64 - 1
    total = (total ^ total >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    total = (total ^ total >> 27) * 0x94D049BB133111EB % 2**64
    return f"{total ^ total >> 31:016x}"


def defined(data: bytes) -> str:
    return defined_hash(defined_sums(data), len(data))


def some_bytes(number: int) -> bytes:
    return random.Random(number).randbytes(number)


def between(data: bytes, edges: list[int]) -> list[NDArray[np.uint8]]:
    """Return the parts of bytes between these edges."""
    pairs = itertools.pairwise([0, *sorted(edges), len(data)])
    return [np.frombuffer(bytearray(data[left:right]), np.uint8) for left, right in pairs]


@pytest.mark.parametrize("size", [7, 1001, TILE_BYTES + 5, 2 * TILE_BYTES + 3])
def test_parts_may_end_in_the_middle_of_a_word_and_of_a_tile(size: int):
    data, chance = some_bytes(size), random.Random(1)
    expected = defined(data)
    # A word in four parts, empty parts, and parts of any size.
    for edges in ([1, 2, 3], [5, 5, 6, 6], sorted(chance.randrange(size) for _ in range(9))):
        for tiles in memories():
            assert tile_sums(between(data, edges), tiles).hash() == expected


def test_shares_of_ranks_with_padding_between_them_and_columns_have_the_hash_of_the_whole():
    made = torch.Generator().manual_seed(1)
    gate, up, down, table = (
        torch.randn(*shape, generator=made).bfloat16()
        for shape in ((6, 7), (6, 7), (300, 6), (101, 3))
    )
    mlp = "model.layers.0.mlp"
    named = {f"{mlp}.gate_proj.weight": gate, f"{mlp}.up_proj.weight": up}
    named |= {f"{mlp}.down_proj.weight": down, "lm_head.weight": table}
    found = expected_checksums(named, EngineLayout("cuda", 2))
    padded = torch.nn.functional.pad(table, (0, 0, 0, 27))
    for rank, end in enumerate(("", " of rank 1")):
        # Half of the gates has 42 bytes: the ups begin in the middle of a word.
        gate_up = torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
        columns = down.chunk(2, dim=1)[rank].contiguous()
        for name, tensor in (
            (f"{mlp}.gate_up_proj.weight", gate_up),
            (f"{mlp}.down_proj.weight", columns),
            ("lm_head.weight", padded.chunk(2)[rank]),
        ):
            assert found[f"{name}{end}"] == defined(bits_of(tensor).tobytes())


def test_parts_of_any_layout_are_read_in_the_order_of_their_elements():
    whole = np.arange(3 * 1000, dtype=np.uint16).reshape(3, 1000)
    for part in (whole[:, 1:6], whole.T, whole[::2], whole[0, 0]):
        for tiles in memories():
            assert tile_sums([part, part], tiles).hash() == defined(2 * part.tobytes())


@pytest.mark.parametrize("size", [0, 1, 3, 4, TILE_BYTES - 4, TILE_BYTES - 1, TILE_BYTES])
@pytest.mark.parametrize("more", [0, 1, 4, TILE_BYTES])
def test_zeros_fill_the_last_word_and_a_last_tile_is_as_long_as_its_words(size: int, more: int):
    data = some_bytes(size + more)
    for tiles in memories():
        assert tile_sums(between(data, []), tiles).hash() == defined(data)


# SGLang 0.5.23's own kernels, run by Triton's interpreter: tests/integration/test_gpu_hash.py.
def test_the_hash_is_that_of_the_engine():
    for num_elements, dtype, expected in [
        (0, torch.float32, "0000000000000000"),
        (5, torch.bfloat16, "a4d0f557521dc16c"),
        (8384, torch.bfloat16, "7a9a16a1aeb5f0cf"),
        (40_000, torch.float32, "21d1082a954b143d"),
    ]:
        parts = [bits_of((torch.arange(num_elements) / 7).to(dtype))]
        assert [tile_sums(parts, tiles).hash() for tiles in memories()] == [expected] * len(
            memories()
        )


def test_pieces_of_several_hosts_add_up_in_any_order():
    size = 3 * TILE_BYTES + 2
    data = some_bytes(size)
    edges = [TILE_BYTES - 1, TILE_BYTES + 1, TILE_BYTES + 2, 2 * TILE_BYTES + 5]
    starts, expected = [0, *edges], defined(data)
    for tiles in memories():
        pieces = [
            tile_sums([part], tiles, start)
            for start, part in zip(starts, between(data, edges), strict=True)
        ]
        parts = [piece.reduced(start, size) for start, piece in zip(starts, pieces, strict=True)]
        for order in itertools.permutations(parts):
            assert joined_hash(order) == expected
        assert all(len(part.edges) <= 2 and len(part.cut) <= 2 for part in parts), "few numbers"
        with pytest.raises(ValueError, match=rf"{size - 1} bytes are there, of \[{size}\]"):
            joined_hash([part for part in parts if part.num_bytes != 1] + parts[2:2])
        with pytest.raises(ValueError, match="bytes are there"):
            joined_hash([*parts, parts[0]])


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_any_size_join_to_the_hash_of_the_whole(seed: int):
    chance = random.Random(seed)
    size = chance.choice([1, 3, 9, TILE_BYTES, 3 * TILE_BYTES + chance.randrange(TILE_BYTES)])
    edges = sorted(chance.randrange(size + 1) for _ in range(chance.randrange(4)))
    pieces = zip([0, *edges], between(some_bytes(size), edges), strict=True)
    parts = [
        tile_sums([piece], HostTiles(), start).reduced(start, size)
        for start, piece in pieces
        if len(piece)
    ]
    assert joined_hash(parts) == defined(some_bytes(size))


@pytest.mark.parametrize("tile", [2**31, 2**32 - TILE_BYTES, 2**34 - TILE_BYTES, 2**34])
def test_numbers_of_words_and_the_length_wrap_after_32_bits(tile: int):
    data, start = some_bytes(2 * TILE_BYTES), tile + 20
    expected = defined_sums(data, start // 4)
    for tiles in memories():
        sums = tile_sums(between(data, []), tiles, start)
        assert sums.sums[tile // TILE_BYTES :].tolist() == [list(pair) for pair in expected]
        if tile == 2**32 - TILE_BYTES:
            absent = [(0, 0)] * (tile // TILE_BYTES)
            assert sums.hash() == defined_hash([*absent, *expected], start + len(data))


def test_a_kernel_that_cannot_run_is_logged_once(caplog: pytest.LogCaptureFixture):
    runs_on.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert [runs_on(CPU), runs_on(CPU)] == [IS_INTERPRETED] * 2
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (0 if IS_INTERPRETED else 1)
    assert all(line.startswith("what engines must hold is hashed on the host: ") for line in lines)


PROGRAM = """
import sys
import numpy as np
from slipstream.weightbus.version.engine_checksums import EngineLayout, expected_checksums
tensors = {"model.norm.weight": np.arange(5, dtype=np.uint16)}
print(expected_checksums(tensors, EngineLayout("cuda")), "torch" in sys.modules)
"""


def test_a_host_without_a_gpu_needs_no_torch():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": f"{ROOT / 'src'}", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    expected = {"model.norm.weight": defined(np.arange(5, dtype=np.uint16).tobytes())}
    assert done.stdout.strip() == f"{expected} False", done.stderr
