"""Pure: exact changes of a tensor between two versions, and their application in place.

A change is the bitwise exclusive or of both versions' items. So changes of several steps compose,
and every bit pattern, even of a NaN, is restored exactly. Weights are published in bfloat16 and
trained in float32: a small step moves few of them as far as another bfloat16.

A tensor is divided into pieces. A piece with few changed items is a list of distances between
changed items, and of their changes; else it is every item's change. Changes are split into byte
planes, since high bytes hardly ever change, and compressed by zstd.
"""

import struct
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from slipstream.wire.errors import PublishError
from slipstream.wire.messages.codec import Frame
from slipstream.wire.messages.versions import PolicyVersion

if TYPE_CHECKING:  # imported where used: a machine whose agents take no deltas may lack it
    import zstandard

Items: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"  # one dimension, unsigned

_PIECE_ITEMS = 1 << 20
_HEAD = struct.Struct("<BIII")  # kind, changed items, bytes of distances, bytes of changes
_NOTHING, _SPARSE, _DENSE = range(3)
_UNCHANGED = _HEAD.pack(_NOTHING, 0, 0, 0)
_DENSE_FROM = 0.25  # share of changed items from which applying a list is slower
_FAR = 255  # a distance that the next one is added to
_LEVEL = 1
_of_thread = threading.local()
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class BucketDelta(NamedTuple):
    """Changes from a bucket's bytes in one version to those in another, tensor by tensor."""

    base: PolicyVersion
    num_steps: int  # successive deltas of each tensor
    whole: frozenset[int]  # places in the bucket of tensors that are sent whole instead
    frames: list[Frame]  # deltas or bytes, tensor by tensor in order


def num_bytes_of(data: Frame | BucketDelta) -> int:
    """Return the size of an answer to a request for a bucket."""
    frames = data.frames if isinstance(data, BucketDelta) else [data]
    return sum(memoryview(frame).nbytes for frame in frames)


def encode_delta(base: memoryview, version: memoryview, item_bytes: int) -> bytes:
    """Return the changes from a tensor's bytes in one version to those in another.

    Empty if nothing changed. It may be longer than the tensor: then send that.

    Args:
        base: The bytes before, [n].
        version: The bytes after, [n].
        item_bytes: Size of an item: 1, 2, 4 or 8; n is a multiple of it.
    """
    before, after = _items(base, item_bytes), _items(version, item_bytes)
    import zstandard

    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    pieces = [_encoded(before[span] ^ after[span], compressor) for span in _pieces(after.size)]
    return b"".join(pieces) if any(piece != _UNCHANGED for piece in pieces) else b""


def apply_delta(delta: memoryview, tensor: memoryview, item_bytes: int) -> None:
    """Change a tensor's bytes in place, from a delta's base version to its other version.

    Only the size of the tensor is trusted: no more memory than a piece's is ever allocated. A delta
    that applies may still be wrong: compare the digest of the whole tensor.

    Args:
        delta: A result of ``encode_delta``.
        tensor: The bytes, [n], writable.
        item_bytes: Size of an item, the same as for ``encode_delta``.

    Raises:
        PublishError: the delta is damaged, or of a tensor of another size. ``tensor`` is neither
            version then.
    """
    if not delta:
        return
    items = _items(tensor, item_bytes)
    import zstandard

    decompressor = _decompressor()
    at = 0
    try:
        for piece in _pieces(items.size):
            kind, count, *sizes = _HEAD.unpack_from(delta, at)
            at += _HEAD.size
            first, at = delta[at : at + sizes[0]], at + sizes[0]
            second, at = delta[at : at + sizes[1]], at + sizes[1]
            _apply(items[piece], kind, count, (first, second), decompressor)
    except (struct.error, zstandard.ZstdError) as error:
        raise PublishError(f"a delta is damaged: {error}") from error
    if at != len(delta):
        raise PublishError(f"a delta has {len(delta)} bytes, expected {at}")


def _items(data: memoryview, item_bytes: int) -> Items:
    return np.frombuffer(data, dtype=_UNSIGNED[item_bytes])


def _pieces(num_items: int) -> Iterator[slice]:
    for start in range(0, num_items, _PIECE_ITEMS):
        yield slice(start, min(start + _PIECE_ITEMS, num_items))


# ---- one piece ------------------------------------------------------------------


def _encoded(changes: Items, compressor: "zstandard.ZstdCompressor") -> bytes:
    places = np.flatnonzero(changes)
    if not places.size:
        return _UNCHANGED
    distances, kind = b"", _DENSE
    if places.size < _DENSE_FROM * changes.size:
        distances, kind = compressor.compress(_distances(places).data), _SPARSE
        changes = changes[places]
    data = compressor.compress(_planes(changes).data)
    return _HEAD.pack(kind, changes.size, len(distances), len(data)) + distances + data


def _apply(
    items: Items,
    kind: int,
    count: int,
    parts: tuple[memoryview, memoryview],
    decompressor: "zstandard.ZstdDecompressor",
) -> None:
    distances, data = parts
    if kind == _NOTHING and not count and not distances and not data:
        return
    if kind not in {_SPARSE, _DENSE} or not 0 < count <= items.size:
        raise PublishError(f"a delta is damaged: {count} changes of kind {kind}")
    planes = _decompressed(data, count * items.itemsize, decompressor)
    if planes.size != count * items.itemsize:
        raise PublishError(f"a delta is damaged: {planes.size} bytes for {count} changes")
    changes = _from_planes(planes, items.dtype)
    if kind == _DENSE and count == items.size and not distances:
        items ^= changes
        return
    steps = _decompressed(distances, count + items.size // _FAR, decompressor)
    places = _places(steps)
    if places.size != count or places[0] < 0 or places[-1] >= items.size:
        raise PublishError(f"a delta is damaged: {places.size} places for {count} changes")
    items[places] ^= changes


def _decompressor() -> "zstandard.ZstdDecompressor":
    """Return this thread's decompressor: there may be a thousand small tensors."""
    import zstandard

    if not hasattr(_of_thread, "decompressor"):
        _of_thread.decompressor = zstandard.ZstdDecompressor()
    found: zstandard.ZstdDecompressor = _of_thread.decompressor
    return found


def _decompressed(data: memoryview, most: int, decompressor: "zstandard.ZstdDecompressor") -> Items:
    import zstandard

    size = zstandard.frame_content_size(data)
    if not 0 <= size <= most:  # -1 is unknown
        raise PublishError(f"a delta is damaged: {size} bytes where there are at most {most}")
    whole = decompressor.decompress(data, allow_extra_data=False)
    return np.frombuffer(whole, dtype=np.uint8)


def _planes(changes: Items) -> Items:
    """Return the bytes of items, all lowest bytes first."""
    by_item = changes.view(np.uint8).reshape(-1, changes.itemsize)
    return np.concatenate(by_item.T)


def _from_planes(planes: Items, dtype: "np.dtype[Any]") -> Items:
    by_item = np.empty((planes.size // dtype.itemsize, dtype.itemsize), dtype=np.uint8)
    for number, plane in enumerate(planes.reshape(dtype.itemsize, -1)):
        by_item[:, number] = plane
    return by_item.reshape(-1).view(dtype)


def _distances(places: Items) -> Items:
    """Return ascending places as bytes: the distance of each from the one before.

    The first distance is from -1. A distance is a sum of bytes; the first that is not 255 ends it.
    """
    distances = np.diff(places, prepend=-1)
    far = distances // _FAR
    if not far.any():
        return distances.astype(np.uint8)
    ends = np.cumsum(far + 1) - 1
    found = np.full(ends[-1] + 1, _FAR, dtype=np.uint8)
    found[ends] = distances - far * _FAR
    return found


def _places(distances: Items) -> Items:
    """Return the argument of the call of ``_distances`` with this result."""
    sums = np.cumsum(distances, dtype=np.int64)
    places: Items = sums[np.flatnonzero(distances != _FAR)]
    places -= 1
    return places
