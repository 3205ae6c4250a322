"""Describes reward functions that failed recently. Pure."""

from collections import deque
from dataclasses import dataclass, field

_TRIES = 50  # counted for each function
_MANY = 5  # tries without a reward, before a warning
_FUNCTIONS = 100  # kept; the least recently tried is dropped first


@dataclass(slots=True)
class _Tries:
    """Outcomes of the newest tries of a function."""

    outcomes: deque[bool] = field(default_factory=lambda: deque(maxlen=_TRIES))  # True: a reward
    reason: str = ""  # reason of the newest failure
    num_failed: int = 0  # in all
    warn_at: int = _MANY

    @property
    def failed(self) -> int:
        """Number of the newest tries that gave no reward."""
        return self.outcomes.count(False)


class RewardTrouble:
    """Remembers the newest tries to score, by function."""

    def __init__(self) -> None:
        self._tries: dict[str, _Tries] = {}

    def scored(self, function: str) -> None:
        """Record a reward."""
        self._of(function).outcomes.append(True)

    def failed(self, function: str, reason: str) -> str:
        """Record a try without a reward; return a warning, or "" if none is due.

        One is due after 5 failures, then each time that they have doubled.
        """
        tries = self._of(function)
        tries.outcomes.append(False)
        tries.reason = reason
        tries.num_failed += 1
        if tries.num_failed < tries.warn_at or tries.failed < _MANY:
            return ""
        tries.warn_at = 2 * tries.num_failed
        return self._about(function, tries)

    def summary(self) -> str:
        """Describe the function that fails most; empty if none fails often."""
        worst = max(self._tries.items(), key=lambda pair: pair[1].failed, default=None)
        if worst is None or worst[1].failed < _MANY:
            return ""
        return self._about(*worst)

    def _about(self, function: str, tries: _Tries) -> str:
        return (
            f"{tries.failed} of the last {len(tries.outcomes)} tries of "
            f"{function or 'the reward function'} gave no reward: {tries.reason}"
        )

    def _of(self, function: str) -> _Tries:
        tries = self._tries.pop(function, None) or _Tries()
        self._tries[function] = tries
        if len(self._tries) > _FUNCTIONS:
            del self._tries[next(iter(self._tries))]
        return tries
