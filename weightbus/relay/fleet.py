"""Pure: which members are brought to which version next, alone or in a group.

A member gets its first version, and a whole one after any failure, by itself; members with a
collective share a group from then on. Newest wins: nobody is brought to any other version than the
newest. Time comes in as monotonic seconds; nothing here waits, and nobody waits for another one but
within a publish to their group.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from slipstream.wire.messages.versions import PolicyVersion


@dataclass(eq=False, slots=True)
class Seat:
    """What the decisions need to know of one member."""

    name: str
    transport: str
    device: str
    adopted: PolicyVersion | None  # that its engine runs; None if it runs none, or a mixture
    heard_s: float
    shares_group: bool  # its transport serves several engines at once
    again_s: float = 0.0  # not before this
    group: "CollectiveGroup | None" = None
    receiving: PolicyVersion | None = None


@dataclass(eq=False, slots=True)
class CollectiveGroup:
    """Members that get versions together."""

    transport: str
    device: str
    seats: list[Seat] = field(default_factory=list)
    receiving: PolicyVersion | None = None


@dataclass(frozen=True, slots=True)
class Serving:
    """Bring these members to the newest version now."""

    version: PolicyVersion
    seats: tuple[Seat, ...]
    group: CollectiveGroup | None  # None: one member by itself


class Fleet:
    """Who is there, who runs what, and who is being served."""

    def __init__(self, *, silence_s: float, retry_s: float, engines_per_group: int) -> None:
        """Know nobody.

        Args:
            silence_s: who is not heard of for so long is given up.
            retry_s: who failed is left alone for so long.
            engines_per_group: most members that share a collective.
        """
        self.seats: dict[str, Seat] = {}
        self._silence_s = silence_s
        self._retry_s = retry_s
        self._engines_per_group = engines_per_group
        self._groups: list[CollectiveGroup] = []

    # ---- what has happened ---------------------------------------------------

    def join(self, seat: Seat) -> None:
        """Take in a member; one of that name must have been forgotten."""
        self.seats[seat.name] = seat

    def heard(self, name: str, adopted: PolicyVersion | None, now_s: float) -> None:
        """Note a heartbeat, and what the engine runs by it unless it is being served."""
        seat = self.seats[name]
        seat.heard_s = now_s
        if seat.receiving is None:
            seat.adopted = adopted

    def forget(self, name: str) -> CollectiveGroup | None:
        """Leave a member out; return its group if nobody is in that any more and nothing runs."""
        seat = self.seats.pop(name)
        return self._take_out(seat)

    def begun(self, serving: Serving) -> None:
        """Note that these members are being served: nothing else is decided for them."""
        for seat in serving.seats:
            seat.receiving = serving.version
        if serving.group is not None:
            serving.group.receiving = serving.version

    def finished(
        self, serving: Serving, adopted: Collection[str], now_s: float
    ) -> CollectiveGroup | None:
        """Note how a serving ended; return its group if nobody is in that any more.

        Args:
            serving: that was begun.
            adopted: names of those whose engines run the version; the others may hold a mixture,
                and are served alone after a while.
            now_s: monotonic seconds.
        """
        for seat in serving.seats:
            seat.receiving = None
            if seat.name in adopted:
                seat.adopted = serving.version
                continue
            seat.adopted, seat.again_s = None, now_s + self._retry_s
            if seat.group is not None:
                self._take_out(seat)
        if (group := serving.group) is None:
            return None
        group.receiving = None
        return self._dissolved(group) if not group.seats else None

    def _take_out(self, seat: Seat) -> CollectiveGroup | None:
        group, seat.group = seat.group, None
        if group is None:
            return None
        group.seats.remove(seat)
        return self._dissolved(group) if not group.seats and group.receiving is None else None

    def _dissolved(self, group: CollectiveGroup) -> CollectiveGroup | None:
        if group not in self._groups:
            return None
        self._groups.remove(group)
        return group

    # ---- what to do ----------------------------------------------------------

    def silent(self, now_s: float) -> list[str]:
        """Return who has to be forgotten, whatever is going on with it."""
        limit_s = now_s - self._silence_s
        return [name for name, seat in self.seats.items() if seat.heard_s < limit_s]

    def due(self, newest: PolicyVersion | None, now_s: float) -> list[Serving]:
        """Return whom to serve now; who can be in a group is put into one first."""
        idle = [s for s in self.seats.values() if s.receiving is None and s.again_s <= now_s]
        for seat in idle:
            if seat.group is None and seat.shares_group and seat.adopted is not None:
                self._admit(seat)
        if newest is None:
            return []
        servings = [
            Serving(newest, (seat,), None)
            for seat in idle
            if seat.group is None and seat.adopted != newest
        ]
        servings += [
            Serving(newest, tuple(group.seats), group)
            for group in self._groups
            if group.receiving is None and any(seat.adopted != newest for seat in group.seats)
        ]
        return servings

    def wait_s(self, now_s: float) -> float | None:
        """Return when ``due`` may say more though nothing has happened; None for never."""
        again = [s.again_s for s in self.seats.values() if s.again_s > now_s]
        return min(again) - now_s if again else None

    def _admit(self, seat: Seat) -> None:
        """Put a member into a group: only engines on like devices share a collective."""
        for group in self._groups:
            is_alike = (group.transport, group.device) == (seat.transport, seat.device)
            if is_alike and len(group.seats) < self._engines_per_group:
                break
        else:
            group = CollectiveGroup(seat.transport, seat.device)
            self._groups.append(group)
        group.seats.append(seat)
        seat.group = group
