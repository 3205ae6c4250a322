"""A store without a server, behind the same contract test as Redis."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from slipstream.broker.store.base import Changes, StoredTrajectory
from slipstream.wire.errors import SupersededError
from slipstream.wire.messages.trajectory import TrajectoryKey


@dataclass(slots=True)
class SharedMemory:
    """What several MemoryStores may share, as several brokers share one server."""

    generation: int = 0
    snapshot: bytes | None = None
    events: list[bytes] = field(default_factory=list)
    trajectories: dict[TrajectoryKey, StoredTrajectory] = field(default_factory=dict)


class MemoryStore:
    """Keeps everything in this process; for unit tests."""

    def __init__(self, shared: SharedMemory | None = None) -> None:
        self._shared = shared if shared is not None else SharedMemory()
        self._generation = 0

    async def claim(self) -> int:
        """Become the only writer; return the broker generation, greater than all before."""
        self._shared.generation += 1
        self._generation = self._shared.generation
        return self._generation

    async def commit(self, changes: Changes) -> None:
        """Write all changes in one transaction."""
        await self._hold_generation()
        shared = self._shared
        if changes.snapshot is not None:
            shared.snapshot = changes.snapshot
            shared.events.clear()
        shared.events.extend(changes.events)
        for key in changes.remove:
            shared.trajectories.pop(key, None)
        shared.trajectories.update(changes.put)

    async def snapshot(self) -> bytes | None:
        """Return the newest snapshot."""
        return self._shared.snapshot

    async def replay(self) -> AsyncIterator[bytes]:
        """Yield the events after the snapshot in the order in which they were committed."""
        for event in list(self._shared.events):
            yield event

    async def fetch(self, keys: Sequence[TrajectoryKey]) -> list[StoredTrajectory]:
        """Return stored trajectories; KeyError names one that is not there."""
        return [self._shared.trajectories[key] for key in keys]

    async def server_version(self) -> str:
        """Return the name and version of the server behind the store."""
        return "memory"

    async def durability(self) -> str:
        """State what an acknowledged commit survives."""
        return "memory: nothing outlives this process"

    async def close(self) -> None:
        """Let go of connections."""

    async def _hold_generation(self) -> None:
        if not self._generation:
            await self.claim()
        if self._generation != self._shared.generation:
            raise SupersededError(
                f"another broker has claimed the store: generation {self._shared.generation}, "
                f"this one has {self._generation}"
            )
