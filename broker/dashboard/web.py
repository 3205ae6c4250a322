"""HTTP on the loopback interface: the page, its live figures, /metrics. Read-only."""

import asyncio
import hmac
import logging
import os
import secrets
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Protocol

import msgspec
from aiohttp import web

from broker.dashboard.advisories import Advisory
from broker.dashboard.history import HistoryColumns
from broker.dashboard.items import Letter, RecordedItems
from broker.dashboard.metrics import render_metrics
from broker.dashboard.recorder import Look
from wire.errors import ConfigError
from wire.status import RunStatus

_log = logging.getLogger(__name__)
_OWN = ("127.0.0.1", "localhost")
_PATIENCE_S = 10.0  # for a browser that does not read
_MAX_QUERY = 200
_MAX_DIGITS = 15
_COOKIE = "slipstream_token"
_MAX_VIEWERS = 32
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
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Source(Protocol):
    """What the page shows: a run that goes on, or what is left of one."""

    @property
    def look(self) -> Look:
        """Return what was seen last."""

    def columns(self) -> HistoryColumns:
        """Return how it came to that."""

    def steps_after(self, step: float) -> list[dict[str, float | None]]:
        """Return the rows of learner steps after this one."""

    def letters(self) -> list[Letter]:
        """Return the newest dead letters."""

    async def next_look(self) -> None:
        """Return when there is something new, or after a while."""


class _State(msgspec.Struct):
    """The answer to /state.json."""

    status: RunStatus
    advisories: list[Advisory]
    live: bool
    history: HistoryColumns


class _Event(msgspec.Struct):
    """What is sent every second."""

    status: RunStatus
    advisories: list[Advisory]
    live: bool
    point: dict[str, float | None]
    steps: list[dict[str, float | None]]


class Dashboard:
    """A small web server; whoever wants to see needs the token of the address it prints."""

    def __init__(self, source: Source, items: RecordedItems, *, host: str, port: int) -> None:
        """Prepare to serve.

        Args:
            source: of the figures.
            items: recorded trajectories.
            host: address to listen at.
            port: 0 lets the system choose.
        """
        self._source = source
        self._items = items
        self._host = host
        self._port = port
        self._token = secrets.token_urlsafe(16)
        self._viewers = 0
        self._reading = asyncio.Lock()  # one reader of the run folder at a time
        self._runner: web.AppRunner | None = None
        self.address = ""

    async def start(self) -> str:
        """Listen and return the address to open."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._page)
        app.router.add_get("/static/{name}", self._static)
        app.router.add_get("/events", self._events)
        app.router.add_get("/state.json", self._state)
        app.router.add_get("/status.json", self._json)
        app.router.add_get("/items", self._find)
        app.router.add_get("/trajectory", self._trajectory)
        app.router.add_get("/dead_letters", self._letters)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"cannot serve the page at {self._host}:{self._port} (broker.dashboard.host, "
                f"broker.dashboard.port): {os.strerror(error.errno or 0)}"
            ) from error
        port = self._runner.addresses[0][1]
        self.address = f"http://{self._host}:{port}/?token={self._token}"
        return self.address

    async def stop(self) -> None:
        """Close all connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.host.rsplit(":", 1)[0]
        if host not in {self._host, *_OWN}:
            raise web.HTTPForbidden(text="unknown host name\n")
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        offered = (request.query.get("token"), request.cookies.get(_COOKIE), bearer)
        if not any(self._is_token(text) for text in offered if text):
            raise web.HTTPUnauthorized(text="open the address that `slipstream status` prints\n")
        response = await handler(request)
        if not response.prepared:
            response.headers.update(_HEADERS)
        return response

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(errors="replace"), self._token.encode())

    async def _page(self, _request: web.Request) -> web.StreamResponse:
        response = web.Response(text=_resource("page.html"), content_type="text/html")
        response.set_cookie(_COOKIE, self._token, httponly=True, samesite="Strict")
        return response

    async def _static(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        kind = _TYPES.get(PurePosixPath(name).suffix)
        found = next((f for f in _FOLDERS if name in _names(f)), None)
        if kind is None or found is None:
            raise web.HTTPNotFound
        return web.Response(text=_resource(name, found), content_type=kind)

    async def _state(self, _request: web.Request) -> web.StreamResponse:
        look = self._source.look
        state = _State(look.status, look.advisories, look.live, self._source.columns())
        return _json(msgspec.json.encode(state))

    async def _json(self, _request: web.Request) -> web.StreamResponse:
        return _json(msgspec.json.encode(self._source.look.status))

    async def _metrics(self, _request: web.Request) -> web.StreamResponse:
        body, content_type = render_metrics(self._source.look.status)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _find(self, request: web.Request) -> web.StreamResponse:
        text = request.query.get("q", "")[:_MAX_QUERY]
        lag = _number(request, "lag") if "lag" in request.query else None
        async with self._reading:
            found = await asyncio.to_thread(self._items.find, text, lag=lag)
        return _json(msgspec.json.encode(found))

    async def _letters(self, _request: web.Request) -> web.StreamResponse:
        return _json(msgspec.json.encode({"letters": self._source.letters()}))

    async def _trajectory(self, request: web.Request) -> web.StreamResponse:
        group, sibling = _number(request, "group"), _number(request, "sibling")
        async with self._reading:
            found = await asyncio.to_thread(self._items.trajectory, group, sibling)
        return _json(msgspec.json.encode(found))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self._viewers >= _MAX_VIEWERS:
            raise web.HTTPServiceUnavailable(text=f"more than {_MAX_VIEWERS} viewers\n")
        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        self._viewers += 1
        step = float(self._source.look.status.steps)
        try:
            while True:
                look = self._source.look
                step = min(step, float(look.status.steps))  # the run may go back
                event = _Event(
                    look.status,
                    look.advisories,
                    look.live,
                    look.point,
                    self._source.steps_after(step),
                )
                step = float(look.status.steps)
                # Whoever does not read holds up nobody but this loop.
                async with asyncio.timeout(_PATIENCE_S):
                    await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
                await self._source.next_look()
        except (ConnectionResetError, TimeoutError):
            return response
        finally:
            self._viewers -= 1


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "")
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise web.HTTPBadRequest(text=f"{name} must be a number\n")
    return int(text)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _names(folder: str) -> set[str]:
    return {one.name for one in (files("broker.dashboard") / folder).iterdir()}


def _resource(name: str, folder: str = ".") -> str:
    return (files("broker.dashboard") / folder / name).read_text("utf-8")
