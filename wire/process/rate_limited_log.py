"""Log lines that others can cause as often as they like."""

import logging
import time
from collections.abc import Callable

_EVERY_S = 60.0


class RateLimitedLog:
    """Logs at most one line a minute, with the number of lines since the last one."""

    def __init__(
        self,
        log: logging.Logger,
        level: int = logging.WARNING,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Write to ``log``; ``now`` returns monotonic seconds."""
        self._log = log
        self._level = level
        self._now = now
        self._num = 0
        self._again_s = float("-inf")

    def say(self, line: str, *arguments: object) -> None:
        """Log a line, or count it."""
        if num := self.num_due():
            since = "" if num == 1 else f" ({num} such lines in the last minute or more)"
            self._log.log(self._level, line + "%s", *arguments, since)

    def num_due(self) -> int:
        """Count a line; return the number since the last logged line, 0 if no line is due."""
        self._num += 1
        now_s = self._now()
        if now_s < self._again_s:
            return 0
        num, self._num, self._again_s = self._num, 0, now_s + _EVERY_S
        return num
