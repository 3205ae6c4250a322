"""A version with all that every transfer of it needs; each part is computed once, when needed."""

import asyncio
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from weightbus.disk import write_version
from weightbus.engine_checksums import expected_checksums
from weightbus.snapshot import WeightSnapshot
from wire.manifest import WeightManifest
from wire.versions import PolicyVersion

T = TypeVar("T")


class Publication:
    """One version on its way to the engines. Use it inside one event loop."""

    def __init__(self, snapshot: WeightSnapshot, *, folder: Path) -> None:
        """Prepare nothing yet.

        Args:
            snapshot: what is published.
            folder: where versions for the disk transport stand.
        """
        self.snapshot = snapshot
        self.gpu_digests: set[str] = set()  # at most one: what the first engine on a GPU held
        self._folder = folder

    @property
    def version(self) -> PolicyVersion:
        """Return which version it is."""
        return self.snapshot.version

    @cached_property
    def manifest(self) -> asyncio.Future[WeightManifest]:
        """Return what is sent, with a digest per tensor."""
        return _once(self.snapshot.manifest)

    @cached_property
    def expected(self) -> asyncio.Future[dict[str, str]]:
        """Return the checksums of an engine on a CPU that holds this version."""
        return _once(lambda: expected_checksums(self.snapshot.tensors))

    @cached_property
    def on_disk(self) -> asyncio.Future[Path]:
        """Return the folder that holds this version, whole and durable."""
        return asyncio.ensure_future(self._write())

    async def _write(self) -> Path:
        manifest = await self.manifest
        return await asyncio.to_thread(
            write_version, self._folder, manifest, self.snapshot.memory.numpy().data
        )

    async def settled(self) -> None:
        """Wait until nothing reads the memory any more for this version."""
        parts = [
            self.__dict__[n] for n in ("manifest", "expected", "on_disk") if n in self.__dict__
        ]
        await asyncio.gather(*parts, return_exceptions=True)


def _once(work: Callable[[], T]) -> asyncio.Future[T]:
    return asyncio.ensure_future(asyncio.to_thread(work))
