"""Decides whether the learner's step takes far longer than those before it. Pure."""

from collections import deque
from collections.abc import Sequence
from statistics import median

from slipstream.wire.messages.status import SlowStep
from slipstream.wire.messages.versions import PolicyVersion

TIMES = 20.0  # multiple of the usual time
LEAST_S = 120.0  # a checkpoint or an evaluation takes that long, too
_FEWEST = 3  # steps before one is compared with them
_KEPT = 20


class StepWatch:
    """Seconds of the step under way, since its batch is there, and of earlier steps."""

    def __init__(self) -> None:
        self._version: PolicyVersion | None = None
        self._groups: Sequence[int] = ()  # groups of the batch in training
        self._since_s = 0.0
        self._earlier: deque[float] = deque(maxlen=_KEPT)

    def look(self, version: PolicyVersion, groups: Sequence[int], now_s: float) -> None:
        """Take the learner's version and the groups of its next step's batch, if there is one."""
        before = self._version
        if before is not None and self._groups and version.epoch == before.epoch:
            steps = version.step - before.step
            self._earlier.extend([(now_s - self._since_s) / steps] if steps > 0 else ())
        if version != before or not self._groups:
            self._since_s = now_s
        self._version, self._groups = version, groups

    def slow(self, now_s: float) -> SlowStep | None:
        """Return the step under way if it takes many times as long as those before it."""
        if self._version is None or not self._groups or len(self._earlier) < _FEWEST:
            return None
        seconds, usual_s = now_s - self._since_s, median(self._earlier)
        if seconds < max(LEAST_S, TIMES * usual_s):
            return None
        return SlowStep(
            step=self._version.step, seconds=seconds, usual_s=usual_s, groups=tuple(self._groups)
        )
