"""Deltas: exact for every bit pattern, and refused when they are damaged."""

import struct
from contextlib import suppress

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.weightbus.version import delta as deltas
from slipstream.weightbus.version.delta import apply_delta, encode_delta
from slipstream.wire.errors import PublishError

PIECE = 1 << 20  # items
WIDTHS = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "int64": 8}


def applied(base: bytes, delta: bytes, width: int) -> bytes:
    tensor = bytearray(base)
    apply_delta(memoryview(delta), memoryview(tensor), width)
    return bytes(tensor)


def encoded(base: bytes, version: bytes, width: int = 2) -> bytes:
    return encode_delta(memoryview(base), memoryview(version), width)


def changed(base: bytes, share: float, seed: int) -> bytes:
    """Change about this share of the bytes, in any bit."""
    random = np.random.default_rng(seed)
    flips = random.integers(0, 256, len(base), dtype=np.uint8)
    flips[random.random(len(base)) >= share] = 0
    return (np.frombuffer(base, np.uint8) ^ flips).tobytes()


@settings(deadline=None, max_examples=150)
@given(
    width=st.sampled_from(sorted(set(WIDTHS.values()))),
    items=st.integers(0, 3_000),
    share=st.sampled_from([0.0, 0.0005, 0.01, 0.2, 0.5, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_version_comes_out_as_it_went_in(width: int, items: int, share: float, seed: int):
    base = np.random.default_rng(seed).bytes(items * width)
    version = changed(base, share, seed)
    delta = encoded(base, version, width)
    assert applied(base, delta, width) == version
    assert applied(version, delta, width) == base  # an exclusive or is its own inverse
    assert (delta == b"") == (version == base)


@pytest.mark.parametrize("items", [PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 5])
def test_tensors_of_several_pieces(items: int):
    base = np.zeros(items, np.uint16)
    for places in ([0], [items - 1], [min(PIECE, items) - 1, items - 1], range(0, items, 3)):
        version = base.copy()
        version[list(places)] = 0x7F80
        delta = encoded(base.tobytes(), version.tobytes())
        assert applied(base.tobytes(), delta, 2) == version.tobytes()
    assert encoded(base.tobytes(), base.tobytes()) == b""


@pytest.mark.parametrize("passed", [0, 254, 255, 256, 509, 510, 511, 765, 70_000])
def test_any_distance_between_changed_items(passed: int):
    version = np.zeros(passed + 300, np.uint16)
    version[passed] = 1
    version[-1] = 3
    base = bytes(version.nbytes)
    assert applied(base, encoded(base, version.tobytes()), 2) == version.tobytes()


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1])
def test_few_changes_take_few_bytes(share: float):
    items = 400_000
    random = np.random.default_rng(3)
    base = random.normal(0.0, 0.03, items).astype(np.float32).view(np.uint32) >> 16
    base = base.astype(np.uint16)
    version = base + (random.random(items) < share).astype(np.uint16)  # the next bfloat16
    delta = encoded(base.tobytes(), version.tobytes())
    entropy = (
        -share * np.log2(share) - (1 - share) * np.log2(1 - share) + 2 * share
    )  # and which bits
    assert len(delta) * 8 < 1.5 * entropy * items


# ---- damage -----------------------------------------------------------------------


def sample(share: float = 0.02) -> tuple[bytes, bytes, bytes]:
    base = np.random.default_rng(5).bytes(20_000)
    version = changed(base, share, 6)
    return base, version, encoded(base, version)


@pytest.mark.parametrize("share", [0.02, 0.9], ids=["sparse", "dense"])
def test_truncated_and_prolonged_deltas_are_refused(share: float):
    base, _, delta = sample(share)
    for length in [*range(1, 60), len(delta) // 2, len(delta) - 1]:
        with pytest.raises(PublishError):
            applied(base, delta[:length], 2)
    with pytest.raises(PublishError, match="expected"):
        applied(base, delta + b"0", 2)


@settings(deadline=None, max_examples=300)
@given(at=st.integers(0, 10**6), bit=st.integers(0, 7), share=st.sampled_from([0.02, 0.9]))
def test_a_flipped_bit_is_refused_or_makes_other_bytes(at: int, bit: int, share: float):
    base, version, delta = sample(share)
    damaged = bytearray(delta)
    damaged[at % len(delta)] ^= 1 << bit
    try:
        found = applied(base, bytes(damaged), 2)
    except PublishError:
        return
    assert len(found) == len(version)  # which the digest of the tensor tells apart


@settings(deadline=None, max_examples=200)
@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_applied_within_the_tensor(data: bytes):
    tensor = bytearray(300)
    guarded = memoryview(tensor)[50:250]
    with suppress(PublishError):
        apply_delta(memoryview(data), guarded, 2)
    assert not any(tensor[:50] + tensor[250:])


def piece(kind: int, count: int, first: bytes, second: bytes) -> bytes:
    return struct.pack("<BIII", kind, count, len(first), len(second)) + first + second


def test_a_delta_that_would_swell_takes_no_memory():
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    assert len(bomb) < 1 << 17
    unknown = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64))
    small = zstandard.ZstdCompressor().compress(b"\1\0")
    for first, second in ((bomb, small), (b"", bomb), (unknown, small), (small, unknown)):
        for kind in (1, 2):
            with pytest.raises(PublishError, match="damaged"):
                applied(bytes(200), piece(kind, 1, first, second), 2)


def test_changes_that_do_not_fit_the_tensor_are_refused():
    for kind, count, distances, changes in [
        (1, 1, b"\x65", b"\1\0"),  # place 100 of 100
        (1, 1, b"\x00", b"\1\0"),  # before the first
        (1, 2, b"\x0a", b"\1\1\0\0"),  # one place for two changes
        (1, 1, b"\x0a\x0a", b"\1\0"),  # two for one
        (1, 1, b"\xff", b"\1\0"),  # a distance that goes on and does not
        (1, 0, b"", b""),
        (1, 101, b"\0" * 101, b"\0" * 202),  # more changes than items
        (2, 99, b"", b"\0" * 198),  # fewer than all
        (3, 1, b"\x0a", b"\1\0"),  # an unknown kind
        (0, 1, b"", b""),
    ]:
        compress = zstandard.ZstdCompressor().compress
        tensor = bytearray(200)
        with pytest.raises(PublishError, match="damaged"):
            apply_delta(
                memoryview(piece(kind, count, compress(distances), compress(changes))),
                memoryview(tensor),
                2,
            )
        assert tensor == bytes(200)


def test_pieces_are_those_that_the_tests_mean():
    assert deltas._PIECE_ITEMS == PIECE
