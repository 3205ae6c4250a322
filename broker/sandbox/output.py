"""Logs the output of reward functions, within a readable bound."""

import logging
import os
import time
from collections.abc import Callable

from slipstream.wire.process.token_bucket import TokenBucket

_log = logging.getLogger(__name__)
_BURST_BYTES = 16 * 1024
_BYTES_PER_S = 4 * 1024
_RESUMES_BYTES = 8 * 1024  # needed after a gap, so that gaps are not one line apart
_READ_BYTES = 1 << 20
_LINE_CHARACTERS = 500


class OutputLog:
    """Logs the output of one child; drops and counts the excess."""

    def __init__(self, name: str, *, now: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._now = now
        self._allowed = TokenBucket(_BYTES_PER_S, _BURST_BYTES, now())
        self._dropped_since = 0
        self.dropped_bytes = 0

    def read(self, descriptor: int) -> bool:
        """Log available output; return True if there may be more."""
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.add(data)
        return bool(data)

    def add(self, data: bytes) -> None:
        """Log as much as is allowed."""
        allowed = self._allowed.refill(self._now())
        if self._dropped_since and allowed < _RESUMES_BYTES:
            self._drop(len(data))
            return
        kept = data[: int(allowed)]
        self._allowed.tokens -= len(kept)
        if kept and self._dropped_since:
            self.report_dropped()
        for line in kept.decode(errors="replace").splitlines():
            printable = (
                c if c.isprintable() or c == "\t" else ascii(c)[1:-1]  # a terminal would obey it
                for c in line[:_LINE_CHARACTERS]
            )
            _log.info("%s printed: %s", self._name, "".join(printable))
        self._drop(len(data) - len(kept))

    def _drop(self, num_bytes: int) -> None:
        self._dropped_since += num_bytes
        self.dropped_bytes += num_bytes

    def report_dropped(self) -> None:
        """Log how much was left out since the last time."""
        if self._dropped_since:
            _log.warning("%s printed %d bytes more", self._name, self._dropped_since)
        self._dropped_since = 0
