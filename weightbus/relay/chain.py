"""Pure: which engines fetch a version from the relay, and which from an engine that has it.

At most ``fanout`` engines fetch from the relay; behind each stands a chain of the others, in the
order in which they come, and each serves one at most. An engine is placed once per version: its
source was placed before it, so no two wait for each other. One that comes again, because it failed,
gets the version from the relay and serves nobody. Whoever stands behind another has the relay as
its last source, so that a chain heals.
"""

import re
from collections.abc import Sequence

import msgspec

from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import BulkDoor

_KEY = re.compile(r"[!-~]{40}")  # a public key as Z85
# An engine's word: no name, which agents would look up, nor anything else that ZeroMQ takes.
_ADDRESS = re.compile(r"tcp://[0-9]{1,3}(\.[0-9]{1,3}){3}:[0-9]{1,5}")


class Chains:
    """The chains of the newest version."""

    def __init__(self, fanout: int) -> None:
        """Start without engines; 0 is a star: all fetch from the relay."""
        self.fanout = fanout
        self._version: PolicyVersion | None = None
        self._chains: list[list[str]] = []
        self._placed: set[str] = set()

    def place(self, version: PolicyVersion, name: str) -> str | None:
        """Return the engine behind which another stands for a version; None for the relay.

        Engines that offer no door to others are not to be placed.
        """
        if self.fanout == 0:
            return None
        if self._version != version:
            self._version, self._chains, self._placed = version, [], set()
        if name in self._placed:
            return None
        self._placed.add(name)
        if len(self._chains) < self.fanout:
            self._chains.append([name])
            return None
        shortest = min(self._chains, key=len)
        shortest.append(name)
        return shortest[-2]

    def leave(self, name: str) -> None:
        """Have no other engine stand behind one: it failed, or left."""
        if self.fanout == 0:
            return
        self._placed.add(name)  # also one that was served alone
        for chain in self._chains:
            if name in chain:
                chain.remove(name)
        self._chains = [chain for chain in self._chains if chain]


def may_be_source(door: BulkDoor | None) -> bool:
    """True if others can be sent to the door that an engine offers: it has a key, at an address."""
    if door is None:
        return False
    return bool(_ADDRESS.fullmatch(door.endpoint) and _KEY.fullmatch(door.key))


def sources_behind(
    before: BulkDoor | None, own: BulkDoor, parts: Sequence[Sequence[BulkDoor]] = ()
) -> tuple[tuple[BulkDoor, ...], ...]:
    """Return the sources of an engine, by part, for Receive.

    Args:
        before: door of the engine before it in its chain; None at its head.
        own: the relay's door for it, the last source where a part names none.
        parts: doors of each part of the version; none if all is in this relay's memory.
    """
    if before is None:
        return tuple(tuple(doors) for doors in parts)
    engine = msgspec.structs.replace(before, of_engine=True)
    return tuple((engine, *doors) for doors in parts or ((own,),))
