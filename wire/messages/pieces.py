"""Frames on their way to what listens, cut into pieces: a peer without a key can send no more.

A piece of exactly ``PIECE_BYTES`` continues in the next one, a shorter one ends its frame: 100 KiB
are 64 KiB and 36 KiB, 128 KiB are 64 KiB, 64 KiB and an empty one. A frame of less is itself.

A listening socket takes no larger piece than that, which libzmq sees to before it has asked for
a key; how large a message may be depends on its sender and is decided afterwards.
"""

from collections.abc import Sequence

from slipstream.wire.errors import ProtocolError
from slipstream.wire.messages.codec import Frame

PIECE_BYTES = 64 * 1024


def cut(frames: Sequence[Frame]) -> list[Frame]:
    """Return frames in pieces, which share their memory."""
    if all(len(frame) < PIECE_BYTES for frame in frames):
        return list(frames)
    pieces: list[Frame] = []
    for frame in frames:
        view = memoryview(frame)
        starts = range(0, len(view) + 1, PIECE_BYTES)  # the last one is empty if nothing is left
        pieces += [view[start : start + PIECE_BYTES] for start in starts]
    return pieces


def joined(pieces: Sequence[Frame]) -> list[Frame]:
    """Return the frames that were cut; one in a single piece is not copied.

    Raises:
        ProtocolError: the last frame has no end.
    """
    frames: list[Frame] = []
    started: list[Frame] = []
    for piece in pieces:
        if len(piece) == PIECE_BYTES:
            started.append(piece)
        elif started:
            frames.append(b"".join([*started, piece]))
            started = []
        else:
            frames.append(piece)
    if started:
        raise ProtocolError(
            f"the last frame continues after {PIECE_BYTES} bytes, and nothing follows"
        )
    return frames


def joined_message(pieces: Sequence[Frame], *, most_bytes: int) -> bytes:
    """Return a message of one frame that was cut.

    Raises:
        ProtocolError: it is longer than ``most_bytes``.
    """
    if (size := sum(map(len, pieces))) > most_bytes:
        raise ProtocolError(f"a message of {size} bytes; there may be {most_bytes}")
    return b"".join(pieces)


def most_pieces(max_bytes: int, max_frames: int) -> int:
    """Return the most pieces that ``max_frames`` of ``max_bytes`` together can have."""
    return max_bytes // PIECE_BYTES + max_frames
