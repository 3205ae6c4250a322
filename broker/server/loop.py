"""The broker's loop: decode, decide, make durable, answer.

Consumes: requests of all roles. Produces: one answer each. Everything between the arrival of a
message and the hand-over to the store happens at once, so that there is nothing to lock: requests
that find no work wait in a WaitingRoom, answers that promise something wait for the store.
"""

import asyncio
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from math import isfinite
from typing import TypeAlias, TypeVar, assert_never

import zmq
from msgspec.structs import replace

from slipstream.broker.ledger.admission import NotYet
from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.events import (
    Dropped,
    EvalRoundClosed,
    Issued,
    LeaseEnd,
    LedgerEvent,
    TakenOver,
    Trained,
)
from slipstream.broker.ledger.groups import as_delivered
from slipstream.broker.ledger.leases import name_of
from slipstream.broker.ledger.scoring_queue import ScoringQueue
from slipstream.broker.ledger.state import MAX_DEAD_LETTERS, encode_state
from slipstream.broker.ledger.view import account_of, describe_wait
from slipstream.broker.report.reward_trouble import RewardTrouble
from slipstream.broker.report.run_files import RunRecords
from slipstream.broker.report.telemetry import Telemetry, told_of
from slipstream.broker.server.keyring import BrokerKey, KeyRing
from slipstream.broker.server.limits import MAX_FRAMES, RateLimit, max_body_bytes, max_bytes
from slipstream.broker.server.pending import Parked, WaitingRoom
from slipstream.broker.server.permissions import may_say
from slipstream.broker.server.router import Peer, Router
from slipstream.broker.server.sessions import Session, Sessions
from slipstream.broker.store.base import StoredTrajectory, TrajectoryStore
from slipstream.broker.store.event_log import Trail
from slipstream.broker.store.group_commit import GroupCommitter
from slipstream.broker.store.journal import LedgerWriter
from slipstream.broker.store.payload_cache import FrameCache
from slipstream.wire.errors import (
    ConfigError,
    ForbiddenError,
    NameTakenError,
    ProtocolError,
    RefusedError,
    SlowDownError,
    SupersededError,
)
from slipstream.wire.messages.broker import (
    WIRE_REVISION,
    Answer,
    BatchDelivered,
    BatchNotReady,
    DeadLetters,
    DeadLettersHandled,
    Done,
    DropDeadLetters,
    FetchPayloads,
    FindRelay,
    GetDeadLetters,
    GetLedger,
    GetLedgerSnapshot,
    GetStatus,
    Goodbye,
    GroupsLeased,
    Heartbeat,
    HeartbeatAnswer,
    Hello,
    LeaseGroups,
    LeaseScoring,
    LedgerAnswer,
    LedgerSnapshotAnswer,
    Payloads,
    PublishReport,
    Refusal,
    RefusalCode,
    RejectBatch,
    RejectPrompt,
    RelayHeard,
    RelayPlace,
    RelayReport,
    ReleaseLease,
    Request,
    RequestBatch,
    RetryDeadLetters,
    RoleReport,
    RunComplete,
    ScoringItem,
    ScoringLeased,
    SealSteps,
    StatusAnswer,
    StepCommit,
    StepCommitted,
    SubmitScores,
    SubmitTrajectory,
    TakeOver,
    TookOver,
    Welcome,
)
from slipstream.wire.messages.codec import Frame, decode_request, decode_text, encode, expect_frames
from slipstream.wire.messages.dead_letters import DeadLetter
from slipstream.wire.messages.ledger_view import LedgerView
from slipstream.wire.messages.pieces import joined, most_pieces
from slipstream.wire.messages.status import RunStatus
from slipstream.wire.messages.trajectory import (
    NO_SCORING_LEASE,
    Score,
    TrajectoryKey,
    transcript_of,
)
from slipstream.wire.process.visible import one_line

_log = logging.getLogger(__name__)

MAX_WAIT_S = 30.0
_ITEMS_ON_FILE = 20
_COMPLAIN_EVERY_S = 10.0  # about one client
_MAX_COMPLAINTS = 1_000  # clients
_COME_BACK_S = 5.0  # that clients of the broker before have to come back under their names
_KEYS_LOST_S = 10.0  # keys that cannot be read count for so long as they were
_MAX_JOBS = 64  # requests of one client that wait for payloads at a time
_MAX_LETTERS = 100  # dead letters in one answer
_MAX_ITEMS = 1_000  # of the ledger, named in one answer
_PROMISE_NOTHING = (HeartbeatAnswer, StatusAnswer, LedgerAnswer, DeadLetters)  # not of the store
MAX_CREDITS = 4_096
_MAX_ID_BYTES = 64
_ENVELOPE = 2  # frames: the request id and the session
_MAX_SAID = 500  # characters of a client's text in the log
_NO_FRAMES: tuple[Frame, ...] = ()
_OLD_REVISION = Refusal(  # before revision 4 a message had no session
    reason=f"this broker speaks wire revision {WIRE_REVISION}, you one before 4: "
    "install the same version on both sides"
)
R = TypeVar("R")
Reply: TypeAlias = tuple[Answer, Sequence[Frame]]
Job: TypeAlias = Coroutine[None, None, Reply]


def may_wait_s(asked_s: float) -> float:
    """Return how long a request may wait that asks for so many seconds, which may be no number."""
    return max(0.0, min(MAX_WAIT_S, asked_s))  # in this order NaN is MAX_WAIT_S


class BrokerServer:
    """Owns the ledger, the scoring queue and the frames of untrained trajectories."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        scoring: ScoringQueue,
        committer: GroupCommitter,
        store: TrajectoryStore,
        telemetry: Telemetry,
        run_name: str,
        max_message_bytes: int,
        max_requests_per_s: float = 10_000.0,
        keys: KeyRing | None = None,
        scores_inline: bool = False,
        cache_bytes: int = 1 << 28,
        records: RunRecords | None = None,
        trail: Trail | None = None,
        store_name: str = "",
        generation: int = 0,
        on_epoch: Callable[[int], None] = lambda _: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._scoring = scoring
        self._committer = committer
        self.telemetry = telemetry
        self._run_name = run_name
        self._max_message_bytes = max_message_bytes
        self._most_pieces = most_pieces(max_message_bytes, MAX_FRAMES)
        self._rate: RateLimit[Peer | str] = RateLimit(max_requests_per_s)  # keys have one each
        self._scores_inline = scores_inline
        self._complained_s: dict[str, float] = {}  # client -> when its refusals were logged last
        self._keys = keys
        self._discarded: frozenset[str] = frozenset()  # keys whose answers were dropped
        self._keys_lost_s: float | None = None  # since when they cannot be read
        self._records = records or RunRecords()
        self._trail = trail or Trail()
        self._writer = LedgerWriter(ledger.book.state, committer, self._trail, self._flooded)
        self._store_name = store_name
        self._generation = generation
        self._on_epoch = on_epoch
        self._now = now
        self.frames = FrameCache(cache_bytes, store, committer)
        self._began_s = now()
        self._sessions = Sessions(
            (lambda _key: None) if keys is None else keys.holder,
            may_come_back=self._may_come_back,
            now=now,
        )
        self._routers: list[Router] = []
        self._leases: WaitingRoom[LeaseGroups] = WaitingRoom(self._no_groups)
        self._scorings: WaitingRoom[LeaseScoring] = WaitingRoom(self._no_scoring)
        self._batches: WaitingRoom[RequestBatch] = WaitingRoom(self._no_batch)
        self._settling: asyncio.Handle | None = None
        self._issued_at: dict[int, float] = {}  # unix time, of groups that this process issued
        self._jobs: asyncio.TaskGroup | None = None
        self._jobs_of: Counter[str] = Counter()
        self._relay = RelayPlace(is_known=False)
        self._trouble = RewardTrouble()
        self._alarm = ""

    # ---- the loop ------------------------------------------------------------

    async def serve(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        *,
        listen: str = "",
        key: BrokerKey | None = None,
        max_connections: int = 1 << 20,
    ) -> None:
        """Answer requests until cancelled.

        Args:
            context: of the process.
            endpoint: a Unix socket in a private folder.
            listen: an address for other hosts, where clients have to prove a key.
            key: of the broker, for that address.
            max_connections: from other hosts at a time; as many as a share of the descriptors that
                this process may open, if that is less.

        Raises:
            ConfigError: an address cannot be listened at.
        """
        for group in self._ledger.book.groups.values():
            for sibling in group.unscored:
                self._scoring.add((group.group_id, sibling))
        try:
            async with asyncio.TaskGroup() as jobs:
                self._jobs = jobs
                descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                self._listen(context, endpoint, b"", descriptors // 4, "ulimit -n")
                if listen and key is not None:
                    most = min(max_connections, descriptors // 4)
                    setting = "broker.max_connections" if most == max_connections else "ulimit -n"
                    self._listen(context, listen, key.secret, most, setting)
                    _log.info("other hosts find this broker at %s", self._routers[-1].endpoint)
                await self._expire_leases()
        finally:
            for room in (self._leases, self._scorings, self._batches):
                room.close()
            if self._settling is not None:
                self._settling.cancel()
            for router in self._routers:
                router.close()
            self._routers.clear()

    def _listen(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        secret: bytes,
        max_connections: int,
        setting: str,
    ) -> None:
        try:
            router = Router(
                context,
                endpoint,
                on_message=self._receive,
                secret_key=secret,
                max_connections=max_connections,
                setting=setting,
            )
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen at {endpoint} (broker.listen): {error}") from error
        self._routers.append(router)

    @property
    def addresses(self) -> list[str]:
        """Return where it listens."""
        return [router.endpoint for router in self._routers]

    async def _expire_leases(self) -> None:
        every_s = min(1.0, self._ledger.book.rules.lease_s / 4)
        looked_s = self._now()
        while True:
            due_s = looked_s + every_s
            await asyncio.sleep(max(0.0, due_s - self._now()))
            now = self._now()
            deaf_s = max(0.0, now - (looked_s if self._writer.is_flooded else due_s))
            looked_s = now
            self._ledger.was_deaf(deaf_s)  # heartbeats that came meanwhile are still unread
            self._scoring.was_deaf(deaf_s)
            self._look_at_keys()
            self.telemetry.notice(self._ledger.book)
            lapsed = self._ledger.expire(now)
            if lapsed:
                _log.warning("%d leases lapsed: their holders sent no heartbeat", lapsed)
            for key, holder in self._scoring.expire(now):
                self._scoring_ended([key], holder, "the reward worker fell silent")
            if self._scoring.num_waiting:
                self._settle_soon()  # what could not be scored may be due again
            self._persist()

    def _scoring_ended(self, keys: Iterable[TrajectoryKey], holder: str, reason: str) -> None:
        """Count an attempt to score that ended without an answer."""
        for group_id, sibling in keys:
            score = Score(
                group_id=group_id,
                sibling=sibling,
                lease_id=NO_SCORING_LEASE,
                unavailable=reason,
            )
            self._ledger.score(score, holder)

    def _look_at_keys(self) -> None:
        """Take note of keys that were made or revoked, and take back what revoked ones hold."""
        if self._keys is None:
            return
        try:
            revoked = self._keys.refresh()
        except OSError as error:
            if self._keys_lost_s is None:
                self._keys_lost_s = self._now()
                _log.error(
                    "keys cannot be read: %s; in %.0f s nobody from other hosts is served until "
                    "they can",
                    error,
                    _KEYS_LOST_S,
                )
            return
        if self._keys_lost_s is not None:
            self._keys_lost_s = None
            _log.info("keys can be read again")
        for holder in revoked:
            _log.warning("the key %s (%s) was revoked", holder.name, holder.role)
            for session in self._sessions.end(holder.public):
                self._release(session.holder, "left")
        for name in self._keys.discarded - self._discarded:
            dropped, trained = self._ledger.discard_answers_of(name)
            _log.warning(
                "what the key %s delivered is dropped: %d groups; %d are being trained already",
                name,
                dropped,
                trained,
            )
        self._discarded = self._keys.discarded

    def _receive(self, peer: Peer, frames: Sequence[zmq.Frame]) -> None:
        if not 3 <= len(frames) <= self._most_pieces or len(frames[0]) > _MAX_ID_BYTES:
            self.telemetry.rejected["malformed"] += 1
            if len(frames) == 2 and len(frames[0]) <= _MAX_ID_BYTES:
                self._answer(peer, frames[0].bytes, (_OLD_REVISION, _NO_FRAMES))
            return
        request_id = frames[0].bytes
        reply: Reply | None
        try:
            session = self._admit(peer, frames)
            body, *attached = self._joined(session, frames[2:])
            request = decode_request(body)
            put, reply = self._handle(peer, session, request_id, request, attached)
        except _ANSWERED as error:
            put, reply = {}, self._refusal(peer, error)
        if reply is None:
            self._persist(put)
        elif isinstance(reply[0], _PROMISE_NOTHING):
            self._persist(put)
            self._send(peer, [request_id, encode(reply[0])], reply[0])
        else:
            self._answer(peer, request_id, reply, put)

    def _admit(self, peer: Peer, frames: Sequence[zmq.Frame]) -> Session | None:
        """Return who sent a message; None who has not said hello on this connection.

        Raises:
            SlowDownError: it asks too much at a time.
            ForbiddenError: its key was revoked.
            ProtocolError: the message is too large for its role.
        """
        if not self._rate.takes(peer.key or peer, self._now()):
            raise SlowDownError("more requests at a time than broker.max_requests_per_s allows")
        if peer.key and self._keys_lost_s is not None:
            lost_s = self._now() - self._keys_lost_s
            if lost_s > _KEYS_LOST_S:  # a key may have been revoked meanwhile
                raise SlowDownError(f"keys (broker.keys) cannot be read for {lost_s:.0f} s")
        session = self._sessions.find(frames[1].bytes, peer)
        role = session.role if session else None
        limit = max_bytes(role, self._max_message_bytes)
        size = sum(map(len, frames))
        if size > limit:
            who = role or "client that has not said hello"
            raise ProtocolError(f"a message of {size} bytes; a {who} may send {limit}")
        return session

    def _joined(self, session: Session | None, pieces: Sequence[zmq.Frame]) -> list[Frame]:
        """Return the body of a request and the frames that are attached to it.

        Raises:
            ProtocolError: there are too many, or the body is too large for this role.
        """
        frames = joined([piece.buffer for piece in pieces])
        if len(frames) > MAX_FRAMES - _ENVELOPE:
            raise ProtocolError(f"{len(frames)} frames; there may be {MAX_FRAMES - _ENVELOPE}")
        role = session.role if session else None
        if len(frames[0]) > max_body_bytes(role, self._max_message_bytes):
            raise ProtocolError(f"{len(frames[0])} bytes before the frames that carry the data")
        return frames

    def _refusal(self, peer: Peer, error: Exception) -> Reply:
        code: RefusalCode = ""
        reason = str(error)
        match error:
            case ProtocolError():
                self.telemetry.rejected["malformed"] += 1
            case SupersededError():
                self.telemetry.rejected["superseded"] += 1
                code = "superseded"
            case _HelloFirstError():
                self.telemetry.rejected["hello_first"] += 1
                code = "hello_first"
            case ForbiddenError():
                self.telemetry.rejected["forbidden"] += 1
                code = "forbidden"
                self._complain(self._sessions.named(peer), reason)
            case SlowDownError():
                self.telemetry.rejected["slow_down"] += 1
                code = "slow_down"
            case NameTakenError():
                self.telemetry.rejected["name_taken"] += 1
                code = "name_taken"
                self._complain("a second process", reason)
            case RefusedError():
                self.telemetry.rejected["refused"] += 1
            case _:
                # A fault of ours that one message brought to light must not end everybody's run.
                _log.error("request of %s failed", self._sessions.named(peer), exc_info=error)
                self.telemetry.rejected["internal"] += 1
                reason = f"internal error: {error!r}"
        return Refusal(reason=reason, code=code), _NO_FRAMES

    def _complain(self, name: str, reason: str) -> None:
        """Log what a client may not do; once in a while, for it may try very often."""
        now = self._now()
        if now - self._complained_s.get(name, -_COMPLAIN_EVERY_S) >= _COMPLAIN_EVERY_S:
            if len(self._complained_s) > _MAX_COMPLAINTS:
                self._complained_s.clear()
            self._complained_s[name] = now
            _log.warning("%s: %s", name, _said(reason))

    def _answer(
        self,
        peer: Peer,
        request_id: bytes,
        reply: Reply,
        put: dict[TrajectoryKey, StoredTrajectory] | None = None,
    ) -> None:
        """Send an answer as soon as everything that it may rest on is durable."""
        answer, attached = reply
        frames = [request_id, encode(answer), *attached]
        self._persist(put, lambda: self._send(peer, frames, answer))

    def _send(self, peer: Peer, frames: Sequence[Frame], answer: Answer) -> None:
        if not self._routers or peer.send(frames):
            return
        self.telemetry.rejected["unreachable"] += 1
        if isinstance(answer, GroupsLeased):
            for granted in answer.groups:
                lease = self._ledger.book.leases.get(granted.lease_id)
                if lease is not None:
                    self._ledger.release(lease.holder, lease.lease_id, "lost")
            self._persist()
        elif isinstance(answer, ScoringLeased):
            self._scoring.release(item.lease_id for item in answer.items)
            self._settle_soon()

    def _spawn(self, session: Session, request_id: bytes, job: Job) -> None:
        """Answer when a job is done that waits for something."""
        if self._jobs is None or self._jobs_of[session.holder] >= _MAX_JOBS:
            job.close()
            raise SlowDownError(f"{_MAX_JOBS} requests of {session.name} wait for payloads")
        self._jobs_of[session.holder] += 1

        async def run() -> None:
            try:
                reply = await job
            except _ANSWERED as error:
                reply = self._refusal(session.peer, error)
            finally:
                self._jobs_of[session.holder] -= 1
                if not self._jobs_of[session.holder]:
                    del self._jobs_of[session.holder]
            self._answer(session.peer, request_id, reply)

        self._jobs.create_task(run())

    # ---- what is recorded becomes durable ------------------------------------

    def _persist(
        self,
        put: dict[TrajectoryKey, StoredTrajectory] | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Hand to the store what the ledger recorded; ``then`` follows when it is durable."""
        events, released = self._ledger.drain()
        self._writer.write(events, put or {}, released, then)
        for key in released:
            self._scoring.discard(key)
        self.frames.discard(released)
        if events:
            self._noticed(events)

    def _flooded(self, is_flooded: bool) -> None:
        """Take no more while the store lags far behind."""
        for router in self._routers:
            if is_flooded:
                router.pause()
            else:
                router.resume()

    def _noticed(self, events: Iterable[LedgerEvent]) -> None:
        self._settle_soon()
        for event in events:
            match event:
                case Issued(group_id=group_id):
                    self._issued_at[group_id] = time.time()
                case Dropped(group_id=group_id):
                    self._issued_at.pop(group_id, None)
                case Trained(version=version):
                    trained = self._ledger.book.state.history.get(version.step - 1)
                    for group_id, _ in trained.groups if trained is not None else ():
                        self._issued_at.pop(group_id, None)
                case EvalRoundClosed() | TakenOver():
                    groups = self._ledger.book.groups
                    self._issued_at = {i: at for i, at in self._issued_at.items() if i in groups}
                    self._records.evaluations(self._ledger.book.state.eval_points)
                case _:
                    pass

    # ---- requests ------------------------------------------------------------

    def _handle(
        self,
        peer: Peer,
        session: Session | None,
        request_id: bytes,
        request: Request,
        frames: list[Frame],
    ) -> tuple[dict[TrajectoryKey, StoredTrajectory], Reply | None]:
        """Carry out a request; return payloads to store, and the answer unless it comes later."""
        if isinstance(request, Hello):
            expect_frames(frames, 0, "Hello")
            return {}, (self._hello(peer, request), _NO_FRAMES)
        if session is None:
            raise _HelloFirstError("say hello first")
        if not may_say(session.role, request, scores_inline=self._scores_inline):
            kind = type(request).__name__
            raise ForbiddenError(f"{session.name} is a {session.role}, which may not send {kind}")
        self.telemetry.heard(session.name)
        if not isinstance(request, SubmitTrajectory):
            expect_frames(frames, 0, type(request).__name__)
        match request:
            case SubmitTrajectory():
                return self._submit(session, request, frames), (Done(), _NO_FRAMES)
            case LeaseGroups() | LeaseScoring() | RequestBatch():
                self._park(session, request_id, request)
            case FetchPayloads():
                return {}, self._fetch(session, request_id, request)
            case TakeOver() | StepCommit() | RejectBatch() | SealSteps() | GetLedgerSnapshot():
                return {}, self._serve_learner(session, request_id, request)
            case _:
                return {}, (self._serve_any(session, request), _NO_FRAMES)
        return {}, None

    def _serve_any(  # noqa: PLR0912 one branch per kind
        self,
        session: Session,
        request: Heartbeat
        | SubmitScores
        | ReleaseLease
        | RejectPrompt
        | Goodbye
        | RoleReport
        | PublishReport
        | RelayReport
        | FindRelay
        | GetStatus
        | GetLedger
        | GetDeadLetters
        | RetryDeadLetters
        | DropDeadLetters,
    ) -> Answer:
        match request:
            case Heartbeat(lease_ids=lease_ids):
                now = self._now()
                lost = set(self._ledger.heartbeat(session.holder, lease_ids, now_s=now))
                lost &= set(self._scoring.heartbeat(session.holder, lease_ids, now_s=now))
                return HeartbeatAnswer(lost=tuple(sorted(lost)))
            case SubmitScores():
                self._submit_scores(session, request)
            case ReleaseLease(lease_id=lease_id) if self._scoring.give_back(
                session.holder, lease_id
            ):
                self._settle_soon()
            case ReleaseLease(lease_id=lease_id, reason=reason):
                _log.warning("%s handed back lease %d: %s", session.name, lease_id, _said(reason))
                self._ledger.release(session.holder, lease_id, "failed")
            case RejectPrompt(lease_id=lease_id, reason=reason, detail=detail):
                _log.warning("%s cannot answer a prompt: %s", session.name, _said(detail))
                self._ledger.reject(session.holder, lease_id, reason)
            case Goodbye():
                if session.role == "learner":
                    self._ledger.learner_leaves()
                if self._sessions.is_current(session):  # what it asked for is for others now
                    self._leases.dismiss(session.name)
                    self._scorings.dismiss(session.name)
                self._release(session.holder, "left")
            case RoleReport():
                self.telemetry.report(session.name, request)
            case PublishReport(record=record):
                self.telemetry.published(record)
            case RelayReport(members=members, door=door):
                self.telemetry.members(members)
                self._relay = RelayPlace(is_known=True, door=door)
                return RelayHeard(generator_keys=self._generator_keys())
            case FindRelay():
                return self._relay
            case GetStatus(newest_steps=count):
                return StatusAnswer(status=told_of(self.status(), count))
            case GetLedger(num_items=num_items):
                return LedgerAnswer(view=self.account(max(0, min(num_items, _MAX_ITEMS))))
            case GetDeadLetters() | RetryDeadLetters() | DropDeadLetters():
                return self._letters(request)
            case _:
                assert_never(request)
        return Done()

    def _generator_keys(self) -> dict[str, str]:
        if self._keys is None:
            return {}
        return {one.public: one.name for one in self._keys.holders if one.role == "generator"}

    def _letters(
        self, request: GetDeadLetters | RetryDeadLetters | DropDeadLetters
    ) -> DeadLetters | DeadLettersHandled:
        state = self._ledger.book.state
        match request:
            case GetDeadLetters(after=after, limit=limit):
                letters = sorted(state.dead_letters.values(), key=lambda one: one.group_id)
                found = [one for one in letters if one.group_id > after]
                return DeadLetters(
                    letters=tuple(found[: max(0, min(limit, _MAX_LETTERS))]),
                    total=len(state.dead_letters),
                    forgotten=state.letters_forgotten,
                )
            case RetryDeadLetters(groups=groups):
                done, refused = self._ledger.retry(_not_too_many(groups))
            case _:
                groups = request.groups
                done, refused = self._ledger.drop_letters(_not_too_many(groups))
        return DeadLettersHandled(done=done, refused=refused)

    def _release(self, holder: str, reason: LeaseEnd) -> None:
        """Give to others what a client held that is gone."""
        self._ledger.release_all(holder, reason)
        self._scoring.release_all(holder)
        self._settle_soon()

    def _may_come_back(self, name: str, holder: str) -> bool:
        """Tell whether another process had this name before this broker was there."""
        if self._now() - self._began_s > _COME_BACK_S:
            return False
        known = {*self._ledger.book.by_holder, self._ledger.book.state.learner}
        return any(name_of(one) == name and one != holder for one in known)

    def _hello(self, peer: Peer, hello: Hello) -> Welcome:
        self._refuse_other_run(hello.run_id)
        session = self._sessions.hello(peer, hello)
        if hello.role not in {"observer", "operator"}:
            name = session.name
            for holder in [h for h in self._ledger.book.by_holder if name_of(h) == name]:
                own = holder == session.holder
                self._ledger.release_all(
                    holder, "lost" if own else "restarted", hello.held if own else ()
                )
            for holder in [h for h in self._scoring.holders() if name_of(h) == name]:
                leased = self._scoring.release_all(holder)
                if holder != session.holder:  # else what it has scored it sends again
                    self._scoring_ended(leased, holder, "the reward worker died")
            self._settle_soon()
            _log.info("hello %sfrom %s", "again " * hello.reconnects, name)
        self.telemetry.hello(replace(hello, name=session.name))
        if hello.packages:
            self._records.packages(self.telemetry.versions)
        return Welcome(
            run_name=self._run_name,
            session=session.token,
            learner_step=self._ledger.book.step,
            heartbeat_s=self._ledger.book.rules.lease_s / 4,
            run_id=self._ledger.book.state.run_id,
        )

    # ---- requests that wait --------------------------------------------------

    def _park(
        self,
        session: Session,
        request_id: bytes,
        request: LeaseGroups | LeaseScoring | RequestBatch,
    ) -> None:
        """Have a request wait for what it asks for, which may be there already."""
        wait_s = may_wait_s(request.wait_s)
        name = session.name
        match request:
            case LeaseGroups(adopted=adopted, max_sequences=room):
                asked = Parked(session, request_id, request, key=name, kind=(adopted, room))
                self._leases.park(asked, wait_s)
            case LeaseScoring():
                self._scorings.park(
                    Parked(session, request_id, request, key=name, kind=name), wait_s
                )
            case RequestBatch(step=step):
                self._batches.park(
                    Parked(session, request_id, request, key=(name, step), kind=step), wait_s
                )
        self._settle_soon()

    def _settle_soon(self) -> None:
        if self._settling is None:
            self._settling = asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        """Give work to those who wait for it."""
        self._settling = None
        self._settle_room(self._leases, self._try_leases)
        self._settle_room(self._scorings, self._try_scoring)
        self._settle_room(self._batches, self._try_batch)

    def _settle_room(
        self, room: WaitingRoom[R], attempt: Callable[[Parked[R]], Answer | bool]
    ) -> None:
        """Answer requests, queue by queue, until there is nothing for the next one."""
        for kind in room.kinds():
            for parked in room.queue(kind):
                outcome: Answer | bool
                try:
                    outcome = attempt(parked)
                except _ANSWERED as error:
                    outcome, _ = self._refusal(parked.session.peer, error)
                if outcome is False:
                    break
                room.take_out(parked)
                if outcome is not True:
                    reply = (outcome, _NO_FRAMES)
                    self._answer(parked.session.peer, parked.request_id, reply)

    def _try_leases(self, parked: Parked[LeaseGroups]) -> Answer | bool:
        return self._lease(parked.session, parked.request) or False

    def _try_batch(self, parked: Parked[RequestBatch]) -> Answer | bool:
        answer = self._batch(parked)
        return False if isinstance(answer, NotYet) else answer

    def _lease(self, session: Session, request: LeaseGroups) -> GroupsLeased | None:
        if not self._sessions.is_current(session):
            return GroupsLeased(groups=())
        finished = self._ledger.book.over
        groups = (
            self._ledger.lease(
                session.holder,
                request.adopted,
                max_sequences=request.max_sequences,
                now_s=self._now(),
            )
            if request.adopted is not None
            else []
        )
        if not groups and not finished:
            return None
        return GroupsLeased(groups=tuple(groups), finished=finished)

    def _no_groups(self, parked: Parked[LeaseGroups]) -> None:
        answer = GroupsLeased(groups=(), finished=self._ledger.book.over)
        self._answer(parked.session.peer, parked.request_id, (answer, _NO_FRAMES))

    def _try_scoring(self, parked: Parked[LeaseScoring]) -> bool:
        session, finished = parked.session, self._ledger.book.over
        leased: dict[int, TrajectoryKey] = {}
        if self._sessions.is_current(session):
            leased = self._scoring.lease(
                session.holder,
                min(parked.request.credits, MAX_CREDITS),
                now_s=self._now(),
                siblings_of=self._siblings_of if parked.request.whole_groups else None,
            )
            if not leased and not finished:
                return False
        stored = [self.frames.get(key) for key in leased.values()]
        if None in stored:
            self._spawn(session, parked.request_id, self._fetch_transcripts(leased, finished))
        else:
            found = {key: one for key, one in zip(leased.values(), stored, strict=True) if one}
            reply = _scoring_work(leased, found, finished)
            self._answer(session.peer, parked.request_id, reply)
        return True

    def _siblings_of(self, group_id: int) -> tuple[int, ...]:
        group = self._ledger.book.groups.get(group_id)
        return tuple(range(group.size)) if group is not None and not group.missing else ()

    async def _fetch_transcripts(self, leased: dict[int, TrajectoryKey], finished: bool) -> Reply:
        found = await self.frames.load(leased.values())
        return _scoring_work(leased, found, finished)

    def _no_scoring(self, parked: Parked[LeaseScoring]) -> None:
        answer = ScoringLeased(items=(), finished=self._ledger.book.over)
        self._answer(parked.session.peer, parked.request_id, (answer, _NO_FRAMES))

    def _batch(self, parked: Parked[RequestBatch]) -> BatchDelivered | RunComplete | NotYet:
        if not self._sessions.is_current(parked.session):
            raise _HelloFirstError("say hello first")
        request = parked.request
        batch = self._ledger.deliver(request.version, request.step)
        if isinstance(batch, NotYet):
            return batch
        if batch is None:
            self.telemetry.waiting_for = ""
            return RunComplete(evaluations=tuple(self._ledger.book.state.eval_points))
        if request.step == self._ledger.book.step:
            self.telemetry.waiting_for = ""
        return BatchDelivered(step=request.step, groups=tuple(as_delivered(g) for g in batch))

    def _no_batch(self, parked: Parked[RequestBatch]) -> None:
        """Answer a learner whose time is up; say what it waits for."""
        reply: Answer
        try:
            batch = self._batch(parked)
            reply = self._not_ready(parked.request, batch) if isinstance(batch, NotYet) else batch
        except _ANSWERED as error:
            reply, _ = self._refusal(parked.session.peer, error)
        self._answer(parked.session.peer, parked.request_id, (reply, _NO_FRAMES))

    def _not_ready(self, request: RequestBatch, not_yet: NotYet) -> BatchNotReady:
        waiting_for = self._ledger.waiting_for(not_yet)
        reason = describe_wait(self._ledger.book, waiting_for, trouble=self._trouble.said())
        if request.step == self._ledger.book.step:
            self.telemetry.waiting_for = reason
        return BatchNotReady(
            waiting_for=waiting_for, reason=reason, last_step=self._ledger.book.state.last_step
        )

    # ---- trajectories and scores ---------------------------------------------

    def _submit(
        self, session: Session, request: SubmitTrajectory, frames: list[Frame]
    ) -> dict[TrajectoryKey, StoredTrajectory]:
        expect_frames(frames, 2, "SubmitTrajectory")
        header = request.header
        key = (header.group_id, header.sibling)
        prompt = self._ledger.answered(session.holder, header).prompt
        response = decode_text(frames[1], "response")
        # Frames of a message stay alive as long as a view of them does.
        stored = StoredTrajectory(
            payload=frames[0], transcript=encode(transcript_of(header, prompt, response))
        )
        if not self._ledger.submit(session.holder, header, stored.num_bytes):
            return {}
        group = self._ledger.book.groups.get(header.group_id)
        if group is None:
            return {}  # dropped on arrival
        if group.item == "eval":
            self.frames.pin(key, stored)
        else:
            self.frames.put(key, stored)
        self._scoring.add(key)
        if request.score is not None:
            score = replace(request.score, group_id=key[0], sibling=key[1])
            self._take_score(session, score)
        self._settle_soon()
        return {key: stored}

    def _submit_scores(self, session: Session, request: SubmitScores) -> None:
        for score in request.scores:
            key = (score.group_id, score.sibling)
            holds = self._scoring.finish(session.holder, score.lease_id, key)
            late = score.reward is not None and self._scoring.lapsed(
                session.holder, score.lease_id, key
            )
            if holds or late:  # a late reward is as good as any
                self._take_score(session, score)

    def _take_score(self, session: Session, score: Score) -> None:
        key = (score.group_id, score.sibling)
        group = self._ledger.book.groups.get(score.group_id)
        if group is None or score.sibling not in group.headers:
            return  # it ended, or nobody has answered yet
        self._ledger.score(score, session.holder)
        if group.item == "eval" and group.state == "ready":
            stored = {i: self.frames.get((group.group_id, i)) for i in range(group.size)}
            self._records.eval_answers(group, {i: one for i, one in stored.items() if one})
        if score.sibling in group.scores:
            self._scoring.discard(key)
            self._trouble.scored(_said(score.function))
            return
        reason = _said(group.failures[-1].reason if group.failures else score.unavailable)
        if warning := self._trouble.failed(_said(score.function), reason):
            _log.warning("%s; try it without a run: slipstream reward test", warning)
        if score.group_id in self._ledger.book.groups:
            _log.warning("no reward for trajectory %d/%d: %s", *key, reason)
            self._scoring.failed(key, session.name, now_s=self._now())
            self._settle_soon()

    def _fetch(self, session: Session, request_id: bytes, request: FetchPayloads) -> Reply | None:
        if len(set(request.keys)) < len(request.keys):
            raise RefusedError("FetchPayloads names a trajectory twice")
        for group_id, sibling in request.keys:
            group = self._ledger.book.groups.get(group_id)
            if group is None or group.state != "delivered" or sibling not in group.headers:
                raise RefusedError(f"trajectory {group_id}/{sibling} is in no delivered batch")
        stored = [self.frames.get(key) for key in request.keys]
        if None not in stored:
            frames = [one.payload for one in stored if one is not None]
            return Payloads(num_frames=len(frames)), frames
        self._spawn(session, request_id, self._fetch_payloads(request))
        return None

    async def _fetch_payloads(self, request: FetchPayloads) -> Reply:
        found = await self.frames.load(request.keys)
        gone = [key for key in request.keys if key not in found]
        if gone:
            raise RefusedError(f"the payload of trajectory {gone[0][0]}/{gone[0][1]} is gone")
        return Payloads(num_frames=len(request.keys)), [found[k].payload for k in request.keys]

    # ---- the learner ---------------------------------------------------------

    def _serve_learner(
        self,
        session: Session,
        request_id: bytes,
        request: TakeOver | StepCommit | RejectBatch | SealSteps | GetLedgerSnapshot,
    ) -> Reply | None:
        answer: Answer = Done()
        match request:
            case TakeOver():
                answer = self._take_over(session, request)
            case StepCommit():
                if self._records.wants_batches:
                    self._spawn(session, request_id, self._record_and_commit(request))
                    return None
                answer = self._commit_step(request)
            case RejectBatch(step=step, reason=reason, groups=groups, detail=detail):
                _log.warning("step %d was not trained: %s (%s)", step, reason, _said(detail))
                self._ledger.reject_batch(request.version, step, reason, groups)
            case SealSteps(version=version, step=step, oldest_kept=oldest_kept):
                self._ledger.seal(version, step, oldest_kept)
            case GetLedgerSnapshot(version=version):
                data = encode_state(self._ledger.snapshot(version))
                answer = LedgerSnapshotAnswer(data=data)
            case _:
                assert_never(request)
        return answer, _NO_FRAMES

    def _refuse_other_run(self, run_id: str) -> None:
        own = self._ledger.book.state.run_id
        if run_id and own and run_id != own:
            raise RefusedError(
                f"this broker serves run {self._run_name} with the id {own}, not {run_id}: what "
                "comes from another run of this name has no place in it"
            )

    def _take_over(self, session: Session, request: TakeOver) -> TookOver:
        before, epoch = self._ledger.book.step, self._ledger.book.version.epoch
        learner = session.holder if session.incarnation else ""
        self._refuse_other_run(request.run_id)
        trains = self._ledger.book.state.learner
        if trains and trains != learner and self._sessions.is_connected(trains):
            raise RefusedError(f"{name_of(trains)} is connected and trains this run: end it first")
        version = self._ledger.take_over(request.step, request.checkpoint, learner, request.held)
        self._on_epoch(version.epoch)  # on disk before anybody may use it
        if version.step != self._ledger.book.step:
            return TookOver(version=version)  # said twice
        if version.epoch > epoch:
            for name in self._discarded:  # what was trained and is delivered again is not its
                self._ledger.discard_answers_of(name, takes_over=True)
        _log.info(
            "a learner took over as %s%s",
            version.label,
            f", {before - version.step} steps back" if version.step < before else "",
        )
        if version.step < before:
            self.telemetry.went_back(version.step)
            self._records.went_back(version.step)
        self.telemetry.training_began()
        return TookOver(version=version)

    async def _record_and_commit(self, request: StepCommit) -> Reply:
        """Keep the batch whole before its payloads may go."""
        step = request.version.step - 1
        ids = self._ledger.book.state.batches.get(step, ())
        batch = [self._ledger.book.groups[group_id] for group_id in ids]
        found = await self.frames.load(key for group in batch for key in group.trajectory_keys())
        if request.version == self._ledger.book.version:
            return self._commit_step(request), _NO_FRAMES  # said twice: it is being recorded
        answer = self._commit_step(request)
        self._persist()  # before anything else that happens
        frames = [[found[key] for key in sorted(group.trajectory_keys())] for group in batch]
        await self._records.batch(step, list(zip(batch, frames, strict=True)))
        return answer, _NO_FRAMES

    def _commit_step(self, request: StepCommit) -> StepCommitted:
        before = self._ledger.book.step
        metrics = {name: value for name, value in request.metrics.items() if isfinite(value)}
        sampled = self._ledger.book.sampled_reward()
        if sampled is not None:
            metrics["reward/sampled"] = sampled
        batch = [
            self._ledger.book.groups[i] for i in self._ledger.book.state.batches.get(before, ())
        ]
        self._ledger.commit(request.version, metrics)
        state = self._ledger.book.state
        if self._ledger.book.step > before:
            for group in batch:
                self.frames.discard(group.trajectory_keys())  # the store has them until sealed
            point = self.telemetry.step(request.version.step, metrics)
            status = self.status()
            self._say_alarm(status.survivorship.alarm)
            self._records.step(point, status, self.account(_ITEMS_ON_FILE))
        return StepCommitted(evaluations=tuple(state.eval_points), last_step=state.last_step)

    def _say_alarm(self, alarm: str) -> None:
        """Warn once for as long as the survivorship meter is past its threshold."""
        if alarm and not self._alarm:
            _log.warning("%s", alarm)
        self._alarm = alarm

    # ---- what others ask -----------------------------------------------------

    def plan_stop(self, reason: str) -> None:
        """End the run in order, before the steps that were planned."""
        if self._ledger.plan_stop(reason):
            _log.info("the run ends: %s", reason)
            self._persist()

    def close_records(self) -> None:
        """Write how the run ended."""
        self.telemetry.outcome = "finished" if self._ledger.book.finished else "stopped"
        self._records.close(self.status(), self.account(_ITEMS_ON_FILE))
        self._writer.close()
        self._trail.close()

    def status(self) -> RunStatus:
        """Return the state of the run."""
        return self.telemetry.status(self._ledger.book, self._scoring)

    def dead_letters(self) -> list[DeadLetter]:
        """Return what nobody could answer or score."""
        return list(self._ledger.book.state.dead_letters.values())

    def account(self, num_items: int) -> LedgerView:
        """Return the account of all items."""
        return account_of(
            self._ledger.book,
            self._scoring,
            run_name=self._run_name,
            store=self._store_name,
            generation=self._generation,
            issued_at=self._issued_at,
            num_items=num_items,
            now=time.time(),
        )


class _HelloFirstError(RefusedError):
    """A connection that nobody has said hello on."""


_ANSWERED = (
    *(ProtocolError, RefusedError, SupersededError),
    *(LookupError, ValueError, TypeError, ArithmeticError),
)


def _said(text: str) -> str:
    """Return what a client said as one short line of a log."""
    return one_line(text, most=_MAX_SAID)


def _not_too_many(groups: tuple[int, ...]) -> tuple[int, ...]:
    if len(groups) > MAX_DEAD_LETTERS:
        raise RefusedError(f"{len(groups)} groups at a time; there are {MAX_DEAD_LETTERS} at most")
    return groups


def _scoring_work(
    leased: dict[int, TrajectoryKey],
    found: dict[TrajectoryKey, StoredTrajectory],
    finished: bool,
) -> Reply:
    items = {lease_id: key for lease_id, key in leased.items() if key in found}
    answer = ScoringLeased(
        items=tuple(
            ScoringItem(group_id=key[0], sibling=key[1], lease_id=lease_id)
            for lease_id, key in items.items()
        ),
        finished=finished,
    )
    return answer, [found[key].transcript for key in items.values()]
