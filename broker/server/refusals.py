"""Errors as answers: the client's code, counters and log lines."""

import logging
import time
from collections.abc import Callable

from slipstream.broker.report.telemetry import Telemetry
from slipstream.broker.server.reply import BrokerReply, HelloFirstError, log_text
from slipstream.broker.server.router import Peer
from slipstream.broker.server.sessions import Sessions
from slipstream.wire.errors import (
    ForbiddenError,
    NameTakenError,
    ProtocolError,
    RefusedError,
    SlowDownError,
    SupersededError,
)
from slipstream.wire.messages.bounds import shortened
from slipstream.wire.messages.broker import Refusal, RefusalCode

_log = logging.getLogger(__name__)

_COMPLAIN_EVERY_S = 10.0  # about one client
_MAX_COMPLAINTS = 1_000  # clients
# The first kind that fits counts; a code where the client can do something about it.
_KINDS: tuple[tuple[type[Exception], str, RefusalCode], ...] = (
    (ProtocolError, "malformed", ""),
    (SupersededError, "superseded", "superseded"),
    (HelloFirstError, "hello_first", "hello_first"),
    (ForbiddenError, "forbidden", "forbidden"),
    (SlowDownError, "slow_down", "slow_down"),
    (NameTakenError, "name_taken", "name_taken"),
    (RefusedError, "refused", ""),
)


class ErrorAnswers:
    """Turns errors into answers."""

    def __init__(
        self, telemetry: Telemetry, sessions: Sessions, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._telemetry = telemetry
        self._sessions = sessions
        self._now = now
        self._complained_s: dict[str, float] = {}  # client -> when its refusals were logged last

    def reply(self, peer: Peer, error: Exception) -> BrokerReply:
        """Return the answer to a request that failed, and count it."""
        for kind, counter, code in _KINDS:
            if isinstance(error, kind):
                self._telemetry.rejected[counter] += 1
                if code == "forbidden":
                    self._complain(self._sessions.named(peer), str(error))
                elif code == "name_taken":
                    self._complain("a second process", str(error))
                return BrokerReply(Refusal(reason=shortened(str(error)), code=code))
        # A bug of ours that one message exposed must not end the whole run.
        _log.error("request of %s failed", self._sessions.named(peer), exc_info=error)
        self._telemetry.rejected["internal"] += 1
        return BrokerReply(Refusal(reason=shortened(f"internal error: {error!r}"), code=""))

    def _complain(self, name: str, reason: str) -> None:
        """Log a forbidden request; once in a while, for a client may try very often."""
        now = self._now()
        if now - self._complained_s.get(name, -_COMPLAIN_EVERY_S) >= _COMPLAIN_EVERY_S:
            if len(self._complained_s) > _MAX_COMPLAINTS:
                self._complained_s.clear()
            self._complained_s[name] = now
            _log.warning("%s: %s", name, log_text(reason))
