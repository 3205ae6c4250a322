"""Requests of generators: leases, trajectories, prompts that cannot be answered."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias, assert_never

from msgspec.structs import replace

from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.lease_book import LeaseBook
from slipstream.broker.ledger.scoring_queue import MAX_GRANTED_BYTES
from slipstream.broker.server.reply import BrokerReply, log_text
from slipstream.broker.server.scoring import ScoringHandler
from slipstream.broker.server.sessions import ClientSession, Sessions
from slipstream.broker.store.base import StoredTrajectory
from slipstream.broker.store.payload_cache import FrameCache
from slipstream.wire.errors import ProtocolError, RefusedError
from slipstream.wire.messages.broker import (
    Done,
    GroupsLeased,
    LeaseGroups,
    RejectPrompt,
    ReleaseLease,
    SubmitTrajectory,
)
from slipstream.wire.messages.codec import Frame, decode_text, decode_texts, encode, expect_frames
from slipstream.wire.messages.trajectory import TrajectoryHeader, transcript_of

_log = logging.getLogger(__name__)
MAX_TEXT_BYTES = 1_024  # text of a token, several times the longest one of any tokenizer
_HEAD_BYTES = 1_024  # overhead of msgpack around arrays and texts

GenerationRequest: TypeAlias = SubmitTrajectory | RejectPrompt | ReleaseLease


class GenerationHandler:
    """Answers generators."""

    def __init__(
        self,
        ledger: Ledger,
        leases: LeaseBook,
        frames: FrameCache,
        sessions: Sessions,
        scoring: ScoringHandler,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._leases = leases
        self._frames = frames
        self._sessions = sessions
        self._scoring = scoring
        self._now = now

    def handle(
        self, session: ClientSession, request: GenerationRequest, frames: Sequence[Frame]
    ) -> BrokerReply:
        """Carry out a request."""
        match request:
            case SubmitTrajectory():
                return self._submit(session, request, frames)
            case RejectPrompt(lease_id=lease_id, reason=reason, detail=detail):
                _log.warning("%s cannot answer a prompt: %s", session.name, log_text(detail))
                self._ledger.reject(session.holder, lease_id, reason)
            case ReleaseLease(lease_id=lease_id, reason=reason, is_stranded=is_stranded):
                text = log_text(reason)
                if self._leases.release(session.holder, lease_id, text, is_stranded=is_stranded):
                    _log.warning("%s handed back lease %d: %s", session.name, lease_id, text)
            case _:
                assert_never(request)
        return BrokerReply(Done())

    def lease(self, session: ClientSession, request: LeaseGroups) -> BrokerReply | None:
        """Grant groups; None while there is nothing to grant."""
        groups = []
        if self._sessions.is_current(session):
            if request.adopted is not None:
                groups = self._ledger.lease(
                    session.holder,
                    request.adopted,
                    max_sequences=request.max_sequences,
                    now_s=self._now(),
                    num_sharing=self._sessions.num_of("generator"),
                )
            if not groups and not self._ledger.book.over:
                return None
        return BrokerReply(GroupsLeased(groups=tuple(groups), finished=self._ledger.book.over))

    def no_work(self, _session: ClientSession, _request: LeaseGroups) -> BrokerReply:
        """Answer a generator that has waited long enough."""
        return BrokerReply(GroupsLeased(groups=(), finished=self._ledger.book.over))

    def _submit(
        self, session: ClientSession, request: SubmitTrajectory, frames: Sequence[Frame]
    ) -> BrokerReply:
        header = request.header
        expect_frames(frames, 3 if header.turns else 2, "SubmitTrajectory")
        _refuse_larger(header, frames, self._ledger.book.rules.max_token_bytes)
        key = (header.group_id, header.sibling)
        prompt = self._ledger.answered(session.holder, header).prompt
        response = decode_text(frames[1], "response")
        replies = decode_texts(frames[2]) if header.turns else ()
        try:
            transcript = transcript_of(header, prompt, response, replies)
        except ValueError as error:
            raise ProtocolError(f"SubmitTrajectory: {error}") from error
        # Frames of a message stay alive as long as a view of them does.
        stored = StoredTrajectory(payload=frames[0], transcript=encode(transcript))
        group = self._leases.submit(session.holder, header, stored.num_bytes)
        if group is None:
            return BrokerReply(Done())
        if group.item == "eval":
            self._frames.pin(key, stored)
        else:
            self._frames.put(key, stored)
        if request.score is not None:
            score = replace(request.score, group_id=key[0], sibling=key[1])
            self._scoring.take(session, score)
        return BrokerReply(Done(), put={key: stored})


def most_bytes(header: TrajectoryHeader, max_token_bytes: int) -> dict[str, int]:
    """Return the most bytes of each frame of a trajectory with this header. Pure."""
    # What an environment asked first is in the response, and so are names of roles.
    response = _HEAD_BYTES + header.num_tokens * MAX_TEXT_BYTES
    return {
        "payload": _HEAD_BYTES + header.num_tokens * max_token_bytes,
        "response": min(response, MAX_GRANTED_BYTES),
        "text of turns": _HEAD_BYTES + header.num_response_tokens * (MAX_TEXT_BYTES + 5),
    }


def _refuse_larger(header: TrajectoryHeader, frames: Sequence[Frame], max_token_bytes: int) -> None:
    """Refuse more bytes than the header's tokens can have.

    Raises:
        RefusedError: a frame is larger.
    """
    most = most_bytes(header, max_token_bytes)
    for (what, limit), frame in zip(most.items(), frames, strict=False):
        if len(frame) > limit:
            setting = f"{MAX_TEXT_BYTES} bytes of text for each"
            if what == "payload":
                setting = "sampling.max_kept_tokens, run.routing_replay"
            raise RefusedError(
                f"a {what} of {len(frame)} bytes in group {header.group_id}, whose "
                f"{header.num_tokens} tokens can have {limit} at most ({setting})"
            )
