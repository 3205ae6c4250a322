"""Pure: assigns each engine its source of a version, the relay or an engine that has it.

At most ``fanout`` engines fetch from the relay. Each of them is the head of a chain of the other
engines, in the order of arrival; each engine serves one other at most. An engine is placed once per
version, after its source, so no two engines wait for each other. An engine that comes again after a
failure gets the version from the relay and serves no other. Every engine in a chain has the relay
as its last source, so that a chain heals.
"""

import re
from collections.abc import Sequence

import msgspec

from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import BulkDoor

_KEY = re.compile(r"[!-~]{40}")  # a public key as Z85
# Addresses come from engines: accept no names, which agents would look up, nor other endpoints of
# ZeroMQ.
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
        """Return the source of an engine for a version: another engine, or None for the relay.

        Only place engines that offer a door to others.
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
        """Take an engine that failed or left out of its chain: it serves no other."""
        if self.fanout == 0:
            return
        self._placed.add(name)  # also an engine that was served alone
        for chain in self._chains:
            if name in chain:
                chain.remove(name)
        self._chains = [chain for chain in self._chains if chain]


def may_be_source(door: BulkDoor | None) -> bool:
    """True if others can use the door that an engine offers: it has a key and an address."""
    if door is None:
        return False
    return bool(_ADDRESS.fullmatch(door.endpoint) and _KEY.fullmatch(door.key))


def sources_behind(
    before: BulkDoor | None, own: BulkDoor, parts: Sequence[Sequence[BulkDoor]] = ()
) -> tuple[tuple[BulkDoor, ...], ...]:
    """Return the sources of an engine, by part, for ReceiveVersion.

    ``before`` is the engine before it in its chain, ``own`` the relay's door for it, the last
    source if there are no ``parts``.
    """
    if before is None:
        return tuple(tuple(doors) for doors in parts)
    engine = msgspec.structs.replace(before, of_engine=True)
    return tuple((engine, *doors) for doors in parts or ((own,),))
