"""A role's time by phase, in seconds; each moment is in exactly one phase."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WAIT = "wait"
ACT = "act"  # phase of a generator: environments answer all of its trajectories
TURN = "turn"  # phase of a learner's tenant whose batch is ready while others are trained
PHASE_TIME = "time/phase/"  # prefix of a phase's name in a learner step's figures


_OPEN_S = 1.0


class PhaseClock:
    """Adds up seconds by phase. A role is always in one phase; ``wait`` is idleness."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._phase = WAIT
        self._since = now()
        self._seconds: dict[str, float] = {WAIT: 0.0}
        self._around = ""  # phase around an unsettled one
        self.num_changes = 0  # number of phase changes

    def enter(self, phase: str) -> str:
        """Switch to ``phase`` and return the previous phase."""
        now = self._now()
        before = self._phase
        self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
        self._phase, self._since, self._around = phase, now, ""
        self.num_changes += 1
        return before

    def enter_within(self, phase: str) -> None:
        """Switch to ``phase``; a later ``settle`` states its share of the time.

        The rest belongs to the previous phase. Until then one second belongs to no phase:
        ``seconds`` never takes back what it has counted. Without ``settle`` all of it
        belongs to ``phase``.
        """
        around = self._around if phase == self._phase else self._phase
        self.enter(phase)
        self._around = around

    def settle(self, seconds: float) -> None:
        """Count at most this much since ``enter_within``; return to the previous phase."""
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
        """Return the seconds in each phase so far, including the current one."""
        seconds = dict(self._seconds)
        phase, since = self._phase, self._since
        nobodys = _OPEN_S if self._around else 0.0
        seconds[phase] = seconds.get(phase, 0.0) + max(0.0, self._now() - since - nobodys)
        return seconds


def busy_share(phase_seconds: dict[str, float]) -> float:
    """Return the share of the time that was not waiting, 0.0 before any time has passed."""
    total = sum(phase_seconds.values())
    return 1.0 - phase_seconds.get(WAIT, 0.0) / total if total > 0 else 0.0
