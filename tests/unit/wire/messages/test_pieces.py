"""Frames in pieces: what is cut is joined as it was, whatever its length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.wire.errors import ProtocolError
from slipstream.wire.messages.pieces import PIECE_BYTES, cut, joined, most_pieces

LENGTHS = st.one_of(
    st.integers(0, 10),
    st.builds(
        lambda pieces, more: max(0, pieces * PIECE_BYTES + more),
        st.integers(0, 3),
        st.integers(-2, 2),
    ),
)


@given(st.lists(LENGTHS, max_size=5))
def test_what_is_cut_is_joined_as_it_was(lengths: list[int]):
    frames = [bytes([i]) * length for i, length in enumerate(lengths)]
    pieces = cut(frames)
    assert all(len(piece) <= PIECE_BYTES for piece in pieces)
    assert len(pieces) <= most_pieces(sum(lengths), len(frames))
    assert [bytes(frame) for frame in joined(pieces)] == frames


def test_small_frames_are_neither_copied_nor_more():
    frames = [b"a", b"", b"c" * (PIECE_BYTES - 1)]
    assert all(one is other for one, other in zip(joined(cut(frames)), frames, strict=True))


def test_a_frame_without_an_end_is_refused():
    with pytest.raises(ProtocolError, match="nothing follows"):
        joined([b"a", b"x" * PIECE_BYTES])
