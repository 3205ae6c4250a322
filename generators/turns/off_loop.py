"""Runs work that grows with a request in a thread, so that a large one delays no other."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

LARGE_BYTES = 1 << 16
_threads = ThreadPoolExecutor(2, "large-requests")  # those of the loop are for weights, too
P = ParamSpec("P")
T = TypeVar("T")


async def off_loop(size: int, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Return the result of a call that works on ``size`` bytes: in a thread if they are many."""
    if size < LARGE_BYTES:
        return call(*arguments, **named)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_threads, partial(call, *arguments, **named))
