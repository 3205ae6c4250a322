"""Link of another node of an engine on several hosts to node 0, which orders it to fetch."""

import asyncio

from typing_extensions import override

from slipstream.weightbus.hosts.follower import MAX_WAITING, HostFollower
from slipstream.weightbus.hosts.membership import Membership
from slipstream.wire.messages.followers import AskHost, FetchedThere, FetchToo


class EngineFollower(HostFollower):
    """A follower's link to node 0 of its engine. Use it inside one event loop."""

    def __init__(self, own: Membership) -> None:
        """Connect to nothing yet; ``open`` does."""
        super().__init__(own)
        self._last: FetchedThere | None = None
        self._taken = 0  # number of the last order to fetch
        self.fetches: asyncio.Queue[FetchToo] = asyncio.Queue(MAX_WAITING)

    @override
    async def take_order(self, order: FetchToo | AskHost) -> None:
        if isinstance(order, AskHost):
            return
        if self._last is not None and self._last.command_id == order.command_id:
            await self.send(self._last)  # the answer was lost with a connection
        elif order.command_id > self._taken:  # else an old order, late over another connection
            self._taken = order.command_id
            await self.fetches.put(order)

    async def answer(self, command_id: int, *, error: str = "", num_bytes: int = 0) -> None:
        """Tell node 0 the result of a fetch."""
        self._last = FetchedThere(
            node=self.node,
            incarnation=self.incarnation,
            command_id=command_id,
            error=error,
            num_bytes=num_bytes,
        )
        await self.send(self._last)
