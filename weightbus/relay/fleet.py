"""Pure: decides the members to bring to a version next, alone or in a group.

A member gets its first version, and a whole one after any failure, by itself; afterwards it shares
a group if its transport has groups. Newest wins: members are brought to the newest version only.
Time comes in as monotonic seconds. Nothing here waits, and a member waits for others only within a
publish to their group.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from slipstream.wire.messages.versions import PolicyVersion


@dataclass(eq=False, slots=True)
class Seat:
    """State of one member, for decisions."""

    name: str
    transport: str
    device: str
    adopted: PolicyVersion | None  # version that its engine runs; None for none or a mixture
    last_message_s: float
    shares_group: bool  # its transport serves several engines at once
    again_s: float = 0.0  # not served before this time
    group: "CollectiveGroup | None" = None
    receiving: PolicyVersion | None = None


@dataclass(eq=False, slots=True)
class CollectiveGroup:
    """Members that receive versions together."""

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
    """The members, the versions that they run, and the servings under way."""

    def __init__(self, *, silence_s: float, retry_s: float, engines_per_group: int) -> None:
        """Start without members; a member is silent after ``silence_s`` without a heartbeat.

        ``retry_s`` is the pause after a failure.
        """
        self.seats: dict[str, Seat] = {}
        self._silence_s = silence_s
        self._retry_s = retry_s
        self._engines_per_group = engines_per_group
        self._groups: list[CollectiveGroup] = []

    # ---- events --------------------------------------------------------------

    def join(self, seat: Seat) -> None:
        """Add a member; forget an earlier one of that name first."""
        self.seats[seat.name] = seat

    def heartbeat(self, name: str, adopted: PolicyVersion | None, now_s: float) -> None:
        """Record a heartbeat and, unless the member is being served, the version in it."""
        seat = self.seats[name]
        seat.last_message_s = now_s
        if seat.receiving is None:
            seat.adopted = adopted

    def forget(self, name: str) -> CollectiveGroup | None:
        """Remove a member; return its group if it is empty now and no publish to it runs."""
        seat = self.seats.pop(name)
        return self._take_out(seat)

    def started(self, serving: Serving) -> None:
        """Record that these members are being served: they get no other decision meanwhile."""
        for seat in serving.seats:
            seat.receiving = serving.version
        if serving.group is not None:
            serving.group.receiving = serving.version

    def finished(
        self, serving: Serving, adopted: Collection[str], now_s: float
    ) -> CollectiveGroup | None:
        """Record the end of a serving; return its group if that is empty now.

        ``adopted`` names members whose engines run the version; the others may hold a mixture, and
        are served alone after a while.
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

    def postponed(self, serving: Serving, now_s: float) -> None:
        """Record that a serving did not begin; its members are unchanged, and wait a while."""
        for seat in serving.seats:
            seat.receiving = None
            seat.again_s = now_s + self._retry_s
        if serving.group is not None:
            serving.group.receiving = None

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

    # ---- decisions -----------------------------------------------------------

    def silent(self, now_s: float) -> list[str]:
        """Return the members to forget, even if they are being served."""
        limit_s = now_s - self._silence_s
        return [name for name, seat in self.seats.items() if seat.last_message_s < limit_s]

    def due(self, newest: PolicyVersion | None, now_s: float) -> list[Serving]:
        """Return the servings to start now; members that may share a group join one first."""
        idle = [s for s in self.seats.values() if s.receiving is None and s.again_s <= now_s]
        for seat in idle:
            if seat.group is not None or not seat.shares_group or seat.adopted is None:
                continue
            for group in self._groups:  # members of a group have one transport and kind of device
                is_alike = (group.transport, group.device) == (seat.transport, seat.device)
                if is_alike and len(group.seats) < self._engines_per_group:
                    break
            else:
                group = CollectiveGroup(seat.transport, seat.device)
                self._groups.append(group)
            group.seats.append(seat)
            seat.group = group
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
        """Return the seconds until ``due`` may change without an event; None for never."""
        again = [s.again_s for s in self.seats.values() if s.again_s > now_s]
        return min(again) - now_s if again else None
