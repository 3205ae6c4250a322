"""Stopping a learner: the first signal lets it save and exit, the second ends it at once.

Rank 0 alone listens. The other ranks are started with SIGINT and SIGTERM ignored, since a terminal
sends its signal to all of them; they follow rank 0's broadcasts, and die with it.
"""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)


class StopRequest:
    """A stop request to rank 0. While nothing is deferred a signal ends it at once."""

    def __init__(self) -> None:
        self.requested = False
        self._is_deferring = False

    def listen(self) -> None:
        """Take over SIGTERM and SIGINT; call it on the main thread."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._on_signal)

    @contextmanager
    def deferred(self, *, when: bool = True) -> Iterator[None]:
        """Let the first signal within the block only set ``requested``."""
        self._is_deferring = when
        try:
            yield
        finally:
            self._is_deferring = False

    def _on_signal(self, signum: int, _frame: object) -> None:
        if not self._is_deferring or self.requested:
            raise SystemExit(0)
        self.requested = True
        _log.info("%s: stopping; a second signal ends at once", signal.Signals(signum).name)
