"""Which trajectories wait for a reward, and who is scoring which. Rebuilt from the ledger."""

from collections import OrderedDict
from dataclasses import dataclass

from broker.leases import extend
from broker.ledger import TrajectoryKey


@dataclass(slots=True)
class ScoringLease:
    """One trajectory in the hands of one reward worker."""

    key: TrajectoryKey
    holder: str
    expires_s: float


class ScoringQueue:
    """First come, first scored; what lapses goes back to the front."""

    def __init__(self, *, lease_s: float) -> None:
        self._lease_s = lease_s
        self._waiting: OrderedDict[TrajectoryKey, None] = OrderedDict()
        self._leases: dict[int, ScoringLease] = {}
        self._next_lease_id = 0

    @property
    def num_waiting(self) -> int:
        """Return how many trajectories nobody is scoring."""
        return len(self._waiting)

    @property
    def num_leased(self) -> int:
        """Return how many trajectories are being scored."""
        return len(self._leases)

    def leases_of(self, holder: str) -> int:
        """Return how many trajectories one worker holds."""
        return sum(lease.holder == holder for lease in self._leases.values())

    def add(self, key: TrajectoryKey) -> None:
        """Queue a trajectory."""
        self._waiting[key] = None

    def discard(self, key: TrajectoryKey) -> None:
        """Forget a trajectory whose group ended."""
        self._waiting.pop(key, None)
        for lease_id in [i for i, lease in self._leases.items() if lease.key == key]:
            del self._leases[lease_id]

    def lease(self, holder: str, credits_left: int, *, now_s: float) -> dict[int, TrajectoryKey]:
        """Grant up to ``credits_left`` trajectories; return them by lease."""
        granted: dict[int, TrajectoryKey] = {}
        while self._waiting and len(granted) < credits_left:
            key, _ = self._waiting.popitem(last=False)
            lease = ScoringLease(key, holder, now_s + self._lease_s)
            self._leases[self._next_lease_id] = lease
            granted[self._next_lease_id] = key
            self._next_lease_id += 1
        return granted

    def finish(self, holder: str, lease_id: int) -> TrajectoryKey | None:
        """End a lease with a result; None when this worker no longer holds it."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.holder != holder:
            return None
        del self._leases[lease_id]
        return lease.key

    def heartbeat(self, holder: str, lease_ids: tuple[int, ...], *, now_s: float) -> list[int]:
        """Extend leases; return those that the worker no longer has."""
        return extend(self._leases, holder, lease_ids, expires_s=now_s + self._lease_s)

    def release_all(self, holder: str) -> None:
        """Put back what a worker held."""
        self._put_back([i for i, lease in self._leases.items() if lease.holder == holder])

    def expire(self, now_s: float) -> list[TrajectoryKey]:
        """Put back what silent workers held; return it, because an attempt ended."""
        overdue = [i for i, lease in self._leases.items() if lease.expires_s < now_s]
        keys = [self._leases[i].key for i in overdue]
        self._put_back(overdue)
        return keys

    def _put_back(self, lease_ids: list[int]) -> None:
        for lease_id in lease_ids:
            key = self._leases.pop(lease_id).key
            self._waiting[key] = None
            self._waiting.move_to_end(key, last=False)
