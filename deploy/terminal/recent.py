"""The history of a run as an observer collects it, and the advisories about it."""

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from slipstream.broker.advisories.advise import advise
from slipstream.broker.advisories.view import Advisory, Column
from slipstream.broker.history.columns import HistoryColumns, StoredState, trends_of
from slipstream.broker.history.history import RunHistory, steady_time
from slipstream.broker.history.rates import Seen
from slipstream.deploy.launch.observer import status_now
from slipstream.deploy.terminal.observe import broker_of_folder, saved_status
from slipstream.wire.errors import PeerLostError
from slipstream.wire.messages.status import RunStatus
from slipstream.wire.settings.sections import RunSection

_NOW_S = 10.0  # window of a present share
_MAX_STATES = 64  # states in that window, however often the run is polled
_EVALUATE_S = 5.0


class Recent:
    """Continues the history that the broker wrote, from states of the run as they come."""

    def __init__(
        self,
        written: HistoryColumns | None,
        *,
        high_water_bytes: int,
        fsync: str,
        now: Callable[[], float] | None = None,
    ) -> None:
        """Start with the saved history, or with nothing.

        Args:
            written: History saved by the run's broker.
            high_water_bytes: broker.high_water_bytes.
            fsync: how the store is synced; empty if unknown.
            now: unix time that never goes back; the default is such a clock.
        """
        self._high_water_bytes = high_water_bytes
        self._fsync = fsync
        self._now = now if now is not None else steady_time()
        self._history = RunHistory.of(written) if written else None
        self._evaluated_s = 0.0
        self._newest: RunStatus | None = None
        self._advisories: list[Advisory] = []
        self._states: deque[tuple[float, dict[str, Seen]]] = deque(maxlen=_MAX_STATES)
        self._steps: Mapping[str, Column] = {}

    def add(self, status: RunStatus) -> None:
        """Add the next state, unless it is there already."""
        if status is self._newest:
            return
        self._newest = status
        now_s = self._now()
        if self._history is None:
            self._history = RunHistory(began_s=now_s - status.elapsed_s)
        self._history.take(status, now_s)
        while len(self._states) > 1 and self._states[1][0] <= now_s - _NOW_S:
            self._states.popleft()
        self._states.append((now_s, {role.name: Seen.of(role) for role in status.roles}))
        self.evaluate(status)

    def evaluate(self, status: RunStatus) -> None:
        """Evaluate the rules on the history so far, once every few seconds."""
        now_s = self._now()
        if self._history is not None and now_s - self._evaluated_s >= _EVALUATE_S:
            self._evaluated_s = now_s
            columns = self._history.columns()
            self._steps = columns.steps.series
            trends = trends_of(columns, high_water_bytes=self._high_water_bytes, fsync=self._fsync)
            self._advisories = advise(status, trends)

    def busy(self, process: str) -> float | None:
        """Return the share of the last seconds that a process was not waiting.

        None if it was not seen twice, or reported nothing in between.
        """
        if len(self._states) < 2:
            return None
        (_, before), (_, now) = self._states[0], self._states[-1]
        return now[process].since(before.get(process)).busy if process in now else None

    def curve(self, name: str) -> list[float]:
        """Return a figure of the learner steps so far, where they have it."""
        return [value for value in self._steps.get(name, ()) if value is not None]

    def advisories(self) -> list[Advisory]:
        """Return the advisories, the worst first."""
        return self._advisories


def recent_of(folder: Path, stored: StoredState | None) -> Recent:
    """Return the saved history of a run, with its limits."""
    broker = broker_of_folder(folder)
    return Recent(
        stored.history if stored else None,
        high_water_bytes=broker.high_water_bytes,
        fsync=broker.redis.known_fsync,
    )


def newest_status(run: RunSection, stored: StoredState | None, recent: Recent) -> RunStatus:
    """Return the state of a run, which ``recent`` takes in: of now, or the last that was written.

    Raises:
        PeerLostError: no broker answers, and none has saved its state.
    """
    try:
        status = status_now(run)
    except PeerLostError:
        saved = saved_status(run, stored)
        if saved is None:
            raise
        recent.evaluate(saved)
        return saved
    recent.add(status)
    return status
