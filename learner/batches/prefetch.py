"""The payloads of one coming step, fetched while another step trains.

Nothing depends on it: training uses prefetched payloads where it can, and fetches the rest.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # not in torch's stubs

from slipstream.wire.errors import SlipstreamError
from slipstream.wire.messages.codec import Frame
from slipstream.wire.messages.trajectory import TrajectoryKey

_log = logging.getLogger(__name__)
Payloads = dict[TrajectoryKey, Frame]
FetchFrames = Callable[[tuple[TrajectoryKey, ...]], Awaitable[list[Frame]]]
KeysByReplica = tuple[tuple[TrajectoryKey, ...], ...]


class EarlyPlans:
    """Rank 0's early plans of each replica's share of the next batch, a key per step.

    The store's client has no other use: a client that waits blocks all its users.
    """

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore("prefetch", store)

    def post(self, step: int, keys: KeysByReplica) -> None:
        """Post for the other ranks, replacing an earlier post for the same step."""
        self._store.set(str(step), msgspec.json.encode(keys).decode())

    def read(self, step: int) -> KeysByReplica | None:
        """Return the plan posted for a step, None if no plan is posted; does not wait."""
        if not self._store.check([str(step)]):
            return None
        return msgspec.json.decode(self._store.get(str(step)), type=KeysByReplica)

    def remove(self, step: int) -> None:
        """Forget a step."""
        self._store.delete_key(str(step))


class PayloadPrefetch:
    """Payloads of one step, held or being fetched. Use it from one event loop."""

    def __init__(self, fetch: FetchFrames) -> None:
        self._fetch = fetch
        self._step = -1
        self._keys: frozenset[TrajectoryKey] = frozenset()
        self._task: asyncio.Task[Payloads] | None = None

    def begin(self, step: int, keys: Sequence[TrajectoryKey]) -> None:
        """Fetch the payloads of a step, in place of another's."""
        self.drop()
        self._step, self._keys = step, frozenset(keys)
        self._task = asyncio.create_task(self._fetched(step, tuple(keys)))

    async def take(self, step: int, keys: Sequence[TrajectoryKey]) -> Payloads:
        """Return the payloads of ``keys`` fetched for this step, and forget everything.

        Payloads on their way are waited for.
        """
        task = self._task
        if task is None or step != self._step or self._keys.isdisjoint(keys):
            self.drop()
            return {}
        found = await task
        self.drop()
        return {key: found[key] for key in keys if key in found}

    def drop(self) -> None:
        """Discard all payloads."""
        if self._task is not None:
            self._task.cancel()
        self._task, self._keys = None, frozenset()

    async def _fetched(self, step: int, keys: tuple[TrajectoryKey, ...]) -> Payloads:
        try:
            return dict(zip(keys, await self._fetch(keys), strict=True))
        except SlipstreamError as error:
            _log.warning("cannot prefetch the payloads of step %d: %s", step, error)
            return {}
