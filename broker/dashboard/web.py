"""The page, its live figures and /metrics over HTTP. Read-only.

It listens where broker.dashboard.host says, on the loopback interface by default, and
answers only requests with its token and a host name that it knows.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec
from aiohttp import web

from slipstream.broker.dashboard.door import (
    Door,
    is_loopback,
    known_names,
    machine_names,
    name_of,
    plain,
    reachable,
)
from slipstream.broker.dashboard.encoding import EventEncoder, Source, StateEncoder
from slipstream.broker.dashboard.items import RecordedItems
from slipstream.broker.dashboard.metrics import render_metrics
from slipstream.broker.dashboard.recorder import ErrorLog, Snapshot
from slipstream.wire.errors import ConfigError

_log = logging.getLogger(__name__)
_PATIENCE_S = 10.0  # for a browser that does not read
_SLOWEST_BYTES_PER_S = 32 * 1024  # of one that reads: large answers get more time
_CHUNK = 64 * 1024
_READ_S = 5.0  # for the run folder
_NAMES_S = 5.0  # for a name server
_QUIET_S = 15.0  # without a new snapshot, after which the old one is sent again
_IDLE_S = 75.0  # of a connection without requests
_MAX_QUERY = 200
_MAX_DIGITS = 15
MAX_VIEWERS = 32
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_TYPES = {".js": "text/javascript", ".css": "text/css"}
_FOLDERS = (".", "vendor")
_FILES = files("slipstream.broker.dashboard") / "page"
_PAGE, _WHY = "page.html", "why.json"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")


class Dashboard:
    """A small web server; requests need the token of the address it prints."""

    def __init__(
        self,
        source: Source,
        items: RecordedItems,
        *,
        host: str,
        port: int,
        folder: Path | None = None,
        patience_s: float = _PATIENCE_S,
        read_s: float = _READ_S,
    ) -> None:
        """Prepare to serve; port 0 is the previous one, or one chosen by the system.

        The token and the port are kept in ``folder``, of the run. ``patience_s`` is for a browser
        that does not read, ``read_s`` for the run folder.
        """
        self._source = source
        self._items = items
        self._host = host
        self._port = port
        self._patience_s = patience_s
        self._read_s = read_s
        self._door = Door(folder)
        self._names = known_names(host)
        self._files: Mapping[str, bytes] = {}
        self._events_of = EventEncoder()
        self._states = StateEncoder(source)
        self._errors = ErrorLog()
        self._reading = asyncio.Lock()  # one reader of the run folder at a time
        self._runner: web.AppRunner | None = None
        self.num_viewers = 0  # of the stream
        self.address = ""

    async def start(self) -> str:
        """Listen and return the address to open.

        Raises:
            ConfigError: this host and port cannot be listened at.
        """
        self._files = await asyncio.to_thread(_resources)
        if not is_loopback(self._host):
            try:
                async with asyncio.timeout(_NAMES_S):
                    names = await asyncio.to_thread(machine_names)
            except TimeoutError:  # of a name server
                names = {socket.gethostname()}
            self._names = known_names(self._host, names)
        app = web.Application(middlewares=[self._guard])
        app.on_response_prepare.append(_add_headers)
        app.router.add_get("/", self._page)
        app.router.add_get("/static/{name}", self._static)
        app.router.add_get("/events", self._events, allow_head=False)
        app.router.add_get("/state.json", self._state, allow_head=False)
        app.router.add_get("/status.json", self._json)
        app.router.add_get("/why.json", self._why)
        app.router.add_get("/items", self._find)
        app.router.add_get("/trajectory", self._trajectory)
        app.router.add_get("/dead_letters", self._letters)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=1.0, keepalive_timeout=_IDLE_S
        )
        await self._runner.setup()
        self._door.keep(await self._listen(self._runner))
        self.address = f"http://{reachable(self._host)}:{self._door.port}/?token={self._door.token}"
        return self.address

    async def stop(self) -> None:
        """Close all connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _listen(self, runner: web.AppRunner) -> int:
        """Listen at the port of the settings, else of the last time, else at any; return it."""
        if not self._port and self._door.port:
            with suppress(OSError):
                return await _open_site(runner, self._host, self._door.port)
        try:
            return await _open_site(runner, self._host, self._port)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise ConfigError(
                f"cannot serve the page at {self._host}:{self._port} (broker.dashboard.host, "
                f"broker.dashboard.port): {reason}"
            ) from error

    @property
    def _cookie(self) -> str:
        """Name of the cookie; other pages of this host, at other ports, have theirs."""
        return f"slipstream_token_{self._door.port}"

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._let_in(request)
        try:
            response = await handler(request)
        except (web.HTTPException, ConnectionError):
            raise
        except Exception:
            resource = request.match_info.route.resource
            with self._errors.suppress(resource.canonical if resource else "an answer"):
                raise
            raise web.HTTPInternalServerError(text="see the broker's log\n") from None
        if not response.prepared:
            patience_s = self._patience_s + (response.content_length or 0) / _SLOWEST_BYTES_PER_S
            try:
                async with asyncio.timeout(patience_s):
                    await response.prepare(request)
                    await response.write_eof()
            except TimeoutError:  # a viewer that does not read is cut off
                _abort(request)
        return response

    def _let_in(self, request: web.Request) -> None:
        name = name_of(request.headers.get("Host", ""))
        transport = request.transport
        reached = transport.get_extra_info("sockname") if transport is not None else None
        if name not in self._names and name != (plain(reached[0]) if reached else ""):
            raise web.HTTPForbidden(text="unknown host name\n")
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        offered = (request.query.get("token"), request.cookies.get(self._cookie), bearer)
        if not any(self._door.opens_to(text) for text in offered if text):
            raise web.HTTPUnauthorized(text="open the address that `slipstream status` prints\n")

    async def _page(self, _request: web.Request) -> web.StreamResponse:
        response = _answer(self._files[_PAGE], "text/html")
        response.set_cookie(self._cookie, self._door.token, httponly=True, samesite="Strict")
        return response

    async def _static(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        kind = _TYPES.get(PurePosixPath(name).suffix)
        if kind is None or name not in self._files:
            raise web.HTTPNotFound
        return _answer(self._files[name], kind)

    async def _why(self, _request: web.Request) -> web.StreamResponse:
        return _answer(self._files.get(_WHY, b"{}"), "application/json")

    def _snapshot(self) -> Snapshot:
        snapshot = self._source.snapshot
        if snapshot is None:
            raise web.HTTPServiceUnavailable(
                text="the state of the run cannot be read; see the broker's log\n"
            )
        return snapshot

    async def _state(self, request: web.Request) -> web.StreamResponse:
        self._snapshot()
        body = await self._states.encoded()
        response = web.StreamResponse()
        response.content_type = "application/json"
        response.content_length = len(body)
        try:
            async with asyncio.timeout(self._patience_s):
                await response.prepare(request)
            with memoryview(body) as view:  # aiohttp would copy all of it
                for start in range(0, len(body), _CHUNK):
                    async with asyncio.timeout(self._patience_s):
                        await response.write(view[start : start + _CHUNK])
        except (ConnectionResetError, TimeoutError):
            _abort(request)
        return response

    async def _json(self, _request: web.Request) -> web.StreamResponse:
        return _json(self._snapshot().status)

    async def _metrics(self, _request: web.Request) -> web.StreamResponse:
        snapshot = self._snapshot()
        body, content_type = render_metrics(snapshot.status, snapshot.advisories)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _find(self, request: web.Request) -> web.StreamResponse:
        text = request.query.get("q", "")[:_MAX_QUERY]
        lag = _number(request, "lag") if "lag" in request.query else None
        return _json(await self._read(lambda: self._items.find(text, lag=lag)))

    async def _letters(self, _request: web.Request) -> web.StreamResponse:
        return _json({"letters": self._source.letters()})

    async def _trajectory(self, request: web.Request) -> web.StreamResponse:
        group, sibling = _number(request, "group"), _number(request, "sibling")
        found = await self._read(lambda: self._items.trajectory(group, sibling))
        letter = next((one for one in self._source.letters() if one.group_id == group), None)
        if letter is not None and not found.found:
            prompt = found.prompt or letter.prompt
            found = msgspec.structs.replace(found, prompt=prompt, failures=letter.failures)
        return _json(found)

    async def _read(self, call: Callable[[], T]) -> T:
        """Read the run folder in a thread; the next reader waits until the thread is done."""

        def done(reading: "asyncio.Future[T]") -> None:
            self._reading.release()
            if not reading.cancelled():
                reading.exception()  # every waiter has it; there may be none

        try:
            async with asyncio.timeout(self._read_s):
                await self._reading.acquire()
                reading = asyncio.ensure_future(asyncio.to_thread(call))
                reading.add_done_callback(done)
                return await asyncio.shield(reading)
        except TimeoutError:
            raise web.HTTPServiceUnavailable(
                text=f"the run folder was not read within {self._read_s:g} s: its disk is slow, or "
                "others ask as well; try again\n"
            ) from None

    async def _events(self, request: web.Request) -> web.StreamResponse:
        after = float(_number(request, "after")) if "after" in request.query else None
        step = float(self._snapshot().status.steps) if after is None else after
        if self.num_viewers >= MAX_VIEWERS:
            raise web.HTTPServiceUnavailable(text=f"more than {MAX_VIEWERS} viewers\n")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self.num_viewers += 1
        try:
            async with asyncio.timeout(self._patience_s):
                await response.prepare(request)
            await self._stream(response, step)
        except (ConnectionResetError, TimeoutError):
            _abort(request)  # a graceful end would wait for unread data
        finally:
            self.num_viewers -= 1
        return response

    async def _stream(self, response: web.StreamResponse, step: float) -> None:
        """Send an event per snapshot, from learner step ``step`` on, until the browser leaves."""
        while True:
            snapshot = self._snapshot()
            step = min(step, float(snapshot.status.steps))  # the run may go back
            event = b""
            with self._errors.suppress("events"):
                event = await self._events_of.encoded(snapshot, step, self._source)
                step = float(snapshot.status.steps)
            async with asyncio.timeout(self._patience_s):
                await response.write(event)
            with suppress(TimeoutError):
                async with asyncio.timeout(_QUIET_S):
                    await self._source.next_change()


async def _open_site(runner: web.AppRunner, host: str, port: int) -> int:
    """Listen; return the port."""
    if plain(host) == "::" and socket.has_dualstack_ipv6():
        listening = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
        site: web.BaseSite = web.SockSite(runner, listening)
    else:
        site = web.TCPSite(runner, host, port)
    await site.start()
    return int(runner.addresses[0][1])


async def _add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "")
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise web.HTTPBadRequest(text=f"{name} must be a number\n")
    return int(text)


def _answer(body: bytes, content_type: str) -> web.Response:
    return web.Response(body=body, content_type=content_type, charset="utf-8")


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _resources() -> dict[str, bytes]:
    """Return the files of the page by name."""
    return {
        one.name: one.read_bytes()
        for folder in _FOLDERS
        for one in (_FILES / folder).iterdir()
        if one.is_file() and (PurePosixPath(one.name).suffix in _TYPES or one.name in {_PAGE, _WHY})
    }
