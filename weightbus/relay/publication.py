"""A version with everything that transfers of it need; each part is computed once, on demand."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from slipstream.weightbus.relay.buckets_on_gpu import BucketsOnGpu
from slipstream.weightbus.relay.engine_checksums import Holder, expected_checksums
from slipstream.weightbus.version.disk import check_folder, write_version
from slipstream.weightbus.version.snapshot import WeightSnapshot
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.versions import PolicyVersion

T = TypeVar("T")


class Publication:
    """One version on its way to the engines. Use it inside one event loop.

    A caller that is cancelled does not cancel a part for the others.
    """

    def __init__(
        self,
        snapshot: WeightSnapshot,
        *,
        folder: Path,
        first_copy: int = 1,
        pin: Callable[[], None] = lambda: None,
    ) -> None:
        """Compute nothing yet.

        Args:
            snapshot: the version's bytes.
            folder: for copies on disk.
            first_copy: the number of the first of them.
            pin: pins the memory of the snapshot, once.
        """
        self.pin = pin
        self._first_copy = first_copy
        self.snapshot = snapshot
        self.on_gpu = BucketsOnGpu(snapshot)
        self._folder = folder
        self._manifest: asyncio.Future[WeightManifest] | None = None
        self._expected: dict[Holder, asyncio.Future[dict[str, str]]] = {}
        self._on_disk: asyncio.Future[Path] | None = None
        self._writes: list[asyncio.Future[Path]] = []

    @property
    def version(self) -> PolicyVersion:
        """The version."""
        return self.snapshot.version

    @property
    def undigested(self) -> WeightManifest:
        """The manifest without digests."""
        return msgspec.structs.replace(self.snapshot.layout, version=self.version)

    def begin_digests(self) -> asyncio.Future[WeightManifest]:
        """Start to compute the result of ``manifest``."""
        self._manifest = self._manifest or _in_thread(self.snapshot.manifest)
        return self._manifest

    async def manifest(self) -> WeightManifest:
        """Return the manifest with a digest per tensor."""
        return await asyncio.shield(self.begin_digests())

    def begin_checksums(self, of: Holder) -> asyncio.Future[dict[str, str]]:
        """Start to compute the result of ``expected``."""
        tensors = self.snapshot.tensors
        if of not in self._expected:
            self._expected[of] = _in_thread(lambda: expected_checksums(tensors, of))
        return self._expected[of]

    async def expected(self, of: Holder) -> dict[str, str]:
        """Return the checksums of an engine that holds this version."""
        return await asyncio.shield(self.begin_checksums(of))

    async def on_disk(self) -> Path:
        """Return the folder that holds this version, whole and durable.

        Raises:
            PublishError: writing failed.
        """
        manifest, data = await self.manifest(), self.snapshot.memory.numpy().data
        if self._on_disk is None:
            number = self._first_copy + len(self._writes)
            self._on_disk = _in_thread(
                lambda: write_version(self._folder, manifest, data, number=number)
            )
            self._writes.append(self._on_disk)
        return await asyncio.shield(self._on_disk)

    async def check_disk(self) -> None:
        """Make another copy for the next reader if the one on disk is damaged."""
        written, manifest = self._on_disk, await self.manifest()
        if written is None or not written.done():
            return
        try:
            await asyncio.to_thread(check_folder, written.result(), manifest)
        except PublishError:
            self._on_disk = None

    def copies(self) -> list[Path]:
        """Return the folders of all copies on disk, good and bad."""
        return [one.result() for one in self._writes if one.done() and one.exception() is None]

    async def settled(self) -> None:
        """Wait until no computation that was started here reads the memory any more."""
        begun = (self._manifest, *self._expected.values(), *self._writes)
        await asyncio.gather(*(one for one in begun if one is not None), return_exceptions=True)


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    return asyncio.ensure_future(asyncio.to_thread(work))
