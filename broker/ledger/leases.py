"""Common parts of generation and scoring leases: a holder, and a term."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Protocol


def holder_of(name: str, incarnation: str) -> str:
    """Return the holder name of one incarnation of a role."""
    return f"{name}@{incarnation}" if incarnation else name


def name_of(holder: str) -> str:
    """Return the role of a holder."""
    return holder.partition("@")[0]


class LeasedWork(Protocol):
    """Leased work."""

    @property
    def holder(self) -> str:
        """Holder of the lease."""
        ...


class LeaseTerms:
    """Terms of leases. All are equally long, so leases lapse in the order of granting.

    A lease that ended otherwise may be left here: callers check overdue leases against held ones.
    """

    def __init__(self, lease_s: float, max_lease_s: float = 0.0) -> None:
        """Start without leases; a ``max_lease_s`` of 0 is no limit in spite of heartbeats."""
        self._lease_s = lease_s
        self._max_lease_s = max_lease_s
        self._begun: dict[int, float] = {}  # lease -> time granted, if there is a limit
        self._ends: OrderedDict[int, float] = OrderedDict()  # lease -> time of lapse, in order
        self._extension_s = 0.0  # in which no heartbeat could arrive; added to every term

    def begin(self, lease_id: int, now_s: float) -> None:
        """Give a lease a full term from now on."""
        if self._max_lease_s:
            self._begun.setdefault(lease_id, now_s - self._extension_s)
        self._ends[lease_id] = now_s - self._extension_s + self._lease_s
        self._ends.move_to_end(lease_id)

    def begin_all(self, lease_ids: Iterable[int], now_s: float) -> None:
        """Give every lease a full term: no heartbeat could have arrived."""
        self._ends.clear()
        self._begun.clear()
        for lease_id in lease_ids:
            self.begin(lease_id, now_s)

    def postpone(self, by_s: float) -> None:
        """Have every lease lapse later: no heartbeat could arrive for that long."""
        self._extension_s += by_s

    def extend(
        self, leases: Mapping[int, LeasedWork], holder: str, lease_ids: Iterable[int], now_s: float
    ) -> list[int]:
        """Give a holder's leases a full term; return the ones it no longer has."""
        lost = []
        for lease_id in lease_ids:
            lease = leases.get(lease_id)
            began_s = self._begun.get(lease_id)
            too_old = (
                began_s is not None and now_s - self._extension_s - began_s > self._max_lease_s
            )
            if lease is None or lease.holder != holder or too_old:
                lost.append(lease_id)
            else:
                self.begin(lease_id, now_s)
        return lost

    def end(self, lease_id: int) -> None:
        """Forget a lease."""
        self._begun.pop(lease_id, None)
        self._ends.pop(lease_id, None)

    def overdue(self, now_s: float) -> list[int]:
        """Return the leases whose term is over, and forget them."""
        overdue = []
        for lease_id, end_s in self._ends.items():
            if end_s + self._extension_s >= now_s:
                break
            overdue.append(lease_id)
        for lease_id in overdue:
            self.end(lease_id)
        return overdue


class Holdings(dict[str, dict[int, None]]):
    """Leases by holder, in the order of granting; a holder without leases is not in it."""

    def add(self, holder: str, lease_id: int) -> None:
        """Note a lease."""
        self.setdefault(holder, {})[lease_id] = None

    def remove(self, holder: str, lease_id: int) -> None:
        """Forget a lease."""
        held = self[holder]
        del held[lease_id]
        if not held:
            del self[holder]
