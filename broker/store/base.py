"""Interface of the broker's durable store: a snapshot, events in order, and payloads."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from slipstream.wire.messages.codec import Frame
from slipstream.wire.messages.trajectory import TrajectoryKey


class StoredTrajectory(msgspec.Struct, frozen=True):
    """The opaque frames of one trajectory."""

    payload: Frame
    transcript: Frame

    @property
    def num_bytes(self) -> int:
        """Size of both frames."""
        return len(self.payload) + len(self.transcript)


@dataclass(slots=True)
class Changes:
    """Changes of one group commit, written as a whole or not at all.

    A trajectory that one and the same change puts and removes is removed. A snapshot covers
    everything recorded before it: the events of earlier commits go, ``events`` follow it.
    """

    events: list[bytes] = field(default_factory=list)
    put: dict[TrajectoryKey, StoredTrajectory] = field(default_factory=dict)
    remove: list[TrajectoryKey] = field(default_factory=list)
    snapshot: bytes | None = None

    def __post_init__(self) -> None:
        if self.put and self.remove and (gone := self.put.keys() & set(self.remove)):
            self.put = {key: stored for key, stored in self.put.items() if key not in gone}

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to write."""
        return not (self.events or self.put or self.remove) and self.snapshot is None

    @property
    def num_bytes(self) -> int:
        """Size of the payloads, transcripts, events and the snapshot."""
        return (
            sum(stored.num_bytes for stored in self.put.values())
            + sum(map(len, self.events))
            + len(self.snapshot or b"")
        )

    def merge(self, other: "Changes") -> None:
        """Append later changes.

        The result holds a key in both ``put`` and ``remove`` if it was removed and put again.
        """
        if other.snapshot is not None:
            self.snapshot = other.snapshot
            self.events.clear()
        self.events += other.events
        for key in other.remove:
            self.put.pop(key, None)
        self.remove += other.remove
        self.put |= other.put


class TrajectoryStore(Protocol):
    """Durable storage with one writer: the last to claim it.

    A handle that has not claimed does so with its first write.
    """

    async def claim(self) -> int:
        """Become the only writer; return the broker generation, greater than all before."""
        ...

    async def commit(self, changes: Changes) -> None:
        """Write all changes in one transaction; on return they are as durable as configured.

        Raises:
            SupersededError: another broker has claimed since; nothing of this was stored.
            StoreLostError: the store lacks commits that it acknowledged.
            PeerLostError: the server was away for too long.
        """
        ...

    async def snapshot(self) -> bytes | None:
        """Return the newest snapshot."""
        ...

    def replay(self) -> AsyncIterator[bytes]:
        """Yield the events after the snapshot in the order in which they were committed."""
        ...

    async def fetch(self, keys: Sequence[TrajectoryKey]) -> list[StoredTrajectory]:
        """Return stored trajectories; KeyError names a missing one."""
        ...

    async def server_version(self) -> str:
        """Return the name and version of the server behind the store."""
        ...

    async def durability(self) -> str:
        """Describe the durability of an acknowledged commit."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...
