"""Buckets of a version that are whole and verified in an agent's memory, and waits for them."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from slipstream.wire.errors import PublishError
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.versions import PolicyVersion


class BucketPlace(NamedTuple):
    """Position of a bucket in the memory, in bytes."""

    start: int
    num_bytes: int


class HeldBuckets:
    """Buckets of the version that the memory holds. Use it inside one event loop."""

    def __init__(self) -> None:
        self._manifest: WeightManifest | None = None
        self._starts: Sequence[int] = ()
        self._indices: set[int] = set()
        self._lost: PolicyVersion | None = None  # version that is not expected any more
        self._changed = asyncio.Event()

    def begin(self, manifest: WeightManifest, starts: Sequence[int]) -> None:
        """Record that a version is being written over the previous one.

        ``starts`` are the offsets of its buckets in the memory.
        """
        self._manifest, self._starts, self._indices = manifest, starts, set()
        self._lost = None
        self._wake()

    def add(self, index: int) -> None:
        """Record that a bucket was verified and written."""
        self._indices.add(index)
        self._wake()

    def end(self) -> None:
        """Record that the memory holds no version: it was freed, or receiving one failed."""
        self._manifest = None
        self._wake()

    def lose(self, version: PolicyVersion) -> None:
        """Record that a version will not come, unless the memory holds it."""
        self._lost = version
        self._wake()

    def holds(self, version: PolicyVersion, index: int) -> bool:
        """True if a bucket is whole."""
        found = self._manifest
        return found is not None and found.version == version and index in self._indices

    async def until(self, version: PolicyVersion, index: int) -> BucketPlace:
        """Wait until a bucket is whole; return its place.

        Raises:
            PublishError: there will be no such bucket.
        """
        begun: WeightManifest | None = None
        while True:
            found, changed = self._manifest, self._changed
            if begun is not None and found is not begun:
                raise PublishError("receiving it failed here, or another version took its place")
            if found is not None and found.version == version:
                begun = found
                if not 0 <= index < len(found.buckets):
                    raise PublishError("there is no such bucket")
                if index in self._indices:
                    return BucketPlace(self._starts[index], found.buckets[index].num_bytes)
            elif found is not None and version < found.version:
                raise PublishError("a newer version has taken its place")
            elif version == self._lost:
                raise PublishError("it does not come here: its publish failed")
            await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
