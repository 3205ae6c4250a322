"""The broker's own page and web server, fed with a sample run."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from typing_extensions import override

from slipstream.broker.dashboard.comparison import ComparisonPage
from slipstream.broker.dashboard.items import RecordedItems
from slipstream.broker.dashboard.recorder import Snapshot
from slipstream.broker.dashboard.web import Dashboard
from slipstream.broker.history.columns import HistoryColumns
from slipstream.broker.history.trajectories import Found, Letter, Trajectory
from tests.browser import samples

_EVERY_S = 0.5


class SampleSource:
    """Serves one sample run; streams flow until ``cut`` and again after ``mend``."""

    def __init__(self, run: samples.Run) -> None:
        self.run = run
        self.advisories = run.advisories()
        self.advice_ready = True
        self.asked_after: list[float] = []  # the step that a viewer has, by event
        self.news: tuple[int, ...] = ()  # learner steps that every event reports
        self.waited = 0  # for something new, by all viewers
        self.every_s = _EVERY_S  # between two events
        self._row = run.rows
        self._cut = threading.Event()

    def cut(self) -> None:
        """Break all streams, and new ones as well."""
        self._cut.set()

    def mend(self) -> None:
        """Let streams flow again."""
        self._cut.clear()

    @property
    def snapshot(self) -> Snapshot:
        """Return the newest sample."""
        return Snapshot(
            status=self.run.status(),
            advisories=self.advisories,
            advice_ready=self.advice_ready,
            live=self.run.live,
            point=self.run.point(self._row) if self.waited and self.run.rows else {},
        )

    def columns(self) -> HistoryColumns:
        """Return the history."""
        return self.run.history()

    def steps_after(self, step: float) -> list[dict[str, float | None]]:
        """Return the news, whatever was sent before."""
        self.asked_after.append(step)
        return [self.run.row(step) for step in self.news]

    def letters(self) -> list[Letter]:
        """Return dead letters."""
        return self.run.letters()

    async def next_change(self) -> None:
        """Return after a while."""
        self.waited += 1
        self._row += 1
        if self._cut.is_set():
            raise ConnectionResetError
        await asyncio.sleep(self.every_s)


class SampleItems(RecordedItems):
    """Recorded trajectories that are in no run folder."""

    def __init__(self, run: samples.Run, folder: Path) -> None:
        super().__init__(folder)
        self._run = run

    @override
    def find(self, text: str = "", *, lag: int | None = None) -> Found:
        digits = text.strip().lower().removeprefix("g")
        groups = [int(digits)] if digits.isdecimal() else []  # a position is its group here
        return Found(self._run.items(text, lag), more=False, groups=groups)

    @override
    def trajectory(self, group_id: int, sibling: int) -> Trajectory:
        return self._run.trajectory(group_id, sibling)


class SampleServer(SampleSource):
    """Serves a sample run on the loopback interface, in a thread of its own."""

    def __init__(self, run: samples.Run, folder: Path) -> None:
        super().__init__(run)
        self._folder = folder
        self.address = ""
        self._loop = asyncio.new_event_loop()

    def serve(self, ready: threading.Event) -> None:
        """Serve until the loop is stopped."""
        asyncio.set_event_loop(self._loop)
        page = Dashboard(self, SampleItems(self.run, self._folder), host="127.0.0.1", port=0)
        self.address = self._loop.run_until_complete(page.start())
        ready.set()
        self._loop.run_forever()
        self.cut()
        self._loop.run_until_complete(page.stop())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def stop(self) -> None:
        """Have the thread end."""
        self._loop.call_soon_threadsafe(self._loop.stop)


@contextmanager
def served(run: samples.Run, folder: Path = Path("/nonexistent")) -> Iterator[SampleServer]:
    """Serve a sample run; its folder holds settings and logs."""
    server = SampleServer(run, folder)
    ready = threading.Event()
    thread = threading.Thread(target=server.serve, args=(ready,), daemon=True)
    thread.start()
    assert ready.wait(5)
    try:
        yield server
    finally:
        server.stop()
        thread.join(5)


@contextmanager
def served_comparison(folders: Sequence[Path], parent: Path | None = None) -> Iterator[str]:
    """Serve the page of several runs, or of a folder of them; the value is its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    page = ComparisonPage(folders, parent=parent, host="127.0.0.1", port=0)
    try:
        yield asyncio.run_coroutine_threadsafe(page.start(), loop).result(5)
    finally:
        asyncio.run_coroutine_threadsafe(page.stop(), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()
