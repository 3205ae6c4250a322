"""The run's curves as TensorBoard event files, written without torch."""

from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary import Writer
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
        events = EventFileWriter(str(folder))
        step = 0 if resumed_at is None else resumed_at + 1
        events.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
        events.close()
        self._writer = Writer(str(folder))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Add one point to each named curve."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Flush; nothing is logged after it."""
        self._writer.close()
