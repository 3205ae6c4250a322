"""A role's time by phase, in seconds; each moment is in exactly one phase."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WAIT = "wait"
ACT = "act"  # of a generator: environments answer all of its trajectories
PHASE_TIME = "time/phase/"  # before the name of a phase, in a learner step's figures


_OPEN_S = 1.0


class PhaseClock:
    """Adds up seconds by phase. A role is always in one phase; ``wait`` is idleness."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._phase = WAIT
        self._since = now()
        self._seconds: dict[str, float] = {WAIT: 0.0}
        self._around = ""  # the phase around one that is not settled
        self.num_changes = 0  # of phase

    def enter(self, phase: str) -> str:
        """Switch to ``phase`` and return the phase that ends."""
        now = self._now()
        before = self._phase
        self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
        self._phase, self._since, self._around = phase, now, ""
        self.num_changes += 1
        return before

    def enter_within(self, phase: str) -> None:
        """Switch to ``phase``, of which ``settle`` says later how much of the time it had.

        The rest is of the phase before. Until then a second of it is nobody's: ``seconds`` never
        takes back what it has counted. Without ``settle`` all of it is of ``phase``.
        """
        around = self._around if phase == self._phase else self._phase
        self.enter(phase)
        self._around = around

    def settle(self, seconds: float) -> None:
        """Count this much since ``enter_within``, at most, and return to the phase before."""
        around = self._around
        if not around:
            return
        elapsed = self._now() - self._since
        owned = min(elapsed, max(seconds, elapsed - _OPEN_S))
        self._seconds[around] = self._seconds.get(around, 0.0) + elapsed - owned
        self._since += elapsed - owned
        self.enter(around)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Be in phase ``name`` for the duration of a block."""
        before = self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent so far in each phase, the current one included."""
        seconds = dict(self._seconds)
        phase, since = self._phase, self._since
        nobodys = _OPEN_S if self._around else 0.0
        seconds[phase] = seconds.get(phase, 0.0) + max(0.0, self._now() - since - nobodys)
        return seconds


def busy_share(phase_seconds: dict[str, float]) -> float:
    """Return the share of the time that was not waiting, 0.0 before any time has passed."""
    total = sum(phase_seconds.values())
    return 1.0 - phase_seconds.get(WAIT, 0.0) / total if total > 0 else 0.0
