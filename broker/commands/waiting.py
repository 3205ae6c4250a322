"""Waiting for what happens in a command server, and the log on a thread of its own."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
LEARNER, ENGINES = "learner", "engines"  # what a worker waits for


class Waiters:
    """Wakes those that wait under a name. A wake-up may come without a reason, but never too late.

    Look for what you wait for after ``entered``, and wait then.
    """

    def __init__(self) -> None:
        self._events: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    def entered(self, name: str) -> asyncio.Event:
        """Return what is set when something happens under a name; ``leave`` with it."""
        event = asyncio.Event()
        self._events[name].add(event)
        return event

    def leave(self, name: str, event: asyncio.Event) -> None:
        """Wait no more."""
        self._events[name].discard(event)
        if not self._events[name]:
            del self._events[name]

    def wake(self, *names: str) -> None:
        """Wake those that wait under these names."""
        for name in names:
            for event in self._events.get(name, ()):
                event.set()

    def wake_all(self) -> None:
        """Wake all."""
        self.wake(*self._events)


class LogThread:
    """Calls the log in order, on one thread: a write to disk delays nothing else."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="command-log")

    async def __call__(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Return what a method of the log returns, once what it wrote is on disk."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, partial(call, *arguments, **named))

    def close(self) -> None:
        """Wait for the last call."""
        self._thread.shutdown()
