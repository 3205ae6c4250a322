"""A transport for tests only: each engine gets a folder of its own."""

from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from slipstream.weightbus.relay.member import Member
from slipstream.weightbus.relay.publication import Publication
from slipstream.weightbus.relay.transports.staged import Staged
from slipstream.weightbus.version.disk import write_version


class OwnFolder(Staged):
    """Writes the version once per engine, into weightbus.folder."""

    name: ClassVar[str] = "own-folder"

    @override
    async def path(self, publication: Publication, member: Member) -> str:
        manifest = await publication.manifest()
        data = publication.snapshot.memory.numpy().data
        return str(write_version(Path(self._settings.folder) / member.name, manifest, data))
