"""Versions that an agent receives and checks before its engine is touched."""

from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.relay.member import Member
from slipstream.weightbus.relay.publication import Publication
from slipstream.weightbus.relay.transports.base import (
    MembersFailedError,
    RelayState,
    Transport,
    all_of,
)
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.weightbus import LoadReceived, Receive


class Staged(Transport):
    """Receives, then loads. For one transaction."""

    def __init__(self, settings: WeightBusSection, state: RelayState) -> None:
        super().__init__(settings, state)
        self._timeout_s = settings.receive_timeout_s
        self._received: set[Member] = set()

    async def _path(self, publication: Publication) -> str:
        """Return where the agents find it; empty for the relay's bulk socket."""
        raise NotImplementedError

    @override
    async def prepare(self, publication: Publication, members: Sequence[Member]) -> None:
        """Have the agents receive the version, unless they did."""
        waiting = [member for member in members if member not in self._received]
        if not waiting:
            return
        try:
            path = await self._path(publication)
        except PublishError as error:
            raise MembersFailedError(dict.fromkeys(members, str(error))) from error
        limit = self._timeout_s
        await all_of(
            waiting,
            lambda m: m.request(
                lambda n: Receive(command_id=n, path=path, is_checked=m.is_checked), timeout_s=limit
            ),
        )
        self._received.update(waiting)

    @override
    async def load(self, publication: Publication, members: Sequence[Member]) -> None:
        """Have the engines load the received bytes."""
        limit = self._timeout_s
        await all_of(
            members, lambda m: m.request(lambda n: LoadReceived(command_id=n), timeout_s=limit)
        )


class OverTcp(Staged):
    """Agents fetch the buckets from the relay's bulk socket. For one transaction."""

    name: ClassVar[str] = "tcp"

    @override
    async def _path(self, publication: Publication) -> str:
        return ""
