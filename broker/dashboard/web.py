"""The page, its live figures and /metrics over HTTP. Read-only.

It listens where broker.dashboard.host says, on the loopback interface by default, and
answers only requests with its token and a host name that it knows.
"""

import asyncio
from contextlib import suppress
from pathlib import Path

import msgspec
from aiohttp import web
from typing_extensions import override

from slipstream.broker.dashboard.advice_process import AdviceProcess
from slipstream.broker.dashboard.encoding import EventEncoder, RunSource, StateEncoder
from slipstream.broker.dashboard.items import RecordedItems
from slipstream.broker.dashboard.logs import newest_lines
from slipstream.broker.dashboard.metrics import render_metrics
from slipstream.broker.dashboard.recorder import Snapshot
from slipstream.broker.dashboard.site import (
    FolderReader,
    PageServer,
    abort,
    answer,
    json_answer,
    number,
)
from slipstream.broker.history.compare.runs import sampling_of
from slipstream.broker.history.compare.settings_diff import read_settings
from slipstream.wire.errors import ConfigError, ImageError
from slipstream.wire.files.image_folder import ImageFolder
from slipstream.wire.files.run_folder import IMAGES
from slipstream.wire.messages.images import is_digest
from slipstream.wire.models.pixels import BadImageError, thumbnail_file

_PATIENCE_S = 10.0  # limit for a browser that does not read
_CHUNK = 64 * 1024
_READ_S = 5.0  # limit for reading the run folder
_QUIET_S = 15.0  # without a new snapshot, after which the old one is sent again
_MAX_QUERY = 200
MAX_VIEWERS = 32
THUMBNAIL = 320  # most pixels of a side


class Dashboard(PageServer):
    """The page of one run."""

    def __init__(
        self,
        source: RunSource,
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
        super().__init__("page.html", host=host, port=port, folder=folder, patience_s=patience_s)
        self._source = source
        self._items = items
        self._reader = FolderReader(read_s)
        self._events_of = EventEncoder()
        self._states = StateEncoder(source)
        self._advice = AdviceProcess(items.folder)
        self.num_viewers = 0  # viewers of the stream
        for path, handler in {
            "/status.json": self._json,
            "/why.json": self._why,
            "/items": self._find,
            "/trajectory": self._trajectory,
            "/image": self._image,
            "/dead_letters": self._letters,
            "/logs.json": self._logs,
            "/about.json": self._about,
            "/expected.json": self._expect,
            "/metrics": self._metrics,
        }.items():
            self.get(path, handler)
        self.get("/events", self._events, allow_head=False)
        self.get("/state.json", self._state, allow_head=False)

    @override
    async def stop(self) -> None:
        """Close all connections."""
        await self._advice.stop()
        await super().stop()

    async def _why(self, _request: web.Request) -> web.StreamResponse:
        return answer(self.files.get("why.json", b"{}"), "application/json")

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
            async with asyncio.timeout(self.patience_s):
                await response.prepare(request)
            with memoryview(body) as view:  # aiohttp would copy all of it
                for start in range(0, len(body), _CHUNK):
                    async with asyncio.timeout(self.patience_s):
                        await response.write(view[start : start + _CHUNK])
        except (ConnectionResetError, TimeoutError):
            abort(request)
        return response

    async def _json(self, _request: web.Request) -> web.StreamResponse:
        return json_answer(self._snapshot().status)

    async def _metrics(self, _request: web.Request) -> web.StreamResponse:
        snapshot = self._snapshot()
        body, content_type = render_metrics(snapshot.status, snapshot.advisories)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _find(self, request: web.Request) -> web.StreamResponse:
        text = request.query.get("q", "")[:_MAX_QUERY]
        lag = number(request, "lag") if "lag" in request.query else None
        return json_answer(await self._reader.read(lambda: self._items.find(text, lag=lag)))

    async def _letters(self, _request: web.Request) -> web.StreamResponse:
        return json_answer({"letters": self._source.letters()})

    async def _logs(self, _request: web.Request) -> web.StreamResponse:
        logs = await self._reader.read(lambda: newest_lines(self._items.folder))
        return json_answer({"logs": logs})

    async def _expect(self, _request: web.Request) -> web.StreamResponse:
        return json_answer(self._advice.ask())

    async def _about(self, _request: web.Request) -> web.StreamResponse:
        settings = await self._reader.read(lambda: read_settings(self._items.folder))
        return json_answer({"eval_sampling": sampling_of(settings.get("eval.temperature", ""))})

    async def _trajectory(self, request: web.Request) -> web.StreamResponse:
        group, sibling = number(request, "group"), number(request, "sibling")
        found = await self._reader.read(lambda: self._items.trajectory(group, sibling))
        letters = {letter.group_id: letter for letter in self._source.letters()}
        if (letter := letters.get(group)) is not None and not found.found:
            prompt = found.prompt or letter.prompt
            found = msgspec.structs.replace(found, prompt=prompt, failures=letter.failures)
        return json_answer(found)

    async def _image(self, request: web.Request) -> web.StreamResponse:
        """Answer with a small copy of an image of the run folder."""
        digest = request.query.get("digest", "")
        if not is_digest(digest):
            raise web.HTTPBadRequest(text="digest must be 64 hexadecimal digits\n")
        images = ImageFolder(self._items.folder / IMAGES)
        try:
            small = await self._reader.read(lambda: thumbnail_file(images.read(digest), THUMBNAIL))
        except (ImageError, BadImageError, ConfigError) as error:  # also where there is no pillow
            raise web.HTTPNotFound(text=f"{error}\n") from error
        return web.Response(body=small, content_type="image/png")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        after = float(number(request, "after")) if "after" in request.query else None
        step = float(self._snapshot().status.steps) if after is None else after
        if self.num_viewers >= MAX_VIEWERS:
            raise web.HTTPServiceUnavailable(text=f"more than {MAX_VIEWERS} viewers\n")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self.num_viewers += 1
        try:
            async with asyncio.timeout(self.patience_s):
                await response.prepare(request)
            await self._stream(response, step)
        except (ConnectionResetError, TimeoutError):
            abort(request)  # a graceful end would wait for unread data
        finally:
            self.num_viewers -= 1
        return response

    async def _stream(self, response: web.StreamResponse, step: float) -> None:
        """Send an event per snapshot, from learner step ``step`` on, until the browser leaves."""
        while True:
            snapshot = self._snapshot()
            step = min(step, float(snapshot.status.steps))  # the run may go back
            event = b""
            with self.errors.suppress("events"):
                event = await self._events_of.encoded(snapshot, step, self._source)
                step = float(snapshot.status.steps)
            async with asyncio.timeout(self.patience_s):
                await response.write(event)
            with suppress(TimeoutError):
                async with asyncio.timeout(_QUIET_S):
                    await self._source.next_change()
