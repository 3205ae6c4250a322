"""Handlers of signals, which a test leaves as they were."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.wire.process.stopping import STOP_SIGNALS


@contextmanager
def signals_as_before() -> Iterator[None]:
    """Take back the handlers of what asks to stop."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
