"""Requests of every role: hello, heartbeats, goodbye; and the effects of revoked keys."""

import logging
import time
from collections.abc import Callable
from typing import TypeAlias, assert_never

from msgspec.structs import replace

from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.lease_book import LeaseBook
from slipstream.broker.ledger.leases import name_of
from slipstream.broker.report.run_report import RunReport
from slipstream.broker.server.keyring import KeyRing
from slipstream.broker.server.reply import BrokerReply
from slipstream.broker.server.router import Peer
from slipstream.broker.server.sessions import ClientSession, Sessions
from slipstream.wire.errors import RefusedError, SlowDownError
from slipstream.wire.messages.broker import (
    Done,
    Goodbye,
    Heartbeat,
    HeartbeatAnswer,
    Hello,
    Welcome,
)

_log = logging.getLogger(__name__)

ClientRequest: TypeAlias = Heartbeat | Goodbye

_COME_BACK_S = 5.0  # time for clients of the previous broker to return under their names
_KEYS_LOST_S = 10.0  # keys that cannot be read count for so long as they were


class Clients:
    """Connected clients, and their keys."""

    def __init__(
        self,
        ledger: Ledger,
        leases: LeaseBook,
        report: RunReport,
        keys: KeyRing | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._leases = leases
        self._report = report
        self._keys = keys
        self._now = now
        self._began_s = now()
        self._keys_lost_s: float | None = None  # since when they cannot be read
        self._discarded: frozenset[str] = frozenset()  # keys whose answers were dropped
        self.sessions = Sessions(
            (lambda _key: None) if keys is None else keys.holder,
            may_come_back=self._may_come_back,
            now=now,
        )

    def _may_come_back(self, name: str, holder: str) -> bool:
        """True if another process had this name before this broker was there."""
        if self._now() - self._began_s > _COME_BACK_S:
            return False
        known = {*self._leases.holders, self._ledger.book.state.learner}
        return any(name_of(other) == name and other != holder for other in known)

    def handle(self, session: ClientSession, request: ClientRequest) -> BrokerReply:
        """Carry out a request."""
        match request:
            case Heartbeat(lease_ids=lease_ids):
                lost = self._leases.extend(session.holder, lease_ids, now_s=self._now())
                return BrokerReply(HeartbeatAnswer(lost=lost))
            case Goodbye(is_stopped=is_stopped):
                if session.holder == self._ledger.book.state.learner:
                    self._ledger.training.leave(is_stopped=is_stopped)
                self._leases.release_all(session.holder, "left")
                self._report.telemetry.left(session.name)
            case _:
                assert_never(request)
        return BrokerReply(Done())

    def hello(self, peer: Peer, hello: Hello) -> BrokerReply:
        """Register a connection, and take back the leases of an earlier process of this name.

        Raises:
            RefusedError: as ``Sessions.hello``, or it belongs to another run.
        """
        self.refuse_other_run(hello.run_id)
        before = self.sessions.named(peer)
        session = self.sessions.hello(peer, hello)
        if before != session.name:
            self._report.telemetry.forget(before)
        if hello.role not in {"observer", "operator"}:
            self._leases.restart(session.holder, hello.held)
            _log.info("hello %sfrom %s", "again " * hello.reconnects, session.name)
        self._report.hello(replace(hello, name=session.name))
        book = self._ledger.book
        welcome = Welcome(
            run_name=self._report.run_name,
            session=session.token,
            learner_step=book.step,
            heartbeat_s=book.rules.lease_s / 4,
            run_id=book.state.run_id,
        )
        return BrokerReply(welcome)

    def refuse_other_run(self, run_id: str) -> None:
        """Refuse requests from another run of the same name."""
        own = self._ledger.book.state.run_id
        if run_id and own and run_id != own:
            raise RefusedError(
                f"this broker serves run {self._report.run_name} with the id {own}, not {run_id}: "
                "requests from another run with the same name are refused"
            )

    # ---- keys ----------------------------------------------------------------

    def refuse_unchecked_key(self, peer: Peer) -> None:
        """Refuse other hosts while keys cannot be read: one may have been revoked meanwhile."""
        if peer.key and self._keys_lost_s is not None:
            lost_s = self._now() - self._keys_lost_s
            if lost_s > _KEYS_LOST_S:
                raise SlowDownError(f"keys (broker.keys) cannot be read for {lost_s:.0f} s")

    def refresh_keys(self) -> None:
        """Read keys that were made or revoked, and take back the leases of revoked ones."""
        if self._keys is None:
            return
        try:
            revoked = self._keys.refresh()
        except OSError as error:
            if self._keys_lost_s is None:
                self._keys_lost_s = self._now()
                _log.error(
                    "keys cannot be read: %s; in %.0f s no other host is served until they can",
                    error,
                    _KEYS_LOST_S,
                )
            return
        if self._keys_lost_s is not None:
            self._keys_lost_s = None
            _log.info("keys can be read again")
        for holder in revoked:
            _log.warning("the key %s (%s) was revoked", holder.name, holder.role)
            for session in self.sessions.end(holder.public):
                self._leases.release_all(session.holder, "left")
        for name in self._keys.discarded - self._discarded:
            dropped, trained = self._ledger.discard_answers_of(name)
            _log.warning(
                "answers delivered with the key %s are dropped: %d groups; %d are being trained",
                name,
                dropped,
                trained,
            )
        self._discarded = self._keys.discarded

    def discard_answers_again(self) -> None:
        """Drop answers of discarded keys that a take-over would deliver again."""
        for name in self._discarded:
            self._ledger.discard_answers_of(name, takes_over=True)

    def generator_keys(self) -> dict[str, str]:
        """Names of the generators' keys, by public key."""
        if self._keys is None:
            return {}
        return {
            owner.public: owner.name for owner in self._keys.holders if owner.role == "generator"
        }
