"""Group commit: changes that arrive during one transaction go into the next, together."""

import asyncio
from collections import deque
from collections.abc import Callable

from slipstream.broker.store.base import Changes, TrajectoryStore

_MAX_TRANSACTION_BYTES = 2 * 1024 * 1024


class GroupCommitter:
    """Writes changes in the order in which they were handed in, many to a transaction.

    Callers watch ``backlog_bytes`` and take no more work while it is high.
    """

    def __init__(
        self, store: TrajectoryStore, *, max_transaction_bytes: int = _MAX_TRANSACTION_BYTES
    ) -> None:
        self._store = store
        self._max_transaction_bytes = max_transaction_bytes
        self._pending: deque[tuple[Changes, int, Callable[[], None] | None]] = deque()
        self._num_in_flight = 0
        self._backlog_bytes = 0
        self._waiters: set[asyncio.Future[None]] = set()
        self._wake = asyncio.Event()
        self._failure: BaseException | None = None

    @property
    def backlog(self) -> int:
        """Number of changes that are not durable yet."""
        return len(self._pending) + self._num_in_flight

    @property
    def backlog_bytes(self) -> int:
        """Size of the changes that are not durable yet."""
        return self._backlog_bytes

    def add(self, changes: Changes, then: Callable[[], None] | None = None) -> None:
        """Hand in changes; ``then`` is called once these and all before them are durable.

        It is called on the event loop, never from within this call, and in the order handed in.
        An empty change is called back after those before it, which is what a repeated message
        needs. After a failure nothing is taken and nothing is called any more.
        """
        if self._failure is not None:
            return
        num_bytes = changes.num_bytes
        self._pending.append((changes, num_bytes, then))
        self._backlog_bytes += num_bytes
        self._wake.set()

    async def commit(self, changes: Changes) -> None:
        """Return when these changes, and all handed in before, are durable.

        Raises:
            SlipstreamError: the error that ended ``run``.
        """
        if self._failure is not None:
            raise self._failure
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        self.add(changes, lambda: None if waiter.done() else waiter.set_result(None))
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    async def run(self) -> None:
        """Write until cancelled. A store that fails ends the loop and every waiter with it."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._pending:
                    await self._write_oldest()
        except BaseException as error:
            self._failure = error
            self._pending.clear()
            for waiter in self._waiters:
                if waiter.done():
                    continue
                if isinstance(error, asyncio.CancelledError):  # this loop was cancelled
                    waiter.cancel()
                else:
                    waiter.set_exception(error)
            raise

    async def _write_oldest(self) -> None:
        """Write the oldest changes, as many as fit, in one transaction; call back."""
        merged, total_bytes, callbacks = Changes(), 0, list[Callable[[], None]]()
        while self._pending:
            changes, num_bytes, then = self._pending[0]
            if self._num_in_flight and total_bytes + num_bytes > self._max_transaction_bytes:
                break
            self._pending.popleft()
            self._num_in_flight += 1
            merged.merge(changes)
            total_bytes += num_bytes
            if then is not None:
                callbacks.append(then)
        if not merged.is_empty:
            await self._store.commit(merged)
        self._num_in_flight = 0
        self._backlog_bytes -= total_bytes
        for then in callbacks:
            then()
