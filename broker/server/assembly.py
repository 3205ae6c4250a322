"""Puts a server together: one lease book, the way to the store, and a handler per concern."""

import time
from collections.abc import Callable

from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.lease_book import LeaseBook
from slipstream.broker.ledger.scoring_queue import ScoringQueue
from slipstream.broker.report.reward_trouble import RewardTrouble
from slipstream.broker.report.run_report import RunReport
from slipstream.broker.server.clients import Clients
from slipstream.broker.server.generation import GenerationHandler
from slipstream.broker.server.images import ImageHandler
from slipstream.broker.server.keyring import KeyRing
from slipstream.broker.server.learner import LearnerHandler
from slipstream.broker.server.limits import ServerRules
from slipstream.broker.server.loop import BrokerServer, Handlers
from slipstream.broker.server.operators import OperatorHandler
from slipstream.broker.server.outbox import Outbox
from slipstream.broker.server.pending import PendingRequests
from slipstream.broker.server.router import RouterGroup
from slipstream.broker.server.scoring import ScoringHandler
from slipstream.broker.store.base import TrajectoryStore
from slipstream.broker.store.event_log import Trail
from slipstream.broker.store.group_commit import GroupCommitter
from slipstream.broker.store.journal import LedgerWriter
from slipstream.broker.store.payload_cache import FrameCache
from slipstream.wire.files.image_folder import ImageFolder


def make_server(
    ledger: Ledger,
    scoring: ScoringQueue,
    store: TrajectoryStore,
    committer: GroupCommitter,
    report: RunReport,
    rules: ServerRules,
    images: ImageFolder,
    *,
    keys: KeyRing | None = None,
    trail: Trail | None = None,
    on_epoch: Callable[[int], None] = lambda _: None,
    now: Callable[[], float] = time.monotonic,
) -> BrokerServer:
    """Return a server that listens nowhere yet; ``on_epoch`` remembers an epoch before a grant."""
    pending, routers, trouble = PendingRequests(), RouterGroup(), RewardTrouble()
    frames = FrameCache(rules.cache_bytes, store, committer)
    leases = LeaseBook(
        ledger, scoring, scores_inline=rules.scores_inline, on_return=pending.settle_soon
    )
    writer = LedgerWriter(ledger.book.state, committer, trail or Trail(), routers.hold)
    outbox = Outbox(leases, writer, frames, report, pending)
    clients = Clients(ledger, leases, report, keys, now)
    sessions = clients.sessions
    scores = ScoringHandler(ledger.book, leases, frames, sessions, report.records, trouble, now)
    learner = LearnerHandler(
        ledger,
        frames,
        sessions,
        clients,
        report,
        trouble,
        on_epoch=on_epoch,
        persist=outbox.persist,
    )
    handlers = Handlers(
        clients=clients,
        generation=GenerationHandler(ledger, leases, frames, sessions, scores, now),
        scoring=scores,
        learner=learner,
        images=ImageHandler(images),
        operators=OperatorHandler(ledger, clients, report),
    )
    return BrokerServer(ledger, leases, handlers, outbox, pending, routers, rules, now)
