"""Group commit: what arrives while one transaction is on its way goes into the next, together."""

import asyncio

from broker.store import Changes, TrajectoryStore


class GroupCommitter:
    """Writes changes in the order in which they were handed in, many to a transaction."""

    def __init__(self, store: TrajectoryStore) -> None:
        self._store = store
        self._changes = Changes()
        self._waiters: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()

    async def commit(self, changes: Changes) -> None:
        """Return when these changes, and all handed in before, are durable.

        An empty change waits for the ones before it, which is what a repeated message needs.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changes.merge(changes)
        self._waiters.append(future)
        self._wake.set()
        await future

    async def run(self) -> None:
        """Write until cancelled. A store that fails ends the loop and every waiter with it."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            changes, self._changes = self._changes, Changes()
            waiters, self._waiters = self._waiters, []
            try:
                if changes.events or changes.put or changes.remove:
                    await self._store.commit(changes)
            except Exception as error:
                for waiter in [*waiters, *self._waiters]:
                    if not waiter.done():
                        waiter.set_exception(error)
                raise
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
