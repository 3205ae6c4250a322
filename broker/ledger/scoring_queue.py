"""Trajectories waiting for a reward or being scored. Rebuilt from the ledger."""

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from slipstream.broker.ledger.leases import Holdings, LeaseTerms, name_of
from slipstream.wire.messages.trajectory import TrajectoryKey

_FIRST_LEASE_ID = 1 << 40  # leases of generation count from 0: one heartbeat may name both
_LOOK_AHEAD = 256  # trajectories passed over in search of some that a worker may have
_MANY_WORKERS = 256  # names, before absent ones are forgotten
_FIRST_PAUSE_S = 1.0  # before a second try; then four times as long, and so on
_LONGEST_PAUSE_S = 30.0
MAX_GRANTED_BYTES = 16 << 20  # at a time, to one worker: it and the broker hold all of it


@dataclass(frozen=True, slots=True)
class ScoringLease:
    """One trajectory in the hands of one reward worker."""

    key: TrajectoryKey
    holder: str


@dataclass(slots=True)
class _Failures:
    """Failed attempts to score a trajectory."""

    names: set[str]  # workers that tried
    count: int = 0
    not_before_s: float = 0.0


class ScoringQueue:
    """First come, first scored; lapsed work goes back to the front.

    Work that one worker could not score is kept for others, if there are any, for a while.
    Until it has its reward, its siblings are held back: if it never gets one their group is
    dropped, and nothing was spent on them.
    """

    def __init__(self, *, lease_s: float) -> None:
        self._terms = LeaseTerms(lease_s)
        self._lease_s = lease_s
        self._waiting: OrderedDict[TrajectoryKey, None] = OrderedDict()
        self._held_back: OrderedDict[TrajectoryKey, None] = OrderedDict()  # waiting, not granted
        self._waiting_of: dict[int, dict[int, None]] = {}  # group -> siblings that wait
        self._failed_of: dict[int, dict[int, int]] = {}  # group -> sibling -> attempts
        self._leases: dict[int, ScoringLease] = {}
        self._lease_of: dict[TrajectoryKey, int] = {}
        self._by_holder = Holdings()
        # Another broker's leases have other numbers: its workers may still speak of them.
        self._next_lease_id = _FIRST_LEASE_ID + (secrets.randbits(20) << 32)
        # Leases whose result may still come, and from whom.
        self._lapsed: dict[TrajectoryKey, dict[int, str]] = {}
        self._failures: dict[TrajectoryKey, _Failures] = {}
        self.num_given_back = 0  # untried, because a sibling had failed
        self._seen: dict[str, float] = {}  # worker -> time of its last request for work
        # Trajectories without a reward by the generator that delivered them and may score them, and
        # when it was last there; a time at which it was looked for counts the first time.
        self._delivered: dict[str, dict[TrajectoryKey, None]] = {}
        self._deliverers: dict[TrajectoryKey, str] = {}
        self._there: dict[str, float] = {}

    @property
    def num_waiting(self) -> int:
        """Number of trajectories waiting to be scored."""
        return len(self._waiting) + len(self._held_back)

    @property
    def num_leased(self) -> int:
        """Number of trajectories being scored."""
        return len(self._leases)

    def holders(self) -> list[str]:
        """Return the holders of leases."""
        return list(self._by_holder)

    def leases_of(self, holder: str) -> int:
        """Return the number of trajectories that one worker holds."""
        return len(self._by_holder.get(holder, ()))

    def add(self, key: TrajectoryKey, *, deliverer: str = "") -> None:
        """Queue a trajectory; ``deliverer`` is the generator that may score it, if one may."""
        if deliverer:
            self._deliverers[key] = deliverer
            self._delivered.setdefault(deliverer, {})[key] = None
        if key not in self._lease_of:
            self._enqueue(key)

    def discard(self, key: TrajectoryKey) -> None:
        """Forget a trajectory that has its reward, or whose group ended."""
        self._dequeue(key)
        deliverer = self._deliverers.pop(key, "")
        if own := self._delivered.get(deliverer):
            own.pop(key, None)
            if not own:
                del self._delivered[deliverer]
                self._there.pop(deliverer, None)
        if self._failures.pop(key, None) is not None:
            failed = self._failed_of.get(key[0], {})
            failed.pop(key[1], None)
            if not failed:
                self._failed_of.pop(key[0], None)
            self._sort_out(key[0])
        self._lapsed.pop(key, None)
        if (lease_id := self._lease_of.get(key)) is not None:
            self._end(lease_id)

    def failed(self, key: TrajectoryKey, name: str, *, now_s: float) -> None:
        """Queue a trajectory again that a worker could not score; it is granted a little later."""
        failures = self._failures.setdefault(key, _Failures(set()))
        failures.names.add(name)
        pause_s = min(_FIRST_PAUSE_S * 4**failures.count, _LONGEST_PAUSE_S)
        failures.count += 1
        failures.not_before_s = now_s + pause_s
        self._failed_of.setdefault(key[0], {})[key[1]] = failures.count
        self.add(key)
        self._sort_out(key[0])

    def _decider(self, group_id: int) -> int | None:
        """Return the sibling that has failed most often, if any has."""
        failed = self._failed_of.get(group_id)
        return max(failed, key=lambda sibling: (failed[sibling], -sibling)) if failed else None

    def _sort_out(self, group_id: int) -> None:
        """After a failed attempt, hold back the group's waiting siblings except the decider."""
        decider = self._decider(group_id)
        for sibling in self._waiting_of.get(group_id, ()):
            key = (group_id, sibling)
            goes, comes = self._waiting, self._held_back
            if decider is None or sibling == decider:
                goes, comes = self._held_back, self._waiting
            if key in goes:
                del goes[key]
                comes[key] = None

    def lease(
        self,
        holder: str,
        credits_left: int,
        *,
        now_s: float,
        siblings_of: Callable[[int], tuple[int, ...]] | None = None,
        own_only: bool = False,
        size_of: Callable[[TrajectoryKey], int] = lambda _: 0,
    ) -> dict[int, TrajectoryKey]:
        """Grant up to ``credits_left`` trajectories; return them by lease.

        With ``siblings_of``, which returns no siblings of a group before all are generated, groups
        are granted whole or not at all, with siblings that have their reward already; a first group
        may be larger than the credits. With ``own_only`` a generator is granted its own answers
        alone. Together all granted have MAX_GRANTED_BYTES at most, unless the first one alone has
        more.
        """
        name = name_of(holder)
        queued: Iterable[TrajectoryKey] = self._waiting
        if own_only:
            self._there[name] = now_s
            queued = [key for key in self._delivered.get(name, ()) if key in self._waiting]
        else:
            self._seen[name] = now_s
        if len(self._seen) > _MANY_WORKERS:  # names HOST-PID of dead processes never return
            self._seen = {n: at for n, at in self._seen.items() if now_s - at <= self._lease_s}
        chosen: list[TrajectoryKey] = []
        groups: set[int] = set()
        passed = num_bytes = 0
        for key in queued:
            if len(chosen) >= credits_left or passed >= _LOOK_AHEAD:
                break
            if key[0] in groups:
                continue  # all of it was chosen
            work = [key]
            if siblings_of is not None:
                work = [(key[0], sibling) for sibling in siblings_of(key[0])]
                groups.add(key[0])
            size = sum(map(size_of, work))
            fits = not chosen or (
                len(chosen) + len(work) <= credits_left and num_bytes + size <= MAX_GRANTED_BYTES
            )
            if work and fits and all(self._may_have(candidate, name, now_s) for candidate in work):
                chosen += work
                num_bytes += size
            else:
                passed += 1
        return self._grant(holder, chosen, now_s)

    def _grant(
        self, holder: str, keys: Iterable[TrajectoryKey], now_s: float
    ) -> dict[int, TrajectoryKey]:
        granted: dict[int, TrajectoryKey] = {}
        for key in keys:
            self._dequeue(key)
            lease_id = self._next_lease_id
            self._next_lease_id += 1
            self._leases[lease_id] = ScoringLease(key, holder)
            self._terms.begin(lease_id, now_s)
            self._lease_of[key] = lease_id
            self._by_holder.add(holder, lease_id)
            granted[lease_id] = key
        return granted

    def _may_have(self, key: TrajectoryKey, name: str, now_s: float) -> bool:
        """True if it is not leased and this worker may try it now."""
        if key in self._lease_of:
            return False
        failures = self._failures.get(key)
        if failures is None:
            return True
        if now_s < failures.not_before_s:
            return False
        return name not in failures.names or not any(
            now_s - seen_s <= self._lease_s
            for other, seen_s in self._seen.items()
            if other not in failures.names
        )

    def finish(self, holder: str, lease_id: int, key: TrajectoryKey) -> bool:
        """End a lease with a result; False when this worker does not hold it, or not for that."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.holder != holder or lease.key != key:
            return False
        self._end(lease_id)
        return True

    def lapsed(self, holder: str, lease_id: int, key: TrajectoryKey) -> bool:
        """True if a worker held a trajectory by this lease, which ended without a result."""
        return self._lapsed.get(key, {}).get(lease_id) == holder

    def heartbeat(self, holder: str, lease_ids: Iterable[int], *, now_s: float) -> list[int]:
        """Extend leases; return the ones the worker no longer has."""
        if (name := name_of(holder)) in self._delivered:
            self._there[name] = now_s
        return self._terms.extend(self._leases, holder, lease_ids, now_s)

    def postpone(self, for_s: float) -> None:
        """Extend every term by the seconds in which no heartbeat could arrive."""
        self._terms.postpone(for_s)

    def release_all(self, holder: str) -> list[TrajectoryKey]:
        """Put back and return the work of a worker that died or restarted."""
        self._seen.pop(name_of(holder), None)
        return [self._put_back(i) for i in list(self._by_holder.get(holder, ()))]

    def give_back(self, holder: str, lease_id: int) -> bool:
        """Requeue work that a worker has not started; no attempt. False if it does not hold it."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.holder != holder:
            return False
        self._enqueue(self._end(lease_id))
        self.num_given_back += 1
        return True

    def release(self, lease_ids: Iterable[int]) -> None:
        """Put back leases that never arrived."""
        for lease_id in lease_ids:
            if lease_id in self._leases:
                self._put_back(lease_id)

    def expire(self, now_s: float) -> list[tuple[TrajectoryKey, str]]:
        """Put back the work of silent workers; return it with them, because an attempt ended."""
        overdue = [i for i in self._terms.overdue(now_s) if i in self._leases]
        ended = [(self._leases[i].key, self._leases[i].holder) for i in overdue]
        for lease_id in overdue:
            self._put_back(lease_id)
        for key, holder in ended:
            self._failures.setdefault(key, _Failures(set())).names.add(name_of(holder))
        return ended

    def abandoned(self, now_s: float) -> list[tuple[TrajectoryKey, str]]:
        """Return waiting work with its generator where that is gone and no worker is there.

        Each is returned again after every further term without either.
        """
        if any(now_s - seen_s <= self._lease_s for seen_s in self._seen.values()):
            return []
        found: list[tuple[TrajectoryKey, str]] = []
        for name, keys in self._delivered.items():
            if now_s - self._there.setdefault(name, now_s) > self._lease_s:
                self._there[name] = now_s
                found += [(key, name) for key in keys if key in self._waiting]
        return found

    def _put_back(self, lease_id: int) -> TrajectoryKey:
        holder = self._leases[lease_id].holder
        key = self._end(lease_id)
        self._lapsed.setdefault(key, {})[lease_id] = holder
        self._enqueue(key)
        if key in self._waiting:
            self._waiting.move_to_end(key, last=False)
        return key

    def _end(self, lease_id: int) -> TrajectoryKey:
        lease = self._leases.pop(lease_id)
        del self._lease_of[lease.key]
        self._terms.end(lease_id)
        self._by_holder.remove(lease.holder, lease_id)
        return lease.key

    def _enqueue(self, key: TrajectoryKey) -> None:
        decider = self._decider(key[0])
        queue = self._waiting if decider in {None, key[1]} else self._held_back
        queue[key] = None
        self._waiting_of.setdefault(key[0], {})[key[1]] = None

    def _dequeue(self, key: TrajectoryKey) -> None:
        if key[1] not in self._waiting_of.get(key[0], ()):
            return
        self._waiting.pop(key, None)
        self._held_back.pop(key, None)
        siblings = self._waiting_of[key[0]]
        del siblings[key[1]]
        if not siblings:
            del self._waiting_of[key[0]]
