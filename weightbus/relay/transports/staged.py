"""Versions that an agent receives and checks before its engine is touched."""

import logging
from collections.abc import Sequence
from typing import ClassVar, TypeAlias

from typing_extensions import override

from slipstream.weightbus.relay.chain import sources_behind
from slipstream.weightbus.relay.member import Member
from slipstream.weightbus.relay.publication import Publication
from slipstream.weightbus.relay.transports.base import Transport, all_of, slowest
from slipstream.weightbus.version.engine_checksums import engine_layout_of
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.weightbus import Admit, BulkDoor, EncodedReceive

_log = logging.getLogger(__name__)
_ADMIT_S = 2.0  # limit for an agent's answer, whatever its engine does
Sources: TypeAlias = tuple[tuple[BulkDoor, ...], ...]


class Staged(Transport):
    """Has agents receive a version, each by itself. For one transaction."""

    async def path(self, publication: Publication, member: Member) -> str:
        """Return a version's folder for an agent; empty for the relay's bulk socket.

        Raises:
            PublishError: the version cannot be written there.
        """
        raise NotImplementedError

    async def mapped(
        self,
        publication: Publication,  # noqa: ARG002 for subclasses
        member: Member,  # noqa: ARG002
    ) -> str:
        """Return the file with the version on an agent's host; empty if it is to get a copy."""
        return ""

    @override
    async def prepare(self, publication: Publication, members: Sequence[Member]) -> None:
        """Let the agents receive the version from their sources."""
        manifest = await publication.encoded_manifest()

        async def receive(member: Member) -> None:
            path = await self.path(publication, member)
            mapped = await self.mapped(publication, member)
            engine_layout = engine_layout_of(member.join)
            sources = () if path else await self._sources(publication, member)
            outcome = await member.request(
                lambda n: EncodedReceive(
                    command_id=n,
                    manifest=manifest,
                    path=path,
                    mapped=mapped,
                    may_be_read=member.on_host.num_readers > 0,
                    is_checked=member.is_checked and not publication.knows(engine_layout),
                    sources=sources,
                    first_part=member.first_part,
                ),
                timeout_s=self._settings.receive_timeout_s,
            )
            slowest(self.within_prepare, outcome.phase_seconds)
            self.fetched_bytes[member.name] = outcome.num_bytes
            if outcome.path or not mapped:
                member.fetched(outcome.path)

        await all_of(members, receive)

    async def _sources(
        self,
        publication: Publication,  # noqa: ARG002 for subclasses
        member: Member,  # noqa: ARG002
    ) -> Sources:
        """Return an agent's sources; empty for this relay's bulk socket."""
        return ()


class OverTcp(Staged):
    """Agents fetch the buckets from the relay's bulk socket. For one transaction."""

    name: ClassVar[str] = "tcp"

    @override
    async def path(self, publication: Publication, member: Member) -> str:
        return ""

    @override
    async def mapped(self, publication: Publication, member: Member) -> str:
        """Return this host's slot, or another engine's file on the agent's host."""
        if member.key:
            return await member.source()
        is_near = publication.is_whole and not publication.has_adapters  # adapters are few bytes
        return publication.path if is_near else ""

    @override
    async def _sources(self, publication: Publication, member: Member) -> Sources:
        """Ask the previous engine of the chain to serve this one; else the relay serves it."""
        if member.bulk is None:
            return ()
        parts = publication.doors(member.bulk)
        if (before := member.before) is None:
            return sources_behind(None, member.bulk, parts)
        version, limit = publication.version, min(_ADMIT_S, self._settings.timeout_s)
        try:
            await before.request(
                lambda n: Admit(command_id=n, version=version, keys=(member.key,)), timeout_s=limit
            )
        except PublishError as error:
            _log.warning("%s gets %s from the relay: %s", member.name, version.label, error)
            return sources_behind(None, member.bulk, parts)
        before.serves = member
        return sources_behind(before.join.forward, member.bulk, parts)
