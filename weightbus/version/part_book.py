"""Pure: a head relay's knowledge of the parts of a learner on several hosts.

A version exists when every part has it whole, under one epoch and step. Time comes in as monotonic
seconds.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slipstream.wire.messages.versions import PolicyVersion


@dataclass(slots=True)
class PartSeat:
    """Last report of one part."""

    incarnation: str
    whole: frozenset[PolicyVersion]
    last_message_s: float


class PartBook:
    """The parts of one learner, besides the head's own."""

    def __init__(self, numbers: Iterable[int], *, silence_s: float) -> None:
        """Start without reports; a part is lost after ``silence_s`` without one."""
        self.numbers = frozenset(numbers)
        self._silence_s = silence_s
        self._seats: dict[int, PartSeat] = {}

    def heard(
        self, part: int, incarnation: str, whole: Iterable[PolicyVersion], now_s: float
    ) -> bool:
        """Record a report; return True if another relay serves the part now.

        Versions that the earlier relay held for engines are not held any more then.
        """
        before = self._seats.get(part)
        self._seats[part] = PartSeat(incarnation, frozenset(whole), now_s)
        return before is not None and before.incarnation != incarnation

    def lost(self, now_s: float) -> list[int]:
        """Return the silent parts, and forget their versions."""
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
    """Return a digest of the keys that may fetch, public key -> name."""
    lines = "".join(f"{key} {name}\n" for key, name in sorted(keys.items()))
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


class KnownKeys:
    """Keys that may fetch from a part, confirmed by a living head."""

    def __init__(self, *, linger_s: float) -> None:
        """Know no key; keys lapse if no head confirms them for ``linger_s``."""
        self._linger_s = linger_s
        self._confirmed_s = 0.0
        self.digest = ""
        """Digest of the known keys; empty if there are none."""

    def heard(self, digest: str, keys: Mapping[str, str] | None, now_s: float) -> bool:
        """Record a head's message; return True if ``keys`` are to be admitted from now on.

        A head without keys of its own, or with other keys than ours, confirms nothing.
        """
        is_news = keys is not None and digest_of_keys(keys) == digest
        if digest and (is_news or digest == self.digest):
            self.digest, self._confirmed_s = digest, now_s
        return is_news

    def lapses_in_s(self, now_s: float) -> float | None:
        """Return the seconds until the keys lapse; None if no key may fetch."""
        return self._confirmed_s + self._linger_s - now_s if self.digest else None

    def lapse(self) -> None:
        """Forget all keys."""
        self.digest = ""


class Holds:
    """The versions that a part keeps for a head."""

    def __init__(self, *, linger_s: float) -> None:
        """Start without versions; they lapse if their head is silent for ``linger_s``."""
        self._linger_s = linger_s
        self._head = ""
        self._last_message_s = 0.0
        self._held: set[PolicyVersion] = set()

    def heard(self, head: str, now_s: float) -> bool:
        """Record a sign of life; return True if it is of another head: no version is held then."""
        is_another = head != self._head
        if is_another:
            self._held.clear()
        self._head, self._last_message_s = head, now_s
        return is_another

    def hold(self, version: PolicyVersion) -> None:
        """Keep a version until it is released."""
        self._held.add(version)

    def release(self, version: PolicyVersion) -> None:
        """Keep a version no longer."""
        self._held.discard(version)

    def held(self, now_s: float) -> frozenset[PolicyVersion]:
        """Return the versions that this part keeps for a living head."""
        if self._last_message_s < now_s - self._linger_s:
            self._held.clear()
        return frozenset(self._held)
