"""Signals that stop a process: SIGINT, SIGTERM, or SIGHUP, sent by a closing terminal."""

import asyncio
import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heeded_signals() -> list[signal.Signals]:
    """Return the signals that stop this process: all but an ignored SIGHUP (nohup)."""
    ignores = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signum for signum in STOP_SIGNALS if signum is not signal.SIGHUP or not ignores]


def count_once(signum: int) -> None:
    """Ignore SIGHUP after the first one: shell and kernel both send it for one terminal."""
    if signum == signal.SIGHUP:
        signal.signal(signum, signal.SIG_IGN)


def stop_event() -> asyncio.Event:
    """Return an event that these signals set; call it inside the running loop."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(signum: int) -> None:
        count_once(signum)
        event.set()

    for signum in heeded_signals():
        loop.add_signal_handler(signum, stop, signum)
    return event
