"""The run's curves as TensorBoard event files, written without torch."""

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoardTracker:
    """One event file per life of the run."""

    def __init__(self, folder: Path, *, resumed_at: int | None = None) -> None:
        """Start an event file.

        Args:
            folder: of TensorBoard.
            resumed_at: the step that the run resumes from; points of earlier files beyond it
                belong to an abandoned life and are hidden.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._events = EventFileWriter(str(folder))
        step = 0 if resumed_at is None else resumed_at + 1
        self._events.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Add one point to each named curve, as plain scalars that every reader lists."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._events.add_event(
            Event(step=step, wall_time=time.time(), summary=Summary(value=values))
        )
        self._events.flush()

    def close(self) -> None:
        """Flush; nothing is logged after it."""
        self._events.close()
