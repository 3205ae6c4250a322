"""Stops a role: SIGTERM or SIGINT sets an event."""

import asyncio
import signal


def stop_event() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set; call it inside the running loop."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, event.set)
    return event
