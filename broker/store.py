"""Where the broker keeps what must survive it: events in order, and payloads by trajectory."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from broker.ledger import TrajectoryKey
from wire.codec import Frame


@dataclass(frozen=True, slots=True)
class StoredTrajectory:
    """The opaque frames of one trajectory."""

    payload: Frame
    transcript: Frame


@dataclass(slots=True)
class Changes:
    """What one group commit writes, all of it or nothing."""

    events: list[bytes] = field(default_factory=list)
    put: dict[TrajectoryKey, StoredTrajectory] = field(default_factory=dict)
    remove: list[TrajectoryKey] = field(default_factory=list)

    def merge(self, other: "Changes") -> None:
        """Append what came later."""
        self.events.extend(other.events)
        self.put.update(other.put)
        self.remove.extend(other.remove)


class TrajectoryStore(Protocol):
    """Durable storage. ``commit`` returns when the changes are as durable as configured."""

    async def commit(self, changes: Changes) -> None:
        """Write all changes in one transaction."""
        ...

    async def fetch(self, keys: Sequence[TrajectoryKey]) -> list[StoredTrajectory]:
        """Return stored trajectories; KeyError names one that is not there."""
        ...

    def replay(self) -> AsyncIterator[bytes]:
        """Yield all events in the order in which they were committed."""
        ...

    async def clear(self) -> None:
        """Forget everything of this run."""
        ...

    async def server_version(self) -> str:
        """Return the name and version of the server behind the store."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


class MemoryStore:
    """Keeps everything in this process; for unit tests."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._trajectories: dict[TrajectoryKey, StoredTrajectory] = {}

    async def commit(self, changes: Changes) -> None:
        """Write all changes in one transaction."""
        self._events.extend(changes.events)
        self._trajectories.update(changes.put)
        for key in changes.remove:
            self._trajectories.pop(key, None)

    async def fetch(self, keys: Sequence[TrajectoryKey]) -> list[StoredTrajectory]:
        """Return stored trajectories; KeyError names one that is not there."""
        return [self._trajectories[key] for key in keys]

    async def replay(self) -> AsyncIterator[bytes]:
        """Yield all events in the order in which they were committed."""
        for event in list(self._events):
            yield event

    async def clear(self) -> None:
        """Forget everything of this run."""
        self._events.clear()
        self._trajectories.clear()

    async def server_version(self) -> str:
        """Return the name and version of the server behind the store."""
        return "memory"

    async def close(self) -> None:
        """Let go of connections."""
