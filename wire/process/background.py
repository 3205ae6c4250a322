"""An event loop on its own thread: serves the learner's sockets while it trains."""

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """Runs coroutines for a thread that has no event loop. Use as a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="io", daemon=True)
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.run(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background; ``check`` raises its error."""
        self.run(self._start(coroutine))

    def check(self) -> None:
        """Raise the error that ended a started coroutine, if any."""
        if self._failure is not None:
            raise self._failure

    def call(self, function: Any, *args: Any) -> None:  # noqa: ANN401 as call_soon
        """Call a function on the loop's thread."""
        self._loop.call_soon_threadsafe(function, *args)

    async def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error

    async def _cancel_all(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
