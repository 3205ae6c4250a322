"""Versions as files in a folder that every host sees."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.relay.member import Member
from slipstream.weightbus.relay.publication import Publication
from slipstream.weightbus.relay.transports.base import MembersFailedError, RelayState
from slipstream.weightbus.relay.transports.staged import Staged
from slipstream.weightbus.version.disk import (
    check_folder,
    copies_in,
    number_after,
    remove_copies,
    write_version,
)
from slipstream.wire.errors import PublishError


@dataclass(slots=True)
class _Copies:
    """The copies of one version."""

    offered: asyncio.Future[Path] | None = None  # copy for the next reader
    writes: list[asyncio.Future[Path]] = field(default_factory=list)

    def folders(self) -> list[Path]:
        return [copy.result() for copy in self.writes if copy.done() and copy.exception() is None]


class DiskCopies(RelayState):
    """Folders of versions: written by this relay, or left by earlier ones."""

    def __init__(self, folder: Path, *, timeout_s: float) -> None:
        """Write nothing yet; a load ordered by an earlier relay takes ``timeout_s`` at most."""
        self._folder = folder
        self._timeout_s = timeout_s
        self._left: asyncio.Future[list[Path]] | None = None  # copies of earlier relays
        self._copies: dict[Publication, _Copies] = {}

    async def path(self, publication: Publication) -> Path:
        """Return the folder that holds a version, whole and durable.

        Raises:
            PublishError: writing failed.
        """
        manifest, left = await publication.manifest(), await self._found()
        copies = self._copies.setdefault(publication, _Copies())
        if copies.offered is None:
            data = publication.snapshot.memory.numpy().data
            number = number_after(left) + len(copies.writes)
            copies.offered = publication.in_thread(
                lambda: write_version(self._folder, manifest, data, number=number)
            )
            copies.writes.append(copies.offered)
        return await asyncio.shield(copies.offered)

    async def check(self, publication: Publication) -> None:
        """Let another copy be written for the next reader if the copy on disk is damaged."""
        copies, manifest = self._copies.get(publication), await publication.manifest()
        if copies is None or copies.offered is None or not copies.offered.done():
            return
        try:
            await asyncio.to_thread(check_folder, copies.offered.result(), manifest)
        except PublishError:
            copies.offered = None

    @override
    async def run(self) -> None:
        """Remove the copies of earlier relays, once no engine can be reading them."""
        left = await self._found()
        await asyncio.to_thread(remove_copies, left, unfinished_only=True)
        await asyncio.sleep(self._timeout_s)
        await asyncio.to_thread(remove_copies, left)

    @override
    async def keep(self, wanted: Collection[Publication]) -> None:
        unwanted = [self._copies.pop(key) for key in list(self._copies) if key not in wanted]
        if folders := [folder for copies in unwanted for folder in copies.folders()]:
            await asyncio.to_thread(remove_copies, folders)

    @override
    async def close(self) -> None:
        await self.keep(())
        await asyncio.to_thread(remove_copies, await self._found())

    async def _found(self) -> list[Path]:
        if self._left is None:
            self._left = asyncio.ensure_future(asyncio.to_thread(copies_in, self._folder))
        return await asyncio.shield(self._left)


class OverDisk(Staged):
    """Agents read a folder that the relay wrote. For one transaction."""

    name: ClassVar[str] = "disk"

    def __init__(self, settings: WeightBusSection, state: RelayState) -> None:
        super().__init__(settings, state)
        if not isinstance(state, DiskCopies):
            raise TypeError(f"the state of disk is DiskCopies, not {type(state).__name__}")
        self._disk = state

    @override
    @classmethod
    def relay_state(cls, settings: WeightBusSection, folder: Path) -> DiskCopies:
        return DiskCopies(folder, timeout_s=settings.timeout_s)

    @override
    async def prepare(self, publication: Publication, members: Sequence[Member]) -> None:
        """Let the agents check the version on disk; a refused copy is written again."""
        try:
            await super().prepare(publication, members)
        except MembersFailedError:
            await self._disk.check(publication)
            raise

    @override
    async def path(self, publication: Publication, member: Member) -> str:
        return str(await self._disk.path(publication))
