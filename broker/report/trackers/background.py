"""Trackers on a thread of their own: a slow or failing one costs the broker nothing."""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from slipstream.broker.report.trackers.base import Logged, Tracker

_log = logging.getLogger(__name__)
_MAX_WAITING = 10_000
_CLOSE_S = 10.0  # less than deploy.stop_timeout_s
_Point = tuple[int, Mapping[str, float]]


class BackgroundTrackers:
    """Hands every point to all trackers, in order. Points that cannot be logged are counted."""

    def __init__(
        self,
        trackers: Sequence[Tracker],
        logged: Logged | None = None,
        *,
        write: Callable[[Logged], None] = lambda _: None,
    ) -> None:
        """Start the thread.

        ``write`` puts down each point before it is handed over, so that none comes twice.
        """
        self._trackers = trackers
        self._logged = logged or Logged()
        self._write = write
        self.newest_step = self._logged.step  # newest step that earlier lives logged, or -1
        self._points: queue.Queue[_Point | None] = queue.Queue(_MAX_WAITING)
        self.lost: Counter[str] = Counter()  # points, by tracker
        self._thread = threading.Thread(target=self._run, name="trackers", daemon=True)
        self._thread.start()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Queue one point for each named curve; returns at once."""
        try:
            self._points.put_nowait((step, figures))
        except queue.Full:
            self._lose("all trackers", f"{_MAX_WAITING} points wait")

    def close(self) -> None:
        """Write out the queue, for at most ten seconds."""
        deadline = time.monotonic() + _CLOSE_S
        with suppress(queue.Full):
            self._points.put(None, timeout=_CLOSE_S)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            _log.warning("trackers did not end in %.0f s; their last points are lost", _CLOSE_S)

    def _run(self) -> None:
        while (point := self._points.get()) is not None:
            self._put_down(*point)
            for tracker in self._trackers:
                try:
                    tracker.log(*point)
                except Exception as error:  # noqa: BLE001 foreign code may raise anything
                    self._lose(type(tracker).__name__, repr(error))
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001 foreign code may raise anything
                _log.warning("%s did not end in order: %r", type(tracker).__name__, error)

    def _put_down(self, step: int, figures: Mapping[str, float]) -> None:
        self._logged.add(step, figures)
        try:
            self._write(self._logged)
        except OSError as error:
            _log.warning("that trackers got step %d was not written: %s", step, error)

    def _lose(self, name: str, why: str) -> None:
        self.lost[name] += 1
        if self.lost[name].bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...
            _log.warning("%s: %d points not logged: %s", name, self.lost[name], why)
