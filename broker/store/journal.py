"""Writes the ledger's events into the store, and into the trail once they are durable."""

import asyncio
import time
from collections.abc import Callable, Sequence

from slipstream.broker.ledger.events import LedgerEvent, encode_event
from slipstream.broker.ledger.state import BookState, encode_state
from slipstream.broker.store.base import Changes, StoredTrajectory
from slipstream.broker.store.event_log import Trail
from slipstream.broker.store.group_commit import GroupCommitter
from slipstream.wire.messages.trajectory import TrajectoryKey

MAX_BACKLOG = 20_000  # changes that the store has not taken; past it nothing more is received
MAX_BACKLOG_BYTES = 256 * 1024 * 1024
_SNAPSHOT_AFTER_EVENTS = 20_000
_EVENTS_PER_GROUP = 2  # a snapshot costs as much as this many events of every group in it


class LedgerWriter:
    """Hands changes to the committer, with a snapshot now and then.

    ``on_flood`` is called with True when the store lags so far that nothing more should be taken,
    and False when it has caught up by half.
    """

    def __init__(
        self,
        state: BookState,
        committer: GroupCommitter,
        trail: Trail,
        on_flood: Callable[[bool], None],
        *,
        snapshot_after_events: int = _SNAPSHOT_AFTER_EVENTS,
    ) -> None:
        self._state = state
        self._committer = committer
        self._trail = trail
        self._on_flood = on_flood
        self._events_since_snapshot = 0
        self._after_events = self._look_again_at = snapshot_after_events
        self._writing_trail: asyncio.Handle | None = None
        self.is_flooded = False

    def write(
        self,
        events: Sequence[LedgerEvent],
        put: dict[TrajectoryKey, StoredTrajectory],
        released: list[TrajectoryKey],
        then: Callable[[], None] | None,
    ) -> None:
        """Store events; ``then`` is called when these and all before them are durable.

        The state has taken the events in already; ``released`` payloads are no longer needed.
        """
        if not (events or put or released):
            if then is None:
                return
            if not self._committer.backlog:  # all that was handed in is durable
                then()
                return
        encoded = [encode_event(event) for event in events]
        first = self._state.num_events - len(events)
        changes = Changes(encoded, put, released)
        if events:
            changes.snapshot = self._snapshot_if_due(len(events))
            if changes.snapshot is not None:
                changes.events = []
        at_s = time.time()

        def durable() -> None:
            if encoded:
                self._trail.note(first, at_s, encoded)
                if self._writing_trail is None:  # once for all that becomes durable together
                    loop = asyncio.get_running_loop()
                    self._writing_trail = loop.call_soon(self._write_trail)
            if then is not None:
                then()
            if self.is_flooded and not self._lags(0.5):
                self.is_flooded = False
                self._on_flood(False)

        self._committer.add(changes, durable)
        if not self.is_flooded and self._lags(1.0):
            self.is_flooded = True
            self._on_flood(True)

    def _lags(self, share: float) -> bool:
        committer = self._committer
        return (
            committer.backlog > MAX_BACKLOG * share
            or committer.backlog_bytes > MAX_BACKLOG_BYTES * share
        )

    def _write_trail(self) -> None:
        self._writing_trail = None
        self._trail.write()

    def _snapshot_if_due(self, num_events: int) -> bytes | None:
        """Return the state once there are as many events as it is worth."""
        self._events_since_snapshot += num_events
        if self._events_since_snapshot < self._look_again_at:
            return None
        state = self._state
        held = len(state.groups) + sum(map(len, state.replay.values()))
        self._look_again_at = max(self._after_events, held * _EVENTS_PER_GROUP)
        if self._events_since_snapshot < self._look_again_at:
            return None
        self._events_since_snapshot, self._look_again_at = 0, self._after_events
        return encode_state(state)

    def close(self) -> None:
        """Write the rest of the trail, and close it."""
        if self._writing_trail is not None:
            self._writing_trail.cancel()
            self._writing_trail = None
        self._trail.close()
