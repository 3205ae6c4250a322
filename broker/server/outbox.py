"""The way of the ledger's events into the store, and of answers that promise something."""

from collections.abc import Callable

from slipstream.broker.ledger.lease_book import LeaseBook
from slipstream.broker.report.run_report import RunReport
from slipstream.broker.server.pending import PendingRequests
from slipstream.broker.store.base import StoredTrajectory
from slipstream.broker.store.journal import LedgerWriter
from slipstream.broker.store.payload_cache import FrameCache
from slipstream.wire.messages.trajectory import TrajectoryKey


class Outbox:
    """Hands on what was recorded: to the store, to the report, and to requests that wait."""

    def __init__(
        self,
        leases: LeaseBook,
        writer: LedgerWriter,
        frames: FrameCache,
        report: RunReport,
        pending: PendingRequests,
    ) -> None:
        self._leases = leases
        self._writer = writer
        self._pending = pending
        self.frames = frames
        self.report = report

    @property
    def is_flooded(self) -> bool:
        """True while the store lags far behind."""
        return self._writer.is_flooded

    def persist(
        self,
        put: dict[TrajectoryKey, StoredTrajectory] | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Hand the ledger's events to the store; ``then`` follows when they are durable."""
        events, released = self._leases.drain()
        self._writer.write(events, put or {}, released, then)
        self.frames.discard(released)
        if events:
            self._pending.settle_soon()
            self.report.events(events)

    def close(self) -> None:
        """Write the run's outcome and the rest of the trail."""
        self.report.close()
        self._writer.close()
