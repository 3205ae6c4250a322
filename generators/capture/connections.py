"""Bounds the connections of an endpoint of agents: in all, and of one trajectory."""

import asyncio
import logging
import resource
from collections import Counter
from collections.abc import Callable

from aiohttp import web
from typing_extensions import override

from slipstream.wire.process.rarely import Rarely

IDLE_S = 60.0  # clients of HTTP close an idle connection before
_MOST = 4_096
_SHARE = 2  # of the files that this process may open: one in so many
_SPARE = 16  # of a trajectory, besides those of its calls at a time

_log = logging.getLogger(__name__)


def most_connections() -> int:
    """Return how many connections leave descriptors for all else that a generator opens."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else min(_MOST, max(1, soft // _SHARE))


class Connections:
    """Which connections are open, as far as a trajectory's key was shown on them."""

    def __init__(self, most: int) -> None:
        """Allow ``most`` in all."""
        self.most = most
        self.refused: Counter[str] = Counter()  # by whose limit it was: server or trajectory
        self._held: dict[str, set[asyncio.BaseTransport]] = {}  # by key
        self._rarely = Rarely(_log)

    async def listen(self, runner: web.AppRunner, host: str, port: int) -> asyncio.Server:
        """Listen for the requests of an application that was set up.

        Raises:
            OSError: the address cannot be bound.
        """
        http = runner.server
        if http is None:
            raise ValueError("the runner was not set up")
        made = self._factory(http, lambda: len(http.connections))
        return await asyncio.get_running_loop().create_server(made, host, port)

    def _factory(
        self, make: Callable[[], asyncio.BaseProtocol], num_open: Callable[[], int]
    ) -> Callable[[], asyncio.BaseProtocol]:
        def made() -> asyncio.BaseProtocol:
            if num_open() < self.most:
                return make()
            self.refused["server"] += 1
            self._rarely.say(
                "a connection to the endpoint of agents is refused: %d are open, of all "
                "trajectories; is an agent leaving them open? (ulimit -n has a part in it)",
                self.most,
            )
            return _Refusing()

        return made

    def admits(
        self, key: str, transport: asyncio.BaseTransport | None, *, calls_at_a_time: int
    ) -> bool:
        """True if a connection on which this key was shown is not one too many of its trajectory.

        A trajectory may have as many as ``calls_at_a_time`` and a few more.
        """
        held = {one for one in self._held.get(key, ()) if not one.is_closing()}
        is_known = transport is None or transport in held
        if not is_known and len(held) >= calls_at_a_time + _SPARE:
            self.refused["trajectory"] += 1
            self._rarely.say(
                "a connection of an agent is refused: %d of its trajectory are open", len(held)
            )
            return False
        if transport is not None:
            held.add(transport)
        self._held[key] = held
        return True

    def close(self, key: str) -> None:
        """Close all on which a key was shown."""
        for transport in self._held.pop(key, ()):
            transport.close()


class _Refusing(asyncio.BaseProtocol):
    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Hang up."""
        if isinstance(transport, asyncio.Transport):
            transport.abort()
