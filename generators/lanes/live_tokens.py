"""Tokens of live trajectories in an engine's cache, and how many more trajectories fit.

A trajectory of several turns lives from its lease to its end. Its prefix stays in the cache while
it sleeps, because its environment answers: were it evicted, its next call would compute it again.
All count with what trajectories have on average over their calls, or with what they have and their
next calls add, if that is more. Each counts a prompt that siblings share: this is the slack for
what the averages do not foresee. New trajectories alone wait for room: calls of live ones never do.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass

_REMEMBERED = 1000  # ended trajectories
_ROUNDING = 1e-9  # share of a trajectory that sums of floats may be off


@dataclass(slots=True)
class _Held:
    """What one trajectory has."""

    tokens: int = 0  # number after its last call
    calls: int = 0
    tokens_of_calls: int = 0  # sum of the tokens after each


class LiveTokens:
    """Counts the tokens of live trajectories."""

    def __init__(self, longest_tokens: int) -> None:
        """Begin as if one trajectory had ended, whose one call had the most tokens."""
        self._longest = longest_tokens
        self._live: dict[Hashable, _Held] = {}
        self._ended_tokens = self._ended_tokens_of_calls = float(longest_tokens)
        self._ended_calls = 1.0

    def begin(self, trajectory: Hashable) -> None:
        """Count a trajectory, which has no tokens yet."""
        self._live[trajectory] = _Held()

    def hold(self, trajectory: Hashable, num_tokens: int) -> None:
        """Take the tokens of a trajectory after one more call; one that ended holds none."""
        if (held := self._live.get(trajectory)) is not None:
            held.tokens = max(held.tokens, num_tokens)
            held.calls += 1
            held.tokens_of_calls += held.tokens

    def end(self, trajectory: Hashable) -> None:
        """Count a trajectory no more; the averages remember it."""
        held = self._live.pop(trajectory)
        fading = 1.0 - 1.0 / _REMEMBERED if held.calls else 1.0
        self._ended_tokens = fading * self._ended_tokens + held.tokens
        self._ended_tokens_of_calls = fading * self._ended_tokens_of_calls + held.tokens_of_calls
        self._ended_calls = fading * self._ended_calls + held.calls

    @property
    def mean_tokens(self) -> float:
        """Tokens of a trajectory, on average over its calls.

        Short ones end first. While few have ended, the tokens of live ones raise the average.
        """
        live = sum(held.tokens for held in self._live.values())
        mean = self._ended_tokens_of_calls / self._ended_calls * (1.0 + live / self._ended_tokens)
        return min(self._longest, mean)

    def num_fitting(self, capacity_tokens: int, num_promised: int) -> int:
        """Return how many more trajectories fit; negative if live ones need more than there is.

        Args:
            capacity_tokens: Capacity of the cache.
            num_promised: Trajectories that are leased and have not begun.
        """
        mean = self.mean_tokens
        added = self._ended_tokens / self._ended_calls
        soon = sum(
            min(self._longest, held.tokens + added) if held.calls else mean
            for held in self._live.values()
        )
        left = capacity_tokens - max(soon, mean * len(self._live))
        return math.floor(left / mean + _ROUNDING) - num_promised
