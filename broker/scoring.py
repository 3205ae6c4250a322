"""Which trajectories wait for a reward, and who is scoring which. Rebuilt from the ledger."""

from collections import OrderedDict
from dataclasses import dataclass

from broker.leases import Holdings, LeaseTerms
from broker.store import TrajectoryKey


@dataclass(frozen=True, slots=True)
class ScoringLease:
    """One trajectory in the hands of one reward worker."""

    key: TrajectoryKey
    holder: str


class ScoringQueue:
    """First come, first scored; what lapses goes back to the front."""

    def __init__(self, *, lease_s: float) -> None:
        self._terms = LeaseTerms(lease_s)
        self._waiting: OrderedDict[TrajectoryKey, None] = OrderedDict()
        self._leases: dict[int, ScoringLease] = {}
        self._lease_of: dict[TrajectoryKey, int] = {}
        self._by_holder = Holdings()
        self._next_lease_id = 0

    @property
    def num_waiting(self) -> int:
        """Return how many trajectories nobody is scoring."""
        return len(self._waiting)

    @property
    def num_leased(self) -> int:
        """Return how many trajectories are being scored."""
        return len(self._leases)

    def holders(self) -> list[str]:
        """Return who is scoring."""
        return list(self._by_holder)

    def leases_of(self, holder: str) -> int:
        """Return how many trajectories one worker holds."""
        return len(self._by_holder.get(holder, ()))

    def add(self, key: TrajectoryKey) -> None:
        """Queue a trajectory."""
        if key not in self._lease_of:
            self._waiting[key] = None

    def discard(self, key: TrajectoryKey) -> None:
        """Forget a trajectory that has its reward, or whose group ended."""
        self._waiting.pop(key, None)
        if (lease_id := self._lease_of.get(key)) is not None:
            self._end(lease_id)

    def lease(self, holder: str, credits_left: int, *, now_s: float) -> dict[int, TrajectoryKey]:
        """Grant up to ``credits_left`` trajectories; return them by lease."""
        granted: dict[int, TrajectoryKey] = {}
        while self._waiting and len(granted) < credits_left:
            key, _ = self._waiting.popitem(last=False)
            lease_id = self._next_lease_id
            self._leases[lease_id] = ScoringLease(key, holder)
            self._terms.begin(lease_id, now_s)
            self._lease_of[key] = lease_id
            self._by_holder.add(holder, lease_id)
            granted[lease_id] = key
            self._next_lease_id += 1
        return granted

    def finish(self, holder: str, lease_id: int, key: TrajectoryKey) -> bool:
        """End a lease with a result; False when this worker does not hold it, or not for that."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.holder != holder or lease.key != key:
            return False
        self._end(lease_id)
        return True

    def heartbeat(self, holder: str, lease_ids: tuple[int, ...], *, now_s: float) -> list[int]:
        """Extend leases; return those that the worker no longer has."""
        return self._terms.extend(self._leases, holder, lease_ids, now_s)

    def renew_leases(self, now_s: float) -> None:
        """Give every lease a full term: its holder could not have been heard."""
        self._terms.begin_all(self._leases, now_s)

    def release_all(self, holder: str) -> None:
        """Put back what a worker held."""
        for lease_id in list(self._by_holder.get(holder, ())):
            self._put_back(lease_id)

    def expire(self, now_s: float) -> list[TrajectoryKey]:
        """Put back what silent workers held; return it, because an attempt ended."""
        overdue = [i for i in self._terms.overdue(now_s) if i in self._leases]
        return [self._put_back(lease_id) for lease_id in overdue]

    def _put_back(self, lease_id: int) -> TrajectoryKey:
        key = self._end(lease_id)
        self._waiting[key] = None
        self._waiting.move_to_end(key, last=False)
        return key

    def _end(self, lease_id: int) -> TrajectoryKey:
        lease = self._leases.pop(lease_id)
        del self._lease_of[lease.key]
        self._terms.end(lease_id)
        self._by_holder.remove(lease.holder, lease_id)
        return lease.key
