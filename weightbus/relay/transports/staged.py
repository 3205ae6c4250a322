"""Versions that an agent receives and checks before its engine is touched."""

from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from slipstream.weightbus.relay.member import Member
from slipstream.weightbus.relay.publication import Publication
from slipstream.weightbus.relay.transports.base import Transport, all_of
from slipstream.wire.messages.weightbus import EncodedReceive


class Staged(Transport):
    """Has agents receive a version, each by itself. For one transaction."""

    async def path(self, publication: Publication, member: Member) -> str:
        """Return where an agent finds it; empty for the relay's bulk socket.

        Raises:
            PublishError: it cannot be there.
        """
        raise NotImplementedError

    @override
    async def prepare(self, publication: Publication, members: Sequence[Member]) -> None:
        """Have the agents receive the version."""
        manifest = await publication.encoded_manifest()

        async def receive(member: Member) -> None:
            path = await self.path(publication, member)
            await member.request(
                lambda n: EncodedReceive(
                    command_id=n, manifest=manifest, path=path, is_checked=member.is_checked
                ),
                timeout_s=self._settings.receive_timeout_s,
            )

        await all_of(members, receive)


class OverTcp(Staged):
    """Agents fetch the buckets from the relay's bulk socket. For one transaction."""

    name: ClassVar[str] = "tcp"

    @override
    async def path(self, publication: Publication, member: Member) -> str:
        return ""
