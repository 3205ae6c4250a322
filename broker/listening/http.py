"""Servers of HTTP: how many connect, what they may send before a key is checked, the check itself.

A connection has 64 KiB and seconds for the head of its first request, and is closed when that one
shows no key: nothing that follows one is without.
"""

import asyncio
import hmac
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from typing_extensions import override

from slipstream.broker.listening.gate import Limit, listening_at
from slipstream.broker.listening.host_names import known_names, name_of, plain
from slipstream.wire.process.rate_limited_log import RateLimitedLog

IDLE_S = 60.0  # clients of HTTP close an idle connection before
_HEAD_S = 10.0  # in which the head of the first request must have come
_MAX_HEAD_BYTES = 64 * 1024
_END_OF_HEAD = b"\r\n\r\n"
_SPARE = 16  # connections of a key's holder beyond its calls at a time
_LAST = {401, 403, 404, 405, 417}
"""Statuses after which a connection, which may have no key, is closed; 417 precedes any check."""
_BEARER = "Bearer "

_log = logging.getLogger(__name__)


def bearer(request: web.Request) -> str:
    """Return the key in the head of a request, or an empty one."""
    return request.headers.get("Authorization", "").removeprefix(_BEARER)


def is_key(given: str, key: str) -> bool:
    """True if this is the key; in the same time for all that are not."""
    return hmac.compare_digest(given.encode(errors="replace"), key.encode())


def holder_of(given: str, keys: Iterable[str]) -> str:
    """Return the key that was given; empty if it is not one of these."""
    return next((key for key in keys if is_key(given, key)), "")


class HttpServer:
    """Listens for the requests of an application."""

    def __init__(
        self,
        app: web.Application,
        limit: Limit,
        *,
        what: str,
        idle_s: float = IDLE_S,
        shutdown_s: float = 60.0,
        cancels: bool = False,
    ) -> None:
        """Prepare; ``open`` listens.

        Args:
            app: Application that checks the keys.
            limit: Most connections in all; further ones are closed.
            what: Name of the server in logs.
            idle_s: Time without a request until a connection is closed.
            shutdown_s: Time for answers under way when it closes.
            cancels: True if a client that goes away cancels its request.
        """
        self.limit = limit
        self.names: frozenset[str] = frozenset()  # host names of requests, besides the address
        self.refused: Counter[str] = Counter()  # refusals by limit: server, key, head
        self._what = what
        self._head_s = min(_HEAD_S, idle_s)
        self._held: dict[str, set[asyncio.BaseTransport]] = {}  # connections by key
        self._rarely = RateLimitedLog(_log)
        app.middlewares.insert(0, self._guard)
        app.on_response_prepare.append(_hang_up)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=cancels,
            access_log=None,
            keepalive_timeout=idle_s,
            shutdown_timeout=shutdown_s,
            logger=_seldom(what),
        )
        self._server: asyncio.Server | None = None

    async def open(self, host: str, port: int) -> tuple[str, int]:
        """Listen; return where.

        Raises:
            OSError: the address cannot be bound.
        """
        if self._runner.server is None:
            await self._runner.setup()
        loop = asyncio.get_running_loop()
        listening = await asyncio.to_thread(listening_at, host, port)
        self.names |= known_names(host)
        self._server = await loop.create_server(self._made, sock=listening)
        address = listening.getsockname()
        return str(address[0]), int(address[1])

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._runner.cleanup()

    @property
    def num_open(self) -> int:
        """Connections that are open."""
        return len(self._runner.server.connections) if self._runner.server is not None else 0

    # ---- connections ---------------------------------------------------------

    def _made(self) -> asyncio.BaseProtocol:
        http = self._runner.server
        if http is None or self.num_open >= self.limit.most:
            self.refused["server"] += 1
            self._rarely.say(
                "a connection to %s is refused: %d are open, of all that have a key or none (%s)",
                self._what,
                self.limit.most,
                self.limit.setting,
            )
            return _Refusing()
        return _HeadFirst(http(), self._head_s, self._refuse_head)

    def _refuse_head(self) -> None:
        self.refused["head"] += 1
        self._rarely.say(
            "a connection to %s is refused: the head of its first request is longer than %d bytes",
            self._what,
            _MAX_HEAD_BYTES,
        )

    def admits(
        self, key: str, transport: asyncio.BaseTransport | None, *, calls_at_a_time: int
    ) -> bool:
        """True if a connection on which this key was shown is not one too many of its holder.

        A holder may have as many as ``calls_at_a_time`` and a few more.
        """
        held = {connection for connection in self._held.get(key, ()) if not connection.is_closing()}
        is_known = transport is None or transport in held
        if not is_known and len(held) >= calls_at_a_time + _SPARE:
            self.refused["key"] += 1
            self._rarely.say(
                "a connection to %s is refused: %d with its key are open", self._what, len(held)
            )
            return False
        if transport is not None:
            held.add(transport)
        self._held[key] = held
        return True

    def end(self, key: str) -> None:
        """Close all connections on which a key was shown."""
        for transport in self._held.pop(key, ()):
            transport.close()

    # ---- requests ------------------------------------------------------------

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuse names of others."""
        self._refuse_unknown_name(request)
        return await handler(request)

    def _refuse_unknown_name(self, request: web.Request) -> None:
        name = name_of(request.headers.get("Host", ""))
        transport = request.transport
        reached = transport.get_extra_info("sockname") if transport is not None else None
        if name not in self.names and name != (plain(reached[0]) if reached else ""):
            raise web.HTTPForbidden(text="unknown host name\n")


async def _hang_up(_request: web.Request, response: web.StreamResponse) -> None:
    """Hang up on a client that may have shown no key."""
    if response.status in _LAST:
        response.force_close()
        response.headers["Connection"] = "close"  # its client does not ask on it again


class _HeadFirst(asyncio.Protocol):
    """Hands on what arrives, within limits until the head of the first request is whole."""

    def __init__(
        self, served: asyncio.Protocol, head_s: float, on_refused: Callable[[], None]
    ) -> None:
        self._served = served
        self._on_refused = on_refused
        self._head_s = head_s
        self._transport: asyncio.Transport | None = None
        self._late: asyncio.TimerHandle | None = None
        self._num_bytes = 0
        self._tail = b""  # in which the end of the head may have begun

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self._transport = transport
            loop = asyncio.get_running_loop()
            self._late = loop.call_later(self._head_s, transport.abort)
        self._served.connection_made(transport)

    @override
    def data_received(self, data: bytes) -> None:
        if self._late is not None and self._transport is not None:
            if not self._num_bytes:  # lines before a request begins are no head
                data = data.lstrip(b"\r\n")
            seen = self._tail + data
            at = seen.find(_END_OF_HEAD)
            num_bytes = self._num_bytes + (len(data) if at < 0 else at - len(self._tail))
            if num_bytes > _MAX_HEAD_BYTES:
                self._on_refused()
                self._transport.abort()
                return
            self._num_bytes, self._tail = num_bytes, seen[-3:]
            if at >= 0:
                self._late.cancel()
                self._late = None
        self._served.data_received(data)

    @override
    def eof_received(self) -> bool | None:
        return self._served.eof_received()

    @override
    def pause_writing(self) -> None:
        self._served.pause_writing()

    @override
    def resume_writing(self) -> None:
        self._served.resume_writing()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
        self._served.connection_lost(exc)


class _Refusing(asyncio.BaseProtocol):
    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Hang up."""
        if isinstance(transport, asyncio.Transport):
            transport.abort()


def _seldom(what: str) -> logging.Logger:
    """Return a logger of what anybody can cause: a line a minute, for garbage a short one."""
    garbage, failures = RateLimitedLog(_log), RateLimitedLog(_log)
    log = logging.Logger(f"{__name__}.requests")  # noqa: LOG001 of this server alone: it has a filter

    def passes(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            garbage.say("%s was sent what is no request: %s", what, type(error).__name__)
        elif record.levelno >= logging.WARNING and (num := failures.num_due()):
            line = "%s: %s (%d in the last minute or more)"
            _log.error(line, what, record.getMessage(), num, exc_info=error)
        return False

    log.addFilter(passes)
    return log
