"""The broker's loop: receive, admit, dispatch, answer.

Consumes: requests of all roles. Produces: one answer each. Everything between the arrival of a
message and the hand-over to the store happens at once, so that there is nothing to lock. Handlers
return answers; requests that find no work wait in PendingRequests, answers that promise something
wait for the store.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import zmq

from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.lease_book import LeaseBook
from slipstream.broker.listening.gate import limit_of
from slipstream.broker.server.clients import ClientRequest, Clients
from slipstream.broker.server.generation import GenerationHandler, GenerationRequest
from slipstream.broker.server.images import ImageHandler, ImageRequest
from slipstream.broker.server.keyring import BrokerKey
from slipstream.broker.server.learner import LearnerHandler, LearnerRequest
from slipstream.broker.server.limits import (
    MAX_FRAMES,
    RateLimit,
    ServerRules,
    max_body_bytes,
    max_bytes,
)
from slipstream.broker.server.operators import OperatorHandler
from slipstream.broker.server.outbox import Outbox
from slipstream.broker.server.pending import PendingRequest, PendingRequests
from slipstream.broker.server.permissions import may_send
from slipstream.broker.server.refusals import ErrorAnswers
from slipstream.broker.server.reply import ANSWERED, BrokerReply, HelloFirstError, Later, Outcome
from slipstream.broker.server.router import EventLoopRouter, Peer, RouterGroup
from slipstream.broker.server.scoring import ScoringHandler
from slipstream.broker.server.sessions import ClientSession
from slipstream.wire.errors import ForbiddenError, ProtocolError, SlowDownError
from slipstream.wire.messages.broker import (
    WIRE_REVISION,
    Answer,
    DeadLetters,
    Goodbye,
    HeartbeatAnswer,
    Hello,
    LeaseGroups,
    LeaseScoring,
    LedgerAnswer,
    Refusal,
    Request,
    RequestBatch,
    StatusAnswer,
    StoreImage,
    SubmitScores,
    SubmitTrajectory,
)
from slipstream.wire.messages.codec import Frame, decode_request, encode, expect_frames
from slipstream.wire.messages.pieces import joined, most_pieces

_log = logging.getLogger(__name__)

MAX_WAIT_S = 30.0
_GROUPS, _SCORING, _BATCHES = range(3)  # kinds of waiting requests, in the order of their grants
_SHARE = 1 / 4  # share of the descriptors for either socket
MAX_JOBS = 64  # requests of one client that wait for payloads at a time
# Answers that need not wait for the store.
_PROMISE_NOTHING = (HeartbeatAnswer, StatusAnswer, LedgerAnswer, DeadLetters)
_MAX_ID_BYTES = 64
_ENVELOPE = 2  # frames: the request id and the session
_OLD_REVISION = Refusal(  # before revision 4 a message had no session
    reason=f"this broker speaks wire revision {WIRE_REVISION}, you one before 4: "
    "install the same version on both sides"
)


def may_wait_s(asked_s: float) -> float:
    """Clamp a requested wait to 0..MAX_WAIT_S; NaN counts as the maximum."""
    return max(0.0, min(MAX_WAIT_S, asked_s))  # in this order NaN is MAX_WAIT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Handlers:
    """Handlers of requests, by concern."""

    clients: Clients
    generation: GenerationHandler
    scoring: ScoringHandler
    learner: LearnerHandler
    images: ImageHandler
    operators: OperatorHandler


class BrokerServer:
    """Owns the sockets, and hands each request to the handler of its concern."""

    def __init__(
        self,
        ledger: Ledger,
        leases: LeaseBook,
        handlers: Handlers,
        outbox: Outbox,
        pending: PendingRequests,
        routers: RouterGroup,
        rules: ServerRules,
        now: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._leases = leases
        self._handlers = handlers
        self._clients, self._sessions = handlers.clients, handlers.clients.sessions
        self._outbox = outbox
        self._persist = outbox.persist
        self._routers = routers
        self._rules = rules
        self._most_pieces = most_pieces(rules.max_message_bytes, MAX_FRAMES)
        self._rate: RateLimit[Peer | str] = RateLimit(rules.max_requests_per_s)  # one for each key
        self._now = now
        self._jobs: asyncio.TaskGroup | None = None
        self._jobs_of: Counter[str] = Counter()
        self.num_ticks = 0  # turns of the loop, about one a second
        self.pending = pending
        self.frames, self.report = outbox.frames, outbox.report
        self.telemetry = self.report.telemetry
        self._errors = ErrorAnswers(self.telemetry, self._sessions, now)

    # ---- the loop ------------------------------------------------------------

    async def serve(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        *,
        listen: str = "",
        key: BrokerKey | None = None,
    ) -> None:
        """Answer requests until cancelled.

        Args:
            context: Context of the process.
            endpoint: Unix socket in a private folder.
            listen: Address for other hosts, where clients have to prove a key.
            key: Key of the broker at that address.

        Raises:
            ConfigError: an address cannot be listened at.
        """
        self._leases.restarted(self._now())
        try:
            async with asyncio.TaskGroup() as jobs:
                self._jobs = jobs
                self._listen(context, endpoint, b"")
                if listen and key is not None:
                    self._listen(context, listen, key.secret)
                    _log.info("other hosts find this broker at %s", self.addresses[-1])
                await self._tick()
        finally:
            self.pending.close()
            self._routers.close()

    def _listen(
        self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, secret: bytes
    ) -> None:
        limit = limit_of(_SHARE)
        self._routers.add(
            EventLoopRouter(
                context, endpoint, on_message=self._receive, secret_key=secret, limit=limit
            )
        )

    @property
    def addresses(self) -> list[str]:
        """Addresses that it listens on."""
        return self._routers.endpoints

    async def _tick(self) -> None:
        """End leases of silent holders and refresh keys, about once a second."""
        every_s = min(1.0, self._ledger.book.rules.lease_s / 4)
        last_s = self._now()
        while True:
            self.num_ticks += 1
            due_s = last_s + every_s
            await asyncio.sleep(max(0.0, due_s - self._now()))
            now = self._now()
            late_s = max(0.0, now - (last_s if self._outbox.is_flooded else due_s))
            last_s = now
            self._leases.postpone(late_s)  # heartbeats that came meanwhile are still unread
            self._clients.refresh_keys()
            self.telemetry.notice(self._ledger.book)
            lapsed = self._leases.expire(now)
            if lapsed:
                _log.warning("%d leases lapsed: their holders sent no heartbeat", lapsed)
            self._persist()

    # ---- receive and admit ---------------------------------------------------

    def _receive(self, peer: Peer, frames: Sequence[zmq.Frame]) -> None:
        if not 3 <= len(frames) <= self._most_pieces or len(frames[0]) > _MAX_ID_BYTES:
            self.telemetry.rejected["malformed"] += 1
            if len(frames) == 2 and len(frames[0]) <= _MAX_ID_BYTES:
                self._answer(peer, frames[0].bytes, BrokerReply(_OLD_REVISION))
            return
        request_id = frames[0].bytes
        try:
            session, (body, *attached) = self._admit(peer, frames)
            reply = self._dispatch(peer, session, request_id, decode_request(body), attached)
        except ANSWERED as error:
            reply = self._errors.reply(peer, error)
        if reply is None:
            self._persist()
        elif isinstance(reply.answer, _PROMISE_NOTHING):
            self._persist(reply.put)
            self._send(peer, [request_id, encode(reply.answer)], reply.answer)
        else:
            self._answer(peer, request_id, reply)

    def _admit(
        self, peer: Peer, frames: Sequence[zmq.Frame]
    ) -> tuple[ClientSession | None, list[Frame]]:
        """Return the session of a message, the body of its request, and the frames attached to it.

        A connection without a hello has no session.

        Raises:
            SlowDownError: the client exceeds its limits.
            ForbiddenError: its key was revoked.
            ProtocolError: it has too many frames, or is too large for its role.
        """
        if not self._rate.takes(peer.key or peer, self._now()):
            raise SlowDownError("more requests at a time than broker.max_requests_per_s allows")
        self._clients.refuse_unchecked_key(peer)
        session = self._sessions.find(frames[1].bytes, peer)
        role = session.role if session else None
        limit = max_bytes(role, self._rules.max_message_bytes)
        size = sum(map(len, frames))
        if size > limit:
            who = role or "client without a hello"
            raise ProtocolError(f"a message of {size} bytes; a {who} may send {limit}")
        parts = joined([piece.buffer for piece in frames[2:]])
        if len(parts) > MAX_FRAMES - _ENVELOPE:
            raise ProtocolError(f"{len(parts)} frames; there may be {MAX_FRAMES - _ENVELOPE}")
        if len(parts[0]) > max_body_bytes(role, self._rules.max_message_bytes):
            raise ProtocolError(f"{len(parts[0])} bytes before the frames that carry the data")
        return session, parts

    # ---- dispatch ------------------------------------------------------------

    def _dispatch(
        self,
        peer: Peer,
        session: ClientSession | None,
        request_id: bytes,
        request: Request,
        frames: Sequence[Frame],
    ) -> BrokerReply | None:
        """Have a request carried out; return its answer, or None if it comes later."""
        if isinstance(request, Hello):
            expect_frames(frames, 0, "Hello")
            return self._clients.hello(peer, request)
        session = self._permitted(session, request, frames)
        if isinstance(request, LeaseGroups | LeaseScoring | RequestBatch):
            self._wait(session, request_id, request)
            return None
        if isinstance(request, GenerationRequest):
            return self._handlers.generation.handle(session, request, frames)
        if isinstance(request, SubmitScores):
            return self._handlers.scoring.handle(session, request)
        if isinstance(request, LearnerRequest):
            outcome = self._handlers.learner.handle(session, request)
            if isinstance(outcome, BrokerReply):
                return outcome
            self._spawn(session, request_id, outcome)
            return None
        if isinstance(request, ImageRequest):
            self._spawn(session, request_id, self._handlers.images.handle(request, frames))
            return None
        if isinstance(request, ClientRequest):
            if isinstance(request, Goodbye) and self._sessions.is_current(session):
                self.pending.dismiss((_GROUPS, session.name))
                self.pending.dismiss((_SCORING, session.name))
                self._sessions.leaves(session)
            return self._clients.handle(session, request)
        return self._handlers.operators.handle(session, request)

    def _permitted(
        self, session: ClientSession | None, request: Request, frames: Sequence[Frame]
    ) -> ClientSession:
        """Return the session of a request, if its role may send it.

        Raises:
            HelloFirstError: there is no session.
            ForbiddenError: another role sends these.
            ProtocolError: frames are attached that belong to no such request.
        """
        kind = type(request).__name__
        if session is None:
            raise HelloFirstError("send a hello first")
        if not may_send(
            session.role,
            request,
            scores_inline=self._rules.scores_inline,
            environment_scores=self._rules.environment_scores,
        ):
            raise ForbiddenError(f"{session.name} is a {session.role}, which may not send {kind}")
        self.telemetry.received_from(session.name)
        if not isinstance(request, SubmitTrajectory | StoreImage):
            expect_frames(frames, 0, kind)
        return session

    def _wait(
        self,
        session: ClientSession,
        request_id: bytes,
        request: LeaseGroups | LeaseScoring | RequestBatch,
    ) -> None:
        """Answer a waiting request now if possible, or else keep it until it can be."""
        name, handlers = session.name, self._handlers
        key: Hashable
        detail: Hashable
        attempt: Callable[[], Outcome | None]
        if isinstance(request, LeaseGroups):
            rank, key, detail = _GROUPS, (_GROUPS, name), (request.adopted, request.max_sequences)
            attempt = partial(handlers.generation.lease, session, request)
            at_timeout = partial(handlers.generation.no_work, session, request)
        elif isinstance(request, LeaseScoring):
            rank, key, detail = _SCORING, (_SCORING, name), name
            attempt = partial(handlers.scoring.lease, session, request)
            at_timeout = partial(handlers.scoring.no_work, session, request)
        else:
            rank, key, detail = _BATCHES, (_BATCHES, name, request.step), request.step
            attempt = partial(handlers.learner.batch, session, request)
            at_timeout = partial(handlers.learner.no_batch, session, request)
        answer = partial(self._finish, session, request_id)
        waiting = PendingRequest(key, (rank, detail), attempt, at_timeout, answer)
        self.pending.add(waiting, may_wait_s(request.wait_s))

    # ---- answer --------------------------------------------------------------

    def _finish(
        self, session: ClientSession, request_id: bytes, outcome: Outcome | Exception
    ) -> None:
        """Answer a request that waited."""
        try:
            if isinstance(outcome, Later):
                self._spawn(session, request_id, outcome)
                return
        except SlowDownError as error:
            outcome = error
        reply = (
            self._errors.reply(session.peer, outcome) if isinstance(outcome, Exception) else outcome
        )
        self._answer(session.peer, request_id, reply)

    def _answer(self, peer: Peer, request_id: bytes, reply: BrokerReply) -> None:
        """Send an answer as soon as everything that it may rest on is durable."""
        frames = [request_id, encode(reply.answer), *reply.frames]
        self._persist(reply.put, lambda: self._send(peer, frames, reply.answer))

    def _send(self, peer: Peer, frames: Sequence[Frame], answer: Answer) -> None:
        if not self._routers or peer.send(frames):
            return
        self.telemetry.rejected["unreachable"] += 1
        self._leases.undelivered(answer)
        self._persist()

    def _spawn(self, session: ClientSession, request_id: bytes, later: Later) -> None:
        """Answer when a job is done that waits for the store."""
        holder = session.holder
        if self._jobs is None or self._jobs_of[holder] >= MAX_JOBS:
            later.job.close()
            raise SlowDownError(f"{MAX_JOBS} requests of {session.name} wait for payloads")
        self._jobs_of[holder] += 1

        async def run() -> None:
            try:
                reply = await later.job
            except ANSWERED as error:
                reply = self._errors.reply(session.peer, error)
            finally:
                self._jobs_of[holder] -= 1
                if not self._jobs_of[holder]:
                    del self._jobs_of[holder]
            self._answer(session.peer, request_id, reply)

        self._jobs.create_task(run())

    # ---- the end -------------------------------------------------------------

    def plan_stop(self, reason: str) -> None:
        """End the run in order, before the steps that were planned."""
        if self._ledger.plan_stop(reason):
            _log.info("the run ends: %s", reason)
            self._persist()

    def close_records(self) -> None:
        """Write the run's outcome."""
        self._outbox.close()
