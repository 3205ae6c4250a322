"""Pure: what a head relay knows of the parts of a learner on several hosts.

A version exists when every part has it whole, under one epoch and step. Time comes in as monotonic
seconds.
"""

import hashlib
from collections.abc import Iterable, Mapping
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


def digest_of_keys(keys: Mapping[str, str]) -> str:
    """Return a digest of who may fetch, public key -> name."""
    lines = "".join(f"{key} {name}\n" for key, name in sorted(keys.items()))
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


class KnownKeys:
    """Who may fetch from a part, as far as a living head says so."""

    def __init__(self, *, linger_s: float) -> None:
        """Know nobody; what a head that is silent for ``linger_s`` said lapses."""
        self._linger_s = linger_s
        self._confirmed_s = 0.0
        self.digest = ""
        """Of the keys that are known; empty before the first."""

    def heard(self, digest: str, keys: Mapping[str, str] | None, now_s: float) -> bool:
        """Record what a head says; return True if ``keys`` are to be admitted from now on.

        A head that does not know them itself, or ours of another, confirms nothing.
        """
        is_news = keys is not None and digest_of_keys(keys) == digest
        if digest and (is_news or digest == self.digest):
            self.digest, self._confirmed_s = digest, now_s
        return is_news

    def lapses_in_s(self, now_s: float) -> float | None:
        """Return the seconds until nobody may fetch any more; None where nobody may."""
        return self._confirmed_s + self._linger_s - now_s if self.digest else None

    def lapse(self) -> None:
        """Know nobody."""
        self.digest = ""


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
