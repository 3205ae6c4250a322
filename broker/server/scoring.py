"""Requests of reward workers, and of generators that score their own answers."""

import logging
import time
from collections.abc import Callable

from slipstream.broker.ledger.book import Book
from slipstream.broker.ledger.lease_book import LeaseBook
from slipstream.broker.report.reward_trouble import RewardTrouble
from slipstream.broker.report.run_records import RunRecords
from slipstream.broker.server.reply import BrokerReply, Later, Outcome, log_text
from slipstream.broker.server.sessions import ClientSession, Sessions
from slipstream.broker.store.base import StoredTrajectory
from slipstream.broker.store.payload_cache import FrameCache
from slipstream.wire.messages.broker import (
    Done,
    LeaseScoring,
    ScoringItem,
    ScoringLeased,
    SubmitScores,
)
from slipstream.wire.messages.trajectory import Score, TrajectoryKey

_log = logging.getLogger(__name__)

MAX_CREDITS = 4_096


class ScoringHandler:
    """Answers reward workers."""

    def __init__(
        self,
        book: Book,
        leases: LeaseBook,
        frames: FrameCache,
        sessions: Sessions,
        records: RunRecords,
        trouble: RewardTrouble,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._book = book
        self._leases = leases
        self._frames = frames
        self._sessions = sessions
        self._records = records
        self._trouble = trouble
        self._now = now

    def handle(self, session: ClientSession, request: SubmitScores) -> BrokerReply:
        """Take scores, each with the lease that it was made under."""
        for score in request.scores:
            if self._leases.accepts(session.holder, score):
                self.take(session, score)
        return BrokerReply(Done())

    def take(self, session: ClientSession, score: Score) -> None:
        """Take one score, or the reason for its absence."""
        group = self._leases.score(score, session.holder, now_s=self._now())
        if group is None:
            return
        if group.item == "eval" and group.state == "ready":
            keys = [(group.group_id, sibling) for sibling in range(group.size)]
            kept = {key[1]: self._frames.get(key) for key in keys}
            self._records.eval_answers(group, {i: stored for i, stored in kept.items() if stored})
        function = log_text(score.function)
        if score.sibling in group.scores:
            self._trouble.scored(function)
            return
        reason = log_text(group.failures[-1].reason if group.failures else score.unavailable)
        if warning := self._trouble.failed(function, reason):
            _log.warning("%s; try it without a run: slipstream reward test", warning)
        if score.group_id in self._book.groups:
            at = (score.group_id, score.sibling)
            _log.warning("no reward for trajectory %d/%d: %s", *at, reason)

    def lease(self, session: ClientSession, request: LeaseScoring) -> Outcome | None:
        """Grant trajectories to score; None while there are none."""
        finished = self._book.over
        leased: dict[int, TrajectoryKey] = {}
        if self._sessions.is_current(session):
            leased = self._leases.lease_scoring(
                session.holder,
                min(request.credits, MAX_CREDITS),
                now_s=self._now(),
                whole_groups=request.whole_groups,
                own_only=session.role == "generator",
            )
            if not leased and not finished:
                return None
        found = {key: one for key in leased.values() if (one := self._frames.get(key))}
        if len(found) < len(leased):
            return Later(self._load(leased, finished))
        return _work(leased, found, finished)

    async def _load(self, leased: dict[int, TrajectoryKey], finished: bool) -> BrokerReply:
        return _work(leased, await self._frames.load(leased.values()), finished)

    def no_work(self, _session: ClientSession, _request: LeaseScoring) -> BrokerReply:
        """Answer a reward worker that has waited long enough."""
        return BrokerReply(ScoringLeased(items=(), finished=self._book.over))


def _work(
    leased: dict[int, TrajectoryKey], found: dict[TrajectoryKey, StoredTrajectory], finished: bool
) -> BrokerReply:
    items = {lease_id: key for lease_id, key in leased.items() if key in found}
    answer = ScoringLeased(
        items=tuple(
            ScoringItem(group_id=key[0], sibling=key[1], lease_id=lease_id)
            for lease_id, key in items.items()
        ),
        finished=finished,
    )
    return BrokerReply(answer, [found[key].transcript for key in items.values()])
