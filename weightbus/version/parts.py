"""Pure: what a head relay knows of the parts of a learner on several hosts.

A version exists when every part has it whole, under one epoch and step. Time comes in as monotonic
seconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.wire.messages.versions import PolicyVersion


@dataclass(slots=True)
class PartSeat:
    """One part, as it reported itself last."""

    incarnation: str
    whole: frozenset[PolicyVersion]
    last_message_s: float


class PartBook:
    """The parts of one learner, besides the head's own."""

    def __init__(self, numbers: Iterable[int], *, silence_s: float) -> None:
        """Start without reports of any; a part is lost after ``silence_s`` without one."""
        self.numbers = frozenset(numbers)
        self._silence_s = silence_s
        self._seats: dict[int, PartSeat] = {}

    def heard(
        self, part: int, incarnation: str, whole: Iterable[PolicyVersion], now_s: float
    ) -> bool:
        """Record a report; return True if another relay serves the part now.

        What the relay before held for engines is held no more then.
        """
        before = self._seats.get(part)
        self._seats[part] = PartSeat(incarnation, frozenset(whole), now_s)
        return before is not None and before.incarnation != incarnation

    def lost(self, now_s: float) -> list[int]:
        """Return the parts that are silent, and forget what they had."""
        limit_s = now_s - self._silence_s
        silent = [part for part, seat in self._seats.items() if seat.last_message_s < limit_s]
        for part in silent:
            del self._seats[part]
        return silent

    def missing(self, version: PolicyVersion) -> list[int]:
        """Return the parts that have not reported a version whole."""
        return sorted(
            part
            for part in self.numbers
            if part not in self._seats or version not in self._seats[part].whole
        )

    def is_complete(self, version: PolicyVersion) -> bool:
        """True if every part has a version whole."""
        return not self.missing(version)


class Holds:
    """The versions that a head has a part keep, as the part knows them."""

    def __init__(self, *, linger_s: float) -> None:
        """Start without any; those of a head that is silent for ``linger_s`` lapse."""
        self._linger_s = linger_s
        self._head = ""
        self._last_message_s = 0.0
        self._held: set[PolicyVersion] = set()

    def heard(self, head: str, now_s: float) -> bool:
        """Record a sign of life; return True if another head is there, whose holds begin anew."""
        is_another = head != self._head
        if is_another:
            self._held.clear()
        self._head, self._last_message_s = head, now_s
        return is_another

    def hold(self, version: PolicyVersion) -> None:
        """Keep a version until it is released."""
        self._held.add(version)

    def release(self, version: PolicyVersion) -> None:
        """Keep it no longer."""
        self._held.discard(version)

    def held(self, now_s: float) -> frozenset[PolicyVersion]:
        """Return the versions that a living head has this part keep."""
        if self._last_message_s < now_s - self._linger_s:
            self._held.clear()
        return frozenset(self._held)
