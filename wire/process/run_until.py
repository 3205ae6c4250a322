"""Parallel jobs until the first of them ends; no job outlives the block that runs it."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")
Job = Coroutine[Any, Any, object] | asyncio.Task[Any]


@asynccontextmanager
async def running(*jobs: Job) -> "AsyncIterator[tuple[asyncio.Task[Any], ...]]":
    """Run jobs while the block runs; at its end cancel the rest and await all."""
    tasks = tuple(asyncio.ensure_future(job) for job in jobs)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def first_ended(*tasks: asyncio.Task[Any]) -> set[asyncio.Task[Any]]:
    """Wait until a task ends; return the ended ones.

    Raises:
        BaseException: raised by an ended task.
    """
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task in done:
            task.result()
    return done


async def run_until(*jobs: Job) -> None:
    """Run jobs until the first ends; cancel the others.

    Raises:
        BaseException: raised by the first job.
    """
    async with running(*jobs) as tasks:
        await first_ended(*tasks)


async def unless(work: Coroutine[None, None, T], *ends: "asyncio.Task[object]") -> T | None:
    """Return the result of some work, or None if one of ``ends`` is done first.

    Raises:
        BaseException: raised by the work, or by an end that came first.
    """
    async with running(work) as (task,):
        await asyncio.wait({task, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            result: T = task.result()
            return result
        for end in ends:
            if end.done():
                end.result()
        return None
