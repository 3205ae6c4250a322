"""Work that grows with a request: a large one holds up nobody else."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

LARGE_BYTES = 1 << 16
P = ParamSpec("P")
T = TypeVar("T")


async def off_loop(size: int, call: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
    """Return what a call returns that works on so many bytes: in a thread if they are many."""
    if size < LARGE_BYTES:
        return call(*given, **named)
    return await asyncio.to_thread(call, *given, **named)
