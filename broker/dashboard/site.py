"""A small web server with a token, for pages that only read.

It listens on the loopback interface by default, and answers only requests with its token and a
host name that it knows.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec
from aiohttp import web

from slipstream.broker.dashboard.page_access import PageAccess
from slipstream.broker.dashboard.recorder import ErrorLog
from slipstream.broker.listening.gate import limit_of
from slipstream.broker.listening.host_names import (
    is_loopback,
    known_names,
    machine_names,
    reachable,
)
from slipstream.broker.listening.http import HttpServer, bearer, is_key
from slipstream.wire.errors import ConfigError

_PATIENCE_S = 10.0  # limit for a browser that does not read
_SLOWEST_BYTES_PER_S = 32 * 1024  # large answers get more time
_NAMES_S = 5.0  # limit for a name server
_SHARE = 1 / 8  # share of the descriptors for browsers
_IDLE_S = 75.0  # idle time until a connection is closed
_MAX_DIGITS = 15
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_TYPES = {".js": "text/javascript", ".css": "text/css"}
_FOLDERS = (".", "sections", "vendor")
_FILES = files("slipstream.broker.dashboard") / "page"
_OTHER_FILES = frozenset({"page.html", "compare.html", "why.json"})
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PageServer:
    """Serves one page, the files it needs, and answers; all to requests with its token."""

    def __init__(
        self,
        page: str,
        *,
        host: str,
        port: int,
        folder: Path | None = None,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """Prepare to serve; port 0 is the previous one, or one chosen by the system.

        ``folder`` keeps the token and the port; ``patience_s`` is for a browser that does not read.
        """
        self._page_name = page
        self._host = host
        self._port = port
        self.patience_s = patience_s
        self._door = PageAccess(folder)
        self.files: Mapping[str, bytes] = {}
        self.errors = ErrorLog()
        self._app = web.Application(middlewares=[self._guard])
        self._app.on_response_prepare.append(_add_headers)
        self._http = HttpServer(
            self._app, limit_of(_SHARE), what="the page", idle_s=_IDLE_S, shutdown_s=1.0
        )
        self.get("/", self._page)
        self.get("/static/{name}", self._static)
        self.get("/favicon.ico", self._no_icon)
        self.address = ""

    def get(self, path: str, handler: Handler, *, allow_head: bool = True) -> None:
        """Have a handler answer a path; before ``start``."""
        self._app.router.add_get(path, handler, allow_head=allow_head)

    async def start(self) -> str:
        """Listen and return the address to open.

        Raises:
            ConfigError: this host and port cannot be listened at.
        """
        self.files = await asyncio.to_thread(_resources)
        if not is_loopback(self._host):
            try:
                async with asyncio.timeout(_NAMES_S):
                    names = await asyncio.to_thread(machine_names)
            except TimeoutError:  # the name server is slow
                names = {socket.gethostname()}
            self._http.names |= known_names(self._host, names)
        self._door.keep(await self._listen())
        self.address = f"http://{reachable(self._host)}:{self._door.port}/?token={self._door.token}"
        return self.address

    async def stop(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def _listen(self) -> int:
        """Listen at the port of the settings, else of the last time, else at any; return it."""
        if not self._port and self._door.port:
            with suppress(OSError):
                return (await self._http.open(self._host, self._door.port))[1]
        try:
            return (await self._http.open(self._host, self._port))[1]
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
            with self.errors.suppress(resource.canonical if resource else "an answer"):
                raise
            raise web.HTTPInternalServerError(text="see the broker's log\n") from None
        if not response.prepared:
            patience_s = self.patience_s + (response.content_length or 0) / _SLOWEST_BYTES_PER_S
            try:
                async with asyncio.timeout(patience_s):
                    await response.prepare(request)
                    await response.write_eof()
            except TimeoutError:  # a viewer that does not read is cut off
                abort(request)
        return response

    def _let_in(self, request: web.Request) -> None:
        token, cookie = self._door.token, request.cookies.get(self._cookie, "")
        is_known = is_key(cookie, self._door.cookie) or any(
            is_key(key, token) for key in (request.query.get("token", ""), bearer(request))
        )
        if not is_known:
            text = "open the address that `slipstream top --once` prints\n"
            raise web.HTTPUnauthorized(text=text)

    async def _page(self, _request: web.Request) -> web.StreamResponse:
        response = answer(self.files[self._page_name], "text/html")
        response.set_cookie(self._cookie, self._door.cookie, httponly=True, samesite="Strict")
        return response

    async def _no_icon(self, _request: web.Request) -> web.StreamResponse:
        """Answer a browser that asks for an icon, as it does of pages that may have images."""
        return web.Response(status=204)

    async def _static(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        kind = _TYPES.get(PurePosixPath(name).suffix)
        if kind is None or name not in self.files:
            raise web.HTTPNotFound
        return answer(self.files[name], kind)


class FolderReader:
    """Reads run folders in a thread, one reader at a time."""

    def __init__(self, read_s: float) -> None:
        """Give a reader this many seconds, with the time it waits for its turn."""
        self._read_s = read_s
        self._reading = asyncio.Lock()

    async def read(self, call: Callable[[], T]) -> T:
        """Return what a call returns; the next one waits until the thread is done."""

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


async def _add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)


def abort(request: web.Request) -> None:
    """Cut a connection off; a graceful end would wait for unread data."""
    if request.transport is not None:
        request.transport.abort()


def number(request: web.Request, name: str) -> int:
    """Return a whole number among the arguments of a request."""
    text = request.query.get(name, "")
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise web.HTTPBadRequest(text=f"{name} must be a number\n")
    return int(text)


def answer(body: bytes, content_type: str) -> web.Response:
    """Return an answer of text."""
    return web.Response(body=body, content_type=content_type, charset="utf-8")


def json_answer(value: object) -> web.Response:
    """Return an answer of JSON."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _resources() -> dict[str, bytes]:
    """Return the files of the page by name."""
    return {
        file.name: file.read_bytes()
        for folder in _FOLDERS
        for file in (_FILES / folder).iterdir()
        if file.is_file()
        and (PurePosixPath(file.name).suffix in _TYPES or file.name in _OTHER_FILES)
    }
