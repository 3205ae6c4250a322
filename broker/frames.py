"""Payloads and transcripts in memory, within a budget; the store has those that are not here."""

from collections import OrderedDict
from collections.abc import Iterable

from broker.store import StoredTrajectory, TrajectoryKey


class FrameCache:
    """The newest trajectories. Frames of a message stay alive as long as they are here."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pinned: dict[TrajectoryKey, StoredTrajectory] = {}
        self._frames: OrderedDict[TrajectoryKey, StoredTrajectory] = OrderedDict()
        self.num_bytes = 0

    def put(self, key: TrajectoryKey, stored: StoredTrajectory) -> None:
        """Keep a trajectory; the oldest ones go when there are too many."""
        self.discard((key,))
        self._frames[key] = stored
        self.num_bytes += stored.num_bytes
        while self.num_bytes > self._max_bytes and len(self._frames) > 1:
            _, oldest = self._frames.popitem(last=False)
            self.num_bytes -= oldest.num_bytes

    def pin(self, key: TrajectoryKey, stored: StoredTrajectory) -> None:
        """Keep a trajectory until it is discarded, outside the budget."""
        self._pinned[key] = stored

    def get(self, key: TrajectoryKey) -> StoredTrajectory | None:
        """Return a trajectory that is here."""
        return self._frames.get(key) or self._pinned.get(key)

    def discard(self, keys: Iterable[TrajectoryKey]) -> None:
        """Forget trajectories."""
        for key in keys:
            self._pinned.pop(key, None)
            if (stored := self._frames.pop(key, None)) is not None:
                self.num_bytes -= stored.num_bytes
