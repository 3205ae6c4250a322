"""Limits of one connection: requests at a time, and their size. Pure."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from slipstream.wire.messages.broker import Role
from slipstream.wire.process.token_bucket import TokenBucket

P = TypeVar("P")
MAX_FRAMES = 8  # frames of one message, with the request id, the session and the body
_MAX_STRANGERS = 4_096  # clients that are remembered; the quietest is forgotten first
_SMALL_BYTES = 16 * 1024 * 1024
_TINY_BYTES = 64 * 1024
_BODY_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRules:
    """The settings that a server obeys."""

    max_message_bytes: int
    max_requests_per_s: float = 10_000.0
    scores_inline: bool = False  # generators score what they deliver (reward.inline)
    environment_scores: bool = False  # an environment, which generators run, may give a reward
    cache_bytes: int = 1 << 28


class RateLimit(Generic[P]):
    """A token bucket per client: ``per_s`` requests in the long run, twice that at once."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._buckets: OrderedDict[P, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def takes(self, peer: P, now_s: float) -> bool:
        """Count one more request; True if it is within the limit."""
        bucket = self._buckets.get(peer)
        if bucket is None:
            if len(self._buckets) >= _MAX_STRANGERS:
                self._buckets.popitem(last=False)
            bucket = self._buckets[peer] = TokenBucket(self._per_s, 2 * self._per_s, now_s)
        else:
            self._buckets.move_to_end(peer)
        if bucket.refill(now_s) < 1:
            return False
        bucket.tokens -= 1
        return True


def max_bytes(role: Role | None, max_message_bytes: int) -> int:
    """Return the maximum message size of this role; None is a client without a hello."""
    match role:
        case "generator":
            return max_message_bytes
        case "learner" | "learner_part" | "relay" | "reward_worker":
            return min(_SMALL_BYTES, max_message_bytes)
        case _:
            return min(_TINY_BYTES, max_message_bytes)


def max_body_bytes(role: Role | None, max_message_bytes: int) -> int:
    """Return the maximum body size: bodies are kept in memory, attachments in the store."""
    limit = max_bytes(role, max_message_bytes)
    return min(_BODY_BYTES, limit) if role == "generator" else limit
