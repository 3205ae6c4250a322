"""Stopping a learner: the first signal lets it save and exit, the second ends it at once.

The first rank of each node listens; rank 0 decides, the others are told what they were asked
(nodes/watch.py). The other ranks are started with such signals ignored, since a terminal
sends its own to all of them; they follow rank 0's broadcasts, and die with their first rank.
"""

import logging
import signal
import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from slipstream.wire.process.stopping import STOP_SIGNALS, count_once, heeded_signals

_log = logging.getLogger(__name__)


class StopRequest:
    """A stop request to this process. While nothing is deferred a signal ends it at once."""

    def __init__(self) -> None:
        self.requested = False
        self._is_deferring = False
        self._signals: tuple[socket.socket, socket.socket] | None = None
        self._arrived: list[int] = []
        self._handled: list[int] = []
        self._lock = threading.Lock()

    def listen(self) -> None:
        """Take over what asks to stop; call it on the main thread."""
        for signum in heeded_signals():
            signal.signal(signum, self._on_signal)

    def count_signals(self) -> None:
        """Count signals as they arrive, for ``arrived``; call it on the main thread."""
        self._signals = socket.socketpair()
        for end in self._signals:
            end.setblocking(False)
        signal.set_wakeup_fd(self._signals[1].fileno(), warn_on_full_buffer=False)

    def end_counting(self) -> None:
        """Let signals go uncounted again; call it on the main thread."""
        if self._signals is not None:
            signal.set_wakeup_fd(-1)
            for end in self._signals:
                end.close()
            self._signals = None

    @property
    def arrived(self) -> int:
        """Number of stop signals so far, which the main thread may not have handled yet.

        It handles none while it is inside a collective.
        """
        if self._signals is not None:
            with self._lock, suppress(BlockingIOError):
                for signum in self._signals[0].recv(1024):
                    if signum in STOP_SIGNALS and _asks(signum, self._arrived):
                        self._arrived.append(signum)
        return len(self._arrived)

    @contextmanager
    def deferred(self, *, when: bool = True) -> Iterator[None]:
        """Let the first signal within the block only set ``requested``."""
        self._is_deferring = when
        try:
            yield
        finally:
            self._is_deferring = False

    def _on_signal(self, signum: int, _frame: object) -> None:
        count_once(signum)
        if not _asks(signum, self._handled):
            return
        self._handled.append(signum)
        if not self._is_deferring or self.requested:
            raise SystemExit(0)
        self.requested = True
        _log.info("%s: stopping; a second signal ends at once", signal.Signals(signum).name)


def _asks(signum: int, earlier: Collection[int]) -> bool:
    """True unless a signal only tells that the terminal is closed from which another one came.

    Those that came during a collective are handled by number: SIGHUP before an earlier Ctrl-C.
    """
    if signum == signal.SIGHUP:
        return not earlier
    return signum != signal.SIGINT or signal.SIGHUP not in earlier
