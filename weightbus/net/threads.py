"""Blocking calls that may last until a timeout, each on a thread of its own.

They occupy no thread of a pool and do not keep the process from ending.
"""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakSet

T = TypeVar("T")
_started: "WeakSet[threading.Thread]" = WeakSet()


async def in_own_thread(work: Callable[[], T]) -> T:
    """Return the result of a blocking call, which continues if the caller is cancelled."""
    future = asyncio.wrap_future(submit(work))
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved
    return await asyncio.shield(future)


def in_time(work: Callable[[], T], timeout_s: float) -> T:
    """Return the result of a blocking call, which continues if this gives up. Blocks.

    Raises:
        TimeoutError: it lasts longer than ``timeout_s``.
    """
    return submit(work).result(timeout_s)


def submit(work: Callable[[], T]) -> "concurrent.futures.Future[T]":
    """Begin a blocking call; return a future of its result."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 raised where the result is taken
            future.set_exception(error)

    start(run)
    return future


def start(work: Callable[[], None]) -> None:
    """Run ``work`` on a thread of its own."""
    thread = threading.Thread(target=work, daemon=True)
    _started.add(thread)
    thread.start()


def are_done(timeout_s: float) -> bool:
    """Wait for the threads that were started here; True if all have ended.

    If a thread is still inside torch, the process must leave by ``os._exit``: the interpreter would
    abort at its end.
    """
    deadline_s = time.monotonic() + timeout_s
    for thread in list(_started):
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return not any(thread.is_alive() for thread in _started)
