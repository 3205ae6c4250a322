"""Waiting for a store's server that went away."""

import asyncio
import logging
import time
from collections import Counter
from types import TracebackType

from slipstream.wire.errors import PeerLostError
from slipstream.wire.redaction import without_secrets

_log = logging.getLogger(__name__)
LOADING_S = 3600.0
_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0
_CONSEQUENCES = {
    "commits": "nothing is acknowledged",
    "claims": "the broker does not start",
    "reads": "batches wait",
}


class Outage:
    """Waits for Redis between tries; logs once that it is away, and once that it is back."""

    def __init__(self, what: str, url: str, limit_s: float, ongoing: Counter[str]) -> None:
        self._what = what
        self._url = url
        self._limit_s = limit_s
        self._ongoing = ongoing
        self._num_failures = 0
        self._is_logged = False
        self._began_s = 0.0
        self._answered_s = 0.0
        self._pause_s = _FIRST_PAUSE_S

    def __enter__(self) -> "Outage":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._is_logged:
            return
        self._ongoing[self._what] -= 1
        if error is None and not self._ongoing[self._what]:
            away_s = time.monotonic() - self._began_s
            _log.info("Redis does %s again after %.1f s", self._what, away_s)

    async def wait(self, error: Exception, *, loads: bool) -> None:
        """Sleep before the next try; ``loads``: the server reads its file and will answer.

        Raises:
            PeerLostError: the outage is too long.
        """
        now_s = time.monotonic()
        if not self._num_failures:
            self._began_s = self._answered_s = now_s
        self._num_failures += 1
        reason = without_secrets(str(error)) or "silence"
        if self._num_failures == 2:  # the first may be but a connection that Redis had closed
            self._is_logged = True
            self._ongoing[self._what] += 1
            if self._ongoing[self._what] == 1:  # else another operation has logged it
                _log.warning(
                    "Redis at %s does no %s, %s until it does; waiting up to %.0f s (%s)",
                    self._url,
                    self._what,
                    _CONSEQUENCES[self._what],
                    self._limit_s,
                    reason,
                )
        if loads and now_s - self._began_s < LOADING_S:
            self._answered_s = now_s
        if now_s - self._answered_s >= self._limit_s:
            raise PeerLostError(
                f"Redis at {self._url} (broker.redis.url) did no {self._what} for "
                f"{now_s - self._began_s:.0f} s: {reason}"
            ) from error
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
