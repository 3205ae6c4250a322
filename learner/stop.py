"""Stopping a learner: the first signal lets it save and exit, the second ends it at once.

The first rank of each node listens; rank 0 decides, and nodes/watch.py sends its decision to the
others. The other ranks are started with such signals ignored, since a terminal sends its own to
all of them; they follow rank 0's broadcasts, and die with their first rank.
"""

import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from slipstream.wire.process.stopping import STOP_SIGNALS, count_once, heeded_signals

_log = logging.getLogger(__name__)
_MOST_SIGNALS = 1024  # counted


class StopRequest:
    """A stop request to this process. While nothing is deferred a signal ends it at once."""

    def __init__(self) -> None:
        self.requested = False
        self._is_deferring = False
        self._signals: tuple[socket.socket, socket.socket] | None = None
        self._num_handled = 0

    def listen(self) -> None:
        """Take over what asks to stop; call it on the main thread."""
        self._signals = socket.socketpair()
        for end in self._signals:
            end.setblocking(False)
        signal.set_wakeup_fd(self._signals[1].fileno(), warn_on_full_buffer=False)
        for signum in heeded_signals():
            signal.signal(signum, self._on_signal)

    def close(self) -> None:
        """Count no more; call it on the main thread."""
        if self._signals is not None:
            signal.set_wakeup_fd(-1)
            for end in self._signals:
                end.close()
            self._signals = None

    @property
    def arrived(self) -> int:
        """Number of stop signals so far, which the main thread may not have handled yet.

        It handles none while it is inside a collective, and then by number, not as they arrived.
        """
        if self._signals is None:
            return 0
        with suppress(BlockingIOError):
            return _num_asks(self._signals[0].recv(_MOST_SIGNALS, socket.MSG_PEEK))
        return 0

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
        arrived = self.arrived
        if arrived == self._num_handled:
            return
        self._num_handled = arrived
        if not self._is_deferring or arrived > 1:
            raise SystemExit(0)
        self.requested = True
        _log.info("%s: stopping; a second signal ends at once", signal.Signals(signum).name)


def _num_asks(signals: bytes) -> int:
    """Return how many signals ask to stop, in the order in which they arrived.

    A SIGHUP after another tells only that the terminal is closed, as does a SIGINT after it.
    """
    asks = list[int]()
    for signum in signals:
        is_repeat = bool(asks) if signum == signal.SIGHUP else signal.SIGHUP in asks
        if signum == signal.SIGTERM or (signum in STOP_SIGNALS and not is_repeat):
            asks.append(signum)
    return len(asks)
