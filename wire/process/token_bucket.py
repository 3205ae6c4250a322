"""A token bucket: a rate in the long run, and a burst."""

from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """Tokens that come back with time. Starts full at ``since_s``, monotonic seconds."""

    per_s: float
    burst: float
    since_s: float
    tokens: float = -1.0  # left at ``since_s``; -1 for a full bucket

    def __post_init__(self) -> None:
        """Fill a new bucket."""
        if self.tokens < 0:
            self.tokens = self.burst

    def refill(self, now_s: float) -> float:
        """Add the tokens of the time until now; return their number."""
        gained = (now_s - self.since_s) * self.per_s
        self.tokens = min(self.burst, self.tokens + gained)
        self.since_s = now_s
        return self.tokens
