"""SIGINT, SIGTERM and SIGHUP from the start of a run to the end of its clean-up."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slipstream.wire.process.stopping import count_once, heeded_signals


class StopRequestedError(BaseException):
    """One of them arrived; code that only shows a run does not catch it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.exit_code = 128 + signal.Signals[name]
        """As a shell has it for a process that the signal killed: 130, 143 or 129."""


class Signals:
    """Handles each signal once, where it may be.

    That is not while a child is forked, and not in the clean-up.
    """

    def __init__(self) -> None:
        self._received: list[str] = []
        self._raises = False
        self._is_held: Callable[[], bool] = lambda: False

    def held_while(self, is_held: Callable[[], bool]) -> None:
        """Raise later what arrives while this is true."""
        self._is_held = is_held

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle them in this block."""
        before = {number: signal.signal(number, self._take) for number in heeded_signals()}
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise what arrives in this block, or arrived between two of them.

        Raises:
            StopRequestedError: a signal arrived.
        """
        self._raises = True
        try:
            self.raise_received()
            yield
        finally:
            self._raises = False

    def forget(self) -> None:
        """Forget what has arrived: one Ctrl-C may come twice, and then its terminal may close.

        From now on SIGHUP is ignored.
        """
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._received.clear()

    def raise_received(self) -> None:
        """Raise if a signal has arrived and may be raised now."""
        if self._raises and self._received and not self._is_held():
            self._raises = False  # once: the next one belongs to the next block
            raise StopRequestedError(self._received.pop(0))

    def _take(self, signum: int, _frame: object) -> None:
        count_once(signum)
        self._received.append(signal.Signals(signum).name)
        self.raise_received()
