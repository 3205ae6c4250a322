"""How a role is asked to end: SIGTERM or SIGINT sets an event once."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


def stop_event() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set; call it inside the running loop."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, event.set)
    return event


async def unless(work: Coroutine[None, None, T], *ends: "asyncio.Task[object]") -> T | None:
    """Return what some work returns, or None if one of ``ends`` is done before it.

    Raises:
        BaseException: what the work, or an end that came first, raised.
    """
    working = asyncio.create_task(work)
    try:
        await asyncio.wait({working, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        for end in ends:
            if end.done():
                end.result()
        return None
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


def exit_on_sigterm() -> None:
    """Make SIGTERM end a thread that has no event loop, through its ``finally`` blocks."""

    def handler(_signum: int, _frame: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, handler)
