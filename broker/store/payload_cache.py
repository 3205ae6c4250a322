"""Payloads and transcripts in memory, within a budget; the store has the others."""

from collections import OrderedDict
from collections.abc import Iterable

from slipstream.broker.store.base import Changes, StoredTrajectory, TrajectoryStore
from slipstream.broker.store.group_commit import GroupCommitter
from slipstream.wire.messages.trajectory import TrajectoryKey


class FrameCache:
    """The newest trajectories. Frames of a message stay alive as long as they are here."""

    def __init__(self, max_bytes: int, store: TrajectoryStore, committer: GroupCommitter) -> None:
        self._max_bytes = max_bytes
        self._store = store
        self._committer = committer
        self._pinned: dict[TrajectoryKey, StoredTrajectory] = {}
        self._pinned_bytes = 0
        self._frames: OrderedDict[TrajectoryKey, StoredTrajectory] = OrderedDict()
        self._unpinned_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Size of the cached payloads."""
        return self._pinned_bytes + self._unpinned_bytes

    def put(self, key: TrajectoryKey, stored: StoredTrajectory) -> None:
        """Keep a trajectory; the oldest ones go when there are too many."""
        self.discard((key,))
        self._frames[key] = stored
        self._unpinned_bytes += stored.num_bytes
        self._make_room()

    def _make_room(self) -> None:
        while self.num_bytes > self._max_bytes and len(self._frames) > 1:
            _, oldest = self._frames.popitem(last=False)
            self._unpinned_bytes -= oldest.num_bytes

    def pin(self, key: TrajectoryKey, stored: StoredTrajectory) -> None:
        """Keep a trajectory until it is discarded, if all such take no more than half the budget.

        Else it is kept as others are.
        """
        if self._pinned_bytes + stored.num_bytes > self._max_bytes // 2:
            self.put(key, stored)
            return
        self.discard((key,))
        self._pinned[key] = stored
        self._pinned_bytes += stored.num_bytes
        self._make_room()

    def get(self, key: TrajectoryKey) -> StoredTrajectory | None:
        """Return a trajectory that is here."""
        return self._frames.get(key) or self._pinned.get(key)

    async def load(self, keys: Iterable[TrajectoryKey]) -> dict[TrajectoryKey, StoredTrajectory]:
        """Return trajectories, from here or from the store; ended ones are left out."""
        wanted = list(keys)
        found = {key: one for key in wanted if (one := self.get(key)) is not None}
        missing = [key for key in wanted if key not in found]
        if missing:
            await self._committer.commit(Changes())  # pending changes are there then
        while missing:
            try:
                found |= dict(zip(missing, await self._store.fetch(missing), strict=True))
            except KeyError as error:
                missing = [key for key in missing if key != error.args[0]]
            else:
                break
        return found

    def discard(self, keys: Iterable[TrajectoryKey]) -> None:
        """Forget trajectories."""
        for key in keys:
            if (stored := self._pinned.pop(key, None)) is not None:
                self._pinned_bytes -= stored.num_bytes
            if (stored := self._frames.pop(key, None)) is not None:
                self._unpinned_bytes -= stored.num_bytes
