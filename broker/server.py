"""The broker's loop: a ROUTER socket around the ledger. Decode, decide, make durable, answer."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import isfinite
from typing import assert_never

import zmq
import zmq.asyncio

from broker.admission import NotYet
from broker.commit import GroupCommitter
from broker.events import encode_event, encode_snapshot
from broker.groups import Group, as_delivered
from broker.ledger import Ledger, TrajectoryKey
from broker.records import RunRecords
from broker.scoring import ScoringQueue
from broker.store import Changes, StoredTrajectory
from broker.telemetry import Telemetry
from wire.codec import Frame, decode_request, encode, expect_frames
from wire.control import (
    WIRE_REVISION,
    Answer,
    BatchDelivered,
    BatchNotReady,
    Done,
    FetchPayloads,
    GetLedgerSnapshot,
    GetStatus,
    Goodbye,
    GroupsLeased,
    Heartbeat,
    HeartbeatAnswer,
    Hello,
    LeasedGroup,
    LeaseGroups,
    LeaseScoring,
    LedgerSnapshotAnswer,
    Payloads,
    PublishReport,
    Refusal,
    RejectPrompt,
    ReleaseLease,
    Request,
    RequestBatch,
    RoleReport,
    RunComplete,
    ScoringItem,
    ScoringLeased,
    StatusAnswer,
    StepCommit,
    StepCommitted,
    SubmitScores,
    SubmitTrajectory,
    TakeOver,
    TookOver,
    Welcome,
)
from wire.errors import ProtocolError, RefusedError
from wire.status import RunStatus
from wire.trajectory import Score

_log = logging.getLogger(__name__)

MAX_PENDING_REQUESTS = 10_000
MAX_WAIT_S = 30.0
MAX_OBSERVERS = 64
_NO_FRAMES: tuple[Frame, ...] = ()
Reply = tuple[Answer, Sequence[Frame]]


class BrokerServer:
    """Owns the ledger, the scoring queue and the frames of untrained trajectories."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        scoring: ScoringQueue,
        committer: GroupCommitter,
        telemetry: Telemetry,
        run_name: str,
        max_message_bytes: int,
        records: RunRecords | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._scoring = scoring
        self._committer = committer
        self.telemetry = telemetry
        self._run_name = run_name
        self._max_message_bytes = max_message_bytes
        self._records = records or RunRecords()
        self._now = now
        self._frames: dict[TrajectoryKey, StoredTrajectory] = {}
        self._names: dict[bytes, str] = {}  # routing id -> name said in hello
        self._tokenizer: tuple[str, str] | None = None  # hash, and who said it first
        self._observers: deque[bytes] = deque()  # they come and go without a word
        self._turns: dict[str, int] = {}  # requests that wait, counted per client
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- the loop ------------------------------------------------------------

    async def serve(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        """Answer requests until cancelled."""
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
        socket.bind(endpoint)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._expire_leases())
                while True:
                    frames = await socket.recv_multipart(copy=False)
                    if len(self._tasks) >= MAX_PENDING_REQUESTS:
                        self.telemetry.rejected["too_many_pending"] += 1
                        continue  # the client learns it from its deadline
                    task = group.create_task(self._answer(socket, frames))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
        finally:
            socket.close()

    async def _answer(self, socket: zmq.asyncio.Socket, frames: Sequence[zmq.Frame]) -> None:
        if len(frames) < 3:
            self.telemetry.rejected["malformed"] += 1
            return
        peer, request_id = frames[0].bytes, frames[1].bytes
        try:
            request = decode_request(frames[2].buffer)
            answer, attached = await self._handle(peer, request, [f.buffer for f in frames[3:]])
        except ProtocolError as error:
            self.telemetry.rejected["malformed"] += 1
            answer, attached = Refusal(reason=str(error)), _NO_FRAMES
        except RefusedError as error:
            self.telemetry.rejected["refused"] += 1
            answer, attached = Refusal(reason=str(error)), _NO_FRAMES
        except (KeyError, ValueError, TypeError) as error:
            # A fault of ours that one message brought to light must not end everybody's run.
            _log.exception("request of %s failed", self._names.get(peer, "an unknown peer"))
            self.telemetry.rejected["internal"] += 1
            answer, attached = Refusal(reason=f"internal error: {error!r}"), _NO_FRAMES
        await socket.send_multipart([peer, request_id, encode(answer), *attached], copy=False)

    async def _expire_leases(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._ledger.rules.lease_s / 4))
            now = self._now()
            lapsed = self._ledger.expire(now)
            if lapsed:
                _log.warning("%d leases lapsed: their holders sent no heartbeat", lapsed)
            unscored = self._scoring.expire(now)
            for group_id, sibling in unscored:
                reason = "the reward worker fell silent"
                self._ledger.score(
                    Score(group_id=group_id, sibling=sibling, lease_id=-1, unavailable=reason)
                )
            if lapsed or unscored:
                await self._persist()

    async def _handle(self, peer: bytes, request: Request, frames: list[Frame]) -> Reply:
        name = self._names.get(peer)
        if isinstance(request, Hello):
            return await self._hello(peer, request), _NO_FRAMES
        if name is None:
            raise RefusedError("say hello first")
        self.telemetry.heard(name)
        match request:
            case LeaseGroups() | LeaseScoring() | RequestBatch():
                return await self._wait_and_handle(peer, name, request)
            case SubmitTrajectory():
                return await self._submit(request, frames), _NO_FRAMES
            case SubmitScores():
                return await self._submit_scores(name, request), _NO_FRAMES
            case FetchPayloads():
                return self._fetch(request)
            case Heartbeat(lease_ids=lease_ids):
                now = self._now()
                lost = set(self._ledger.heartbeat(name, lease_ids, now_s=now))
                lost &= set(self._scoring.heartbeat(name, lease_ids, now_s=now))
                return HeartbeatAnswer(lost=tuple(sorted(lost))), _NO_FRAMES
            case TakeOver() | StepCommit() | GetLedgerSnapshot():
                return await self._serve_learner(request), _NO_FRAMES
            case GetStatus():
                return StatusAnswer(status=self.status()), _NO_FRAMES
            case _:
                await self._take(name, request)
                return Done(), _NO_FRAMES

    async def _take(
        self, name: str, request: ReleaseLease | RejectPrompt | Goodbye | RoleReport | PublishReport
    ) -> None:
        """Carry out a request that is answered by Done alone."""
        match request:
            case ReleaseLease(lease_id=lease_id, reason=reason):
                _log.warning("%s handed back lease %d: %s", name, lease_id, reason)
                self._ledger.release(name, lease_id, "failed")
                await self._persist()
            case RejectPrompt(lease_id=lease_id, reason=reason, detail=detail):
                _log.warning("%s cannot answer a prompt: %s", name, detail)
                self._ledger.reject(name, lease_id, reason)
                await self._persist()
            case Goodbye():
                self._ledger.release_all(name, "left")
                self._scoring.release_all(name)
                await self._persist()
                self._notify()
            case RoleReport():
                self.telemetry.report(name, request)
            case PublishReport(record=record):
                self.telemetry.published(record)
            case _:
                assert_never(request)

    async def _serve_learner(
        self, request: TakeOver | StepCommit | GetLedgerSnapshot
    ) -> TookOver | StepCommitted | LedgerSnapshotAnswer:
        match request:
            case TakeOver(step=step):
                version = self._ledger.take_over(step)
                await self._persist()
                self.telemetry.training_began()
                return TookOver(version=version)
            case StepCommit():
                await self._commit_step(request)
                return StepCommitted(
                    evaluations=tuple(self._ledger.eval_points), last_step=self._ledger.last_step
                )
            case GetLedgerSnapshot(version=version):
                return LedgerSnapshotAnswer(data=encode_snapshot(self._ledger.snapshot(version)))
            case _:
                assert_never(request)

    async def plan_stop(self, reason: str) -> None:
        """End the run in order, before the steps that were planned."""
        if self._ledger.plan_stop(reason):
            _log.info("the run ends: %s", reason)
            await self._persist()

    def _check_tokenizer(self, hello: Hello) -> None:
        if not hello.tokenizer:
            return
        known, first = self._tokenizer or (hello.tokenizer, hello.name)
        if hello.tokenizer != known:
            raise RefusedError(
                f"the tokenizer of {hello.name} ({hello.tokenizer}) is not that of {first} "
                f"({known}): run.model must name the same files for every role"
            )
        self._tokenizer = (known, first)

    async def _hello(self, peer: bytes, hello: Hello) -> Welcome:
        if hello.wire_revision != WIRE_REVISION:
            raise RefusedError(
                f"{hello.name} speaks wire revision {hello.wire_revision}, "
                f"this broker {WIRE_REVISION}: install the same version on both sides"
            )
        self._check_tokenizer(hello)
        if hello.role != "observer":
            for other in [i for i, known in self._names.items() if known == hello.name]:
                del self._names[other]
            self._ledger.release_all(hello.name, "restarted")
            self._scoring.release_all(hello.name)
            await self._persist()
            self._notify()
            _log.info("hello from %s", hello.name)
        else:
            self._observers.append(peer)
            if len(self._observers) > MAX_OBSERVERS:
                self._names.pop(self._observers.popleft(), None)
        self._names[peer] = hello.name
        self.telemetry.hello(hello)
        if hello.packages:
            self._records.packages(self.telemetry.versions)
        return Welcome(
            run_name=self._run_name,
            learner_step=self._ledger.step,
            heartbeat_s=self._ledger.rules.lease_s / 4,
        )

    # ---- requests that wait --------------------------------------------------

    async def _wait_and_handle(
        self, peer: bytes, name: str, request: LeaseGroups | LeaseScoring | RequestBatch
    ) -> Reply:
        """Answer as soon as there is something to say, at the latest after ``wait_s``."""
        deadline = self._now() + min(request.wait_s, MAX_WAIT_S)
        turn = self._take_turn(name, request)
        while True:
            if self._names.get(peer) != name:
                raise RefusedError(f"another process said hello as {name}")
            changed = self._changed
            if self._turns[name] != turn and isinstance(request, LeaseGroups):
                return (GroupsLeased(groups=()), _NO_FRAMES)
            reply, worth_saying = self._try(name, request)
            remaining = deadline - self._now()
            if worth_saying or remaining <= 0:
                await self._persist()
                return reply
            try:
                await asyncio.wait_for(changed.wait(), remaining)
            except TimeoutError:
                continue

    def _take_turn(self, name: str, request: LeaseGroups | LeaseScoring | RequestBatch) -> int:
        """A newer request of the same client ends its older ones: it knows more by now."""
        turn = self._turns.get(name, 0) + 1
        self._turns[name] = turn
        if turn > 1 and isinstance(request, LeaseGroups):
            self._notify()
        return turn

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _try(
        self, name: str, request: LeaseGroups | LeaseScoring | RequestBatch
    ) -> tuple[Reply, bool]:
        finished = self._ledger.finished
        match request:
            case LeaseGroups():
                groups: list[LeasedGroup] = []
                if request.adopted is not None:
                    groups = self._ledger.lease(
                        name,
                        request.adopted,
                        max_sequences=request.max_sequences,
                        now_s=self._now(),
                    )
                answer = GroupsLeased(groups=tuple(groups), finished=finished)
                return (answer, _NO_FRAMES), bool(groups) or finished
            case LeaseScoring():
                leased = self._scoring.lease(name, request.credits, now_s=self._now())
                items = tuple(
                    ScoringItem(group_id=key[0], sibling=key[1], lease_id=lease_id)
                    for lease_id, key in leased.items()
                )
                transcripts = [self._frames[key].transcript for key in leased.values()]
                answer_s = ScoringLeased(items=items, finished=finished)
                return (answer_s, transcripts), bool(items) or finished
            case RequestBatch(version=version):
                return self._try_batch(self._ledger.deliver(version))
            case _:
                assert_never(request)

    def _try_batch(self, batch: list[Group] | NotYet | None) -> tuple[Reply, bool]:
        match batch:
            case None:
                self.telemetry.waiting_for = ""
                complete = RunComplete(evaluations=tuple(self._ledger.eval_points))
                return (complete, _NO_FRAMES), True
            case NotYet(waiting_for):
                self.telemetry.waiting_for = self._describe_wait(waiting_for)
                answer = BatchNotReady(
                    waiting_for=waiting_for,
                    reason=self.telemetry.waiting_for,
                    last_step=self._ledger.last_step,
                )
                return (answer, _NO_FRAMES), False
            case groups:
                self.telemetry.waiting_for = ""
                delivered = BatchDelivered(
                    step=self._ledger.step, groups=tuple(as_delivered(g) for g in groups)
                )
                return (delivered, _NO_FRAMES), True

    def _describe_wait(self, group_ids: tuple[int, ...]) -> str:
        if not group_ids:
            return f"no group is under way: {self._ledger.in_flight()}{self._barren()}"
        parts = []
        for group_id in group_ids[:3]:
            group = self._ledger.groups.get(group_id)
            if group is None:
                continue
            lease = self._ledger.leases.get(group.lease_id) if group.lease_id is not None else None
            holder = f", held by {lease.holder}" if lease else ""
            parts.append(f"{group_id} ({group.state}{holder})")
        more = f" and {len(group_ids) - 3} more" if len(group_ids) > 3 else ""
        return f"groups {', '.join(parts)}{more}{self._barren()}"

    def _barren(self) -> str:
        """Return a warning when nothing but drops comes, which a run could do for ever."""
        drops = self._ledger.drops_in_a_row
        if drops < 2 * self._ledger.rules.bound.groups_per_step:
            return ""
        reasons = ", ".join(f"{why}: {n}" for why, n in self._ledger.dropped.items())
        return f"; the last {drops} groups were all dropped ({reasons})"

    # ---- requests that change the state --------------------------------------

    async def _submit(self, request: SubmitTrajectory, frames: list[Frame]) -> Answer:
        expect_frames(frames, 2, "SubmitTrajectory")
        header = request.header
        key = (header.group_id, header.sibling)
        put = {}
        if self._ledger.submit(header):
            # Frames of a message stay alive as long as a view of them does.
            stored = StoredTrajectory(payload=frames[0], transcript=frames[1])
            self._frames[key] = put[key] = stored
            self._scoring.add(key)
        await self._persist(put)
        return Done()

    async def _submit_scores(self, name: str, request: SubmitScores) -> Answer:
        for score in request.scores:
            key = self._scoring.finish(name, score.lease_id)
            if key != (score.group_id, score.sibling):
                continue  # lapsed meanwhile; whoever holds it now will answer
            group = self._ledger.groups.get(score.group_id)
            self._ledger.score(score)
            if group is not None and group.item == "eval" and group.state == "ready":
                self._records.eval_answers(group, self._frames_of(group))
            if score.reward is None and score.group_id in self._ledger.groups:
                _log.warning("no reward for trajectory %d/%d: %s", *key, score.unavailable)
                self._scoring.add(key)
        await self._persist()
        return Done()

    async def _commit_step(self, request: StepCommit) -> None:
        before = self._ledger.step
        metrics = {name: value for name, value in request.metrics.items() if isfinite(value)}
        sampled = self._ledger.sampled_reward()
        if sampled is not None:
            metrics["reward/sampled"] = sampled
        delivered = self._ledger.deliveries.get(before, ())
        batch = [(group, self._frames_of(group)) for group in map(self._group, delivered)]
        self._ledger.commit(request.version, metrics)
        await self._persist()
        if self._ledger.step > before:
            point = self.telemetry.step(request.version.step, metrics)
            self._records.step(point, self.status())
            await self._records.batch(before, batch)

    def _group(self, group_id: int) -> Group:
        return self._ledger.groups[group_id]

    def _frames_of(self, group: Group) -> list[StoredTrajectory]:
        return [self._frames[group.group_id, sibling] for sibling in range(group.size)]

    def _fetch(self, request: FetchPayloads) -> Reply:
        frames: list[Frame] = []
        for group_id, sibling in request.keys:
            group = self._ledger.groups.get(group_id)
            if group is None or not group.delivered or sibling not in group.headers:
                raise RefusedError(f"trajectory {group_id}/{sibling} is in no delivered batch")
            frames.append(self._frames[group_id, sibling].payload)
        return Payloads(num_frames=len(frames)), frames

    def status(self) -> RunStatus:
        """Return the state of the run."""
        return self.telemetry.status(self._ledger, self._scoring)

    async def _persist(self, put: dict[TrajectoryKey, StoredTrajectory] | None = None) -> None:
        """Make durable what the ledger recorded, and wake whoever waits for a change."""
        events, released = self._ledger.drain()
        changes = Changes([encode_event(event) for event in events], put or {}, released)
        for key in released:
            self._frames.pop(key, None)
            self._scoring.discard(key)
        if events:
            self._notify()
        await self._committer.commit(changes)
        self._records.evaluations(self._ledger.eval_points)
