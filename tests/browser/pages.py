"""A small server of the page's files and of sample data, with the dashboard's headers."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from itertools import count

from aiohttp import web

from tests.browser import samples

_POLICY = (  # what the broker sends
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {"js": "text/javascript", "css": "text/css", "html": "text/html"}
_EVERY_S = 0.5
_VENDORED = frozenset({"uplot.js", "uplot.css"})


class SampleServer:
    """Serves one sample run; events flow until ``cut`` and again after ``mend``."""

    def __init__(self, run: samples.Run) -> None:
        self.run = run
        self.seen: list[str] = []  # paths that were asked for
        self.address = ""
        self.news: tuple[int, ...] = ()  # learner steps that every event tells
        self._cut = threading.Event()
        self._streams: set[web.StreamResponse] = set()
        self._loop = asyncio.new_event_loop()

    def cut(self) -> None:
        """End all streams and refuse new ones."""
        self._cut.set()

    def mend(self) -> None:
        """Answer again."""
        self._cut.clear()

    async def _page(self, _request: web.Request) -> web.Response:
        return _file("page.html")

    async def _static(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return _file(f"vendor/{name}" if name in _VENDORED else name)

    async def _state(self, _request: web.Request) -> web.Response:
        return web.json_response(self.run.state())

    async def _items(self, request: web.Request) -> web.Response:
        found = samples.items(request.query.get("q", ""))
        if "lag" in request.query:
            found = [row for row in found if row["lag"] == int(request.query["lag"])]
        return web.json_response({"items": found, "more": False})

    async def _trajectory(self, request: web.Request) -> web.Response:
        group, sibling = int(request.query["group"]), int(request.query["sibling"])
        return web.json_response(samples.trajectory(group, sibling))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self._cut.is_set():
            raise web.HTTPServiceUnavailable
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        with suppress(ConnectionResetError):
            for row in count(self.run.rows):
                if self._cut.is_set():
                    break
                event = json.dumps(self.run.event(row, self.news))
                await response.write(f"data: {event}\n\n".encode())
                await asyncio.sleep(_EVERY_S)
        return response

    @web.middleware
    async def _note(
        self, request: web.Request, handler: Callable[[web.Request], object]
    ) -> web.StreamResponse:
        self.seen.append(request.path_qs)
        response: web.StreamResponse = await handler(request)  # type: ignore[misc]
        if not response.prepared:
            response.headers["Content-Security-Policy"] = _POLICY
        return response

    async def _start(self) -> web.AppRunner:
        app = web.Application(middlewares=[self._note])
        app.router.add_get("/", self._page)
        app.router.add_get("/static/{name}", self._static)
        app.router.add_get("/state.json", self._state)
        app.router.add_get("/events", self._events)
        app.router.add_get("/items", self._items)
        app.router.add_get("/trajectory", self._trajectory)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.address = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        return runner

    def serve(self, ready: threading.Event) -> None:
        """Serve until the loop is stopped; runs in a thread of its own."""
        asyncio.set_event_loop(self._loop)
        runner = self._loop.run_until_complete(self._start())
        ready.set()
        self._loop.run_forever()
        self._cut.set()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def stop(self) -> None:
        """Have the thread end."""
        self._loop.call_soon_threadsafe(self._loop.stop)


@contextmanager
def served(run: samples.Run) -> Iterator[SampleServer]:
    """Serve a sample run on the loopback interface."""
    server = SampleServer(run)
    ready = threading.Event()
    thread = threading.Thread(target=server.serve, args=(ready,), daemon=True)
    thread.start()
    assert ready.wait(5)
    try:
        yield server
    finally:
        server.stop()
        thread.join(5)


def _file(name: str) -> web.Response:
    body = (files("broker.dashboard") / name).read_bytes()
    return web.Response(body=body, content_type=_TYPES[name.rsplit(".", 1)[1]])
