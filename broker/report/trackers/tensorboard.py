"""The run's curves as TensorBoard event files, written without torch."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from slipstream.broker.report.trackers.base import Logged

_NOTHING = -1  # before all steps
_BEYOND_ALL = 2**63 - 1


class TensorBoardTracker:
    """One event file per life of the run."""

    def __init__(
        self, folder: Path, *, resumed_at: int | None = None, evaluated: Iterable[int] = ()
    ) -> None:
        """Start an event file.

        Points that earlier lives logged after ``resumed_at`` are hidden; None leaves all of them.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._events = EventFileWriter(str(folder))
        self._logged = Logged(_NOTHING if resumed_at is None else resumed_at, set(evaluated))
        # Readers take the first START that they see for no restart: each file begins with one.
        self._hide_from(_BEYOND_ALL if resumed_at is None else resumed_at + 1)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Add one point to each named curve, as plain scalars that every reader lists."""
        if self._logged.goes_back(step, figures):
            self._hide_from(step)
        if self._logged.repeats(step, figures):
            return
        self._logged.add(step, figures)
        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._events.add_event(
            Event(step=step, wall_time=time.time(), summary=Summary(value=values))
        )
        self._events.flush()

    def _hide_from(self, step: int) -> None:
        """Have readers forget the points of this step and later ones."""
        self._events.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))

    def close(self) -> None:
        """Flush; nothing is logged after it."""
        self._events.close()
