"""SIGINT, SIGTERM and SIGHUP from the start of a run to the end of its clean-up."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.wire.process.stopping import count_once, heeded_signals


class StopRequestedError(BaseException):
    """A signal arrived; code that only shows a run does not catch it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.exit_code = 128 + signal.Signals[name]
        """A shell's code for a process killed by the signal: 130, 143 or 129."""


class Signals:
    """Handles each signal once, except while a child is forked and during the clean-up."""

    def __init__(self) -> None:
        self._received: list[str] = []
        self._raises = False
        self._is_held = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raise signals that arrive in this block at its end."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        self._raise_received()

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals in this block."""
        before = {number: signal.signal(number, self._take) for number in heeded_signals()}
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise signals that arrive in this block, or arrived between two blocks.

        Raises:
            StopRequestedError: a signal arrived.
        """
        self._raises = True
        try:
            self._raise_received()
            yield
        finally:
            self._raises = False

    def forget(self) -> None:
        """Forget signals so far: Ctrl-C may come twice, and then its terminal may close.

        From now on SIGHUP, the closing terminal, is ignored.
        """
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._received.clear()

    def _raise_received(self) -> None:
        """Raise a received signal, if it may be raised now."""
        if self._raises and self._received and not self._is_held:
            self._raises = False  # raise once: the next signal belongs to the next block
            raise StopRequestedError(self._received.pop(0))

    def _take(self, signum: int, _frame: object) -> None:
        count_once(signum)
        self._received.append(signal.Signals(signum).name)
        self._raise_received()
