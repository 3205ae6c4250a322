"""HTTP on the loopback interface: the page, its live figures, /metrics. Read-only."""

import asyncio
import hmac
import logging
import os
import secrets
from collections.abc import Awaitable, Callable
from importlib.resources import files

import msgspec
from aiohttp import web

from broker.dashboard.metrics import render_metrics
from wire.errors import ConfigError
from wire.status import RunStatus

_log = logging.getLogger(__name__)
_HOST = "127.0.0.1"
_INTERVAL_S = 1.0
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
_FILES = {"page.js": "text/javascript", "page.css": "text/css"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Dashboard:
    """A small web server; whoever wants to see needs the token of the address it prints."""

    def __init__(self, status: Callable[[], RunStatus], *, port: int) -> None:
        self._status = status
        self._port = port
        self._token = secrets.token_urlsafe(16)
        self._viewers = 0
        self._runner: web.AppRunner | None = None
        self.address = ""

    async def start(self) -> str:
        """Listen and return the address to open."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._page)
        app.router.add_get("/static/{name}", self._static)
        app.router.add_get("/events", self._events)
        app.router.add_get("/status.json", self._json)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, _HOST, self._port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"cannot serve the page at port {self._port} (broker.dashboard.port): "
                f"{os.strerror(error.errno or 0)}"
            ) from error
        port = self._runner.addresses[0][1]
        self.address = f"http://{_HOST}:{port}/?token={self._token}"
        return self.address

    async def stop(self) -> None:
        """Close all connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.host.rsplit(":", 1)[0]
        if host not in {_HOST, "localhost"}:
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
        if name not in _FILES:
            raise web.HTTPNotFound
        return web.Response(text=_resource(name), content_type=_FILES[name])

    async def _json(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._encoded(), content_type="application/json")

    async def _metrics(self, _request: web.Request) -> web.StreamResponse:
        body, content_type = render_metrics(self._status())
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self._viewers >= _MAX_VIEWERS:
            raise web.HTTPServiceUnavailable(text=f"more than {_MAX_VIEWERS} viewers\n")
        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        self._viewers += 1
        try:
            while True:
                await response.write(b"data: " + self._encoded() + b"\n\n")
                await asyncio.sleep(_INTERVAL_S)
        except ConnectionResetError:
            return response
        finally:
            self._viewers -= 1

    def _encoded(self) -> bytes:
        return msgspec.json.encode(self._status())


def _resource(name: str) -> str:
    return (files("broker.dashboard") / name).read_text("utf-8")
