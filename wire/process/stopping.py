"""What asks a process to stop: SIGINT, SIGTERM, or SIGHUP, as when its terminal is closed."""

import asyncio
import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heeded_signals() -> list[signal.Signals]:
    """Return those that stop this process: all but a SIGHUP that it ignores, as under nohup."""
    ignores = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [one for one in STOP_SIGNALS if one is not signal.SIGHUP or not ignores]


def count_once(signum: int) -> None:
    """Ignore SIGHUP from now on if this is one: shell and kernel both send it for one terminal."""
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
