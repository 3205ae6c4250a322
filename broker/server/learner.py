"""Requests of the learner: epochs, batches, payloads, commits, checkpoints."""

import logging
from collections.abc import Callable
from typing import TypeAlias, assert_never

from slipstream.broker.ledger.admission import NotYet
from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.groups import as_delivered
from slipstream.broker.ledger.leases import name_of
from slipstream.broker.ledger.state import encode_state
from slipstream.broker.ledger.view import describe_wait
from slipstream.broker.report.reward_trouble import RewardTrouble
from slipstream.broker.report.run_report import RunReport
from slipstream.broker.report.staleness_report import throttle_figures
from slipstream.broker.server.clients import Clients
from slipstream.broker.server.reply import BrokerReply, HelloFirstError, Later, Outcome, log_text
from slipstream.broker.server.sessions import ClientSession, Sessions
from slipstream.broker.store.payload_cache import FrameCache
from slipstream.wire.errors import ForbiddenError, RefusedError, SlowDownError
from slipstream.wire.messages.broker import (
    BatchDelivered,
    BatchNotReady,
    Done,
    FetchPayloads,
    GetLedgerSnapshot,
    LedgerSnapshotAnswer,
    Payloads,
    RejectBatch,
    RequestBatch,
    RunComplete,
    SealSteps,
    StepCommit,
    StepCommitted,
    TakeOver,
    TookOver,
)
from slipstream.wire.process.rate_limited_log import RateLimitedLog

_log = logging.getLogger(__name__)
_unwritten = RateLimitedLog(_log, logging.ERROR)

LearnerRequest: TypeAlias = (
    TakeOver | FetchPayloads | StepCommit | RejectBatch | SealSteps | GetLedgerSnapshot
)


class LearnerHandler:
    """Answers the learner."""

    def __init__(
        self,
        ledger: Ledger,
        frames: FrameCache,
        sessions: Sessions,
        clients: Clients,
        report: RunReport,
        trouble: RewardTrouble,
        *,
        on_epoch: Callable[[int], None],
        persist: Callable[[], None],
    ) -> None:
        self._training = ledger.training
        self._book = ledger.book
        self._frames = frames
        self._sessions = sessions
        self._clients = clients
        self._report = report
        self._trouble = trouble
        self._on_epoch = on_epoch
        self._persist = persist

    def handle(self, session: ClientSession, request: LearnerRequest) -> Outcome:
        """Carry out a request.

        Raises:
            ForbiddenError: it is for the learner alone that took over.
        """
        if not isinstance(request, TakeOver | FetchPayloads):
            self._refuse_others(session, request)
        match request:
            case TakeOver():
                return BrokerReply(self._take_over(session, request))
            case FetchPayloads():
                return self._fetch(request)
            case StepCommit():
                if self._report.records.wants_batches:
                    return Later(self._record_and_commit(request))
                return BrokerReply(self._commit(request))
            case RejectBatch(step=step, reason=reason, groups=groups, detail=detail):
                _log.warning("step %d was not trained: %s (%s)", step, reason, log_text(detail))
                self._training.reject_batch(request.version, step, reason, groups)
            case SealSteps(version=version, step=step, oldest_kept=oldest_kept):
                self._training.seal(version, step, oldest_kept)
            case GetLedgerSnapshot(version=version):
                state = self._training.snapshot(version)
                return BrokerReply(LedgerSnapshotAnswer(data=encode_state(state)))
            case _:
                assert_never(request)
        return BrokerReply(Done())

    def _refuse_others(
        self, session: ClientSession, request: LearnerRequest | RequestBatch
    ) -> None:
        """Refuse what is for the learner that took over."""
        trains = self._book.state.learner
        if _taken_by(session) != trains:
            who = f"{name_of(trains)}, which" if trains else "the one that"
            raise ForbiddenError(
                f"{session.name} does not train this run: {type(request).__name__} is for "
                f"{who} took over"
            )

    # ---- epochs --------------------------------------------------------------

    def _take_over(self, session: ClientSession, request: TakeOver) -> TookOver:
        before, epoch = self._book.step, self._book.version.epoch
        learner = _taken_by(session)
        if session.peer.key and not learner:
            raise RefusedError("a learner takes over by its incarnation, which its hello names")
        self._clients.refuse_other_run(request.run_id)
        trains = self._book.state.learner
        if trains and trains != learner and self._sessions.is_connected(trains):
            raise RefusedError(f"{name_of(trains)} is connected and trains this run: end it first")
        try:
            version = self._training.take_over(
                request.step, request.checkpoint, learner, request.held, remember=self._on_epoch
            )
        except OSError as error:
            _unwritten.say("no learner can take over: %s", error)
            raise SlowDownError(f"a new epoch cannot be written into run.dir: {error}") from error
        if version.step != self._book.step:
            return TookOver(version=version)  # repeated request
        if version.epoch > epoch:
            self._clients.discard_answers_again()
        back = f", {before - version.step} steps back" if version.step < before else ""
        _log.info("a learner took over as %s%s", version.label, back)
        if version.step < before:
            self._report.went_back(version.step)
        self._report.telemetry.training_began()
        return TookOver(version=version)

    # ---- batches -------------------------------------------------------------

    def batch(self, session: ClientSession, request: RequestBatch) -> BrokerReply | None:
        """Deliver the batch of a step; None while it is not ready."""
        answer = self._batch(session, request)
        return None if isinstance(answer, NotYet) else BrokerReply(answer)

    def no_batch(self, session: ClientSession, request: RequestBatch) -> BrokerReply:
        """Answer a learner that has waited long enough with the reason its batch waits."""
        batch = self._batch(session, request)
        if not isinstance(batch, NotYet):
            return BrokerReply(batch)
        waiting_for = self._training.waiting_for(batch)
        reason = describe_wait(self._book, waiting_for, trouble=self._trouble.summary())
        self._waits_for(request.step, reason)
        last_step = self._book.state.last_step
        return BrokerReply(
            BatchNotReady(waiting_for=waiting_for, reason=reason, last_step=last_step)
        )

    def _batch(
        self, session: ClientSession, request: RequestBatch
    ) -> BatchDelivered | RunComplete | NotYet:
        if not self._sessions.is_current(session):
            raise HelloFirstError("send a hello first")
        self._refuse_others(session, request)
        batch = self._training.deliver(request.version, request.step)
        if isinstance(batch, NotYet):
            return batch
        if batch is None:
            self._waits_for(self._book.step, "")
            return RunComplete(evaluations=tuple(self._book.state.eval_points))
        self._waits_for(request.step, "")
        return BatchDelivered(step=request.step, groups=tuple(as_delivered(g) for g in batch))

    def _waits_for(self, step: int, reason: str) -> None:
        """Show why the next step waits; a batch requested ahead of it delays nothing."""
        if step == self._book.step:
            self._report.telemetry.waiting_for = reason

    def _fetch(self, request: FetchPayloads) -> Outcome:
        if len(set(request.keys)) < len(request.keys):
            raise RefusedError("FetchPayloads names a trajectory twice")
        for group_id, sibling in request.keys:
            group = self._book.groups.get(group_id)
            if group is None or group.state != "delivered" or sibling not in group.headers:
                raise RefusedError(f"trajectory {group_id}/{sibling} is in no delivered batch")
        found = [one for key in request.keys if (one := self._frames.get(key))]
        if len(found) < len(request.keys):
            return Later(self._load(request))
        return BrokerReply(Payloads(num_frames=len(found)), [stored.payload for stored in found])

    async def _load(self, request: FetchPayloads) -> BrokerReply:
        found = await self._frames.load(request.keys)
        gone = [key for key in request.keys if key not in found]
        if gone:
            raise RefusedError(f"the payload of trajectory {gone[0][0]}/{gone[0][1]} is gone")
        frames = [found[key].payload for key in request.keys]
        return BrokerReply(Payloads(num_frames=len(frames)), frames)

    # ---- commits -------------------------------------------------------------

    async def _record_and_commit(self, request: StepCommit) -> BrokerReply:
        """Keep the batch whole before its payloads may go."""
        step = request.version.step - 1
        ids = self._book.state.batches.get(step, ())
        batch = [self._book.groups[group_id] for group_id in ids]
        found = await self._frames.load(key for group in batch for key in group.trajectory_keys())
        if request.version == self._book.version:
            return BrokerReply(self._commit(request))  # repeated request: it is being recorded
        answer = self._commit(request)
        self._persist()  # before anything else that happens
        frames = [[found[key] for key in sorted(group.trajectory_keys())] for group in batch]
        await self._report.records.batch(step, list(zip(batch, frames, strict=True)))
        return BrokerReply(answer)

    def _commit(self, request: StepCommit) -> StepCommitted:
        before = self._book.step
        metrics = dict(request.metrics)
        sampled = self._book.sampled_reward()
        if sampled is not None:
            metrics["reward/sampled"] = sampled
        batch = [self._book.groups[i] for i in self._book.state.batches.get(before, ())]
        controller = self._book.controller
        metrics |= throttle_figures(controller)  # in force until this commit
        held = controller.throttle if controller is not None else None
        self._training.commit(request.version, metrics)
        if controller is not None and controller.throttle is not held:
            _log.info("step %d: %s", self._book.step, controller.throttle.reason)
        if self._book.step > before:
            for group in batch:
                self._frames.discard(group.trajectory_keys())  # the store has them until sealed
            self._report.step(request.version.step, metrics)
        state = self._book.state
        return StepCommitted(evaluations=tuple(state.eval_points), last_step=state.last_step)


def _taken_by(session: ClientSession) -> str:
    return session.holder if session.incarnation else ""
