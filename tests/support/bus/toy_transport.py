"""A transport for tests only: each engine gets a folder of its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from slipstream.weightbus.relay.member import Member
from slipstream.weightbus.relay.publication import Publication
from slipstream.weightbus.relay.transports.base import Transport, all_of
from slipstream.weightbus.version.disk import write_version
from slipstream.wire.messages.weightbus import LoadReceived, Receive


class OwnFolder(Transport):
    """Writes the version once per engine, into weightbus.folder."""

    name: ClassVar[str] = "own-folder"

    @override
    async def prepare(self, publication: Publication, members: Sequence[Member]) -> None:
        manifest = await publication.manifest()
        data = publication.snapshot.memory.numpy().data
        parent = Path(self._settings.folder)
        paths = {one: write_version(parent / one.name, manifest, data) for one in members}
        await all_of(
            members, lambda m: m.request(lambda n: Receive(command_id=n, path=str(paths[m])))
        )

    @override
    async def load(self, publication: Publication, members: Sequence[Member]) -> None:
        await all_of(members, lambda m: m.request(lambda n: LoadReceived(command_id=n)))
