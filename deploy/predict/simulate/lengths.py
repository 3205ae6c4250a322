"""Pure: lengths of prompts and responses, drawn from a distribution."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.wire.errors import ConfigError


class Lengths(Protocol):
    """A distribution of response lengths, in tokens."""

    def draw(self, rng: random.Random, num: int) -> list[int]:
        """Return the lengths of a group's responses, each >= 1."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """All of one length."""

    tokens: int

    def draw(self, rng: random.Random, num: int) -> list[int]:  # noqa: ARG002 nothing is drawn
        """Return ``num`` times the same length."""
        return [self.tokens] * num


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal lengths with a largest length; siblings are alike.

    The mean is that of the cut lengths, as a run reports it.
    """

    mean: float  # tokens, after the cut
    spread: float  # standard deviation over mean, before the cut
    longest: int  # sampling.max_response_tokens
    alike: float = 0.5  # prompt's share of the logarithms' variance
    _place: tuple[float, float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.mean < self.longest or self.spread <= 0 or not 0 <= self.alike <= 1:
            raise ConfigError(
                f"lengths with mean {self.mean:g}, spread {self.spread:g}, at most {self.longest}, "
                f"alike {self.alike:g}: expected 1 <= mean < longest, spread > 0, alike in [0, 1]"
            )
        sigma = math.sqrt(math.log1p(self.spread**2))
        object.__setattr__(self, "_place", (_median_of(self.mean, sigma, self.longest), sigma))

    def draw(self, rng: random.Random, num: int) -> list[int]:
        """Return lengths of one prompt's responses."""
        median, sigma = self._place
        own, others = sigma * math.sqrt(1 - self.alike), sigma * math.sqrt(self.alike)
        shared = median + others * rng.gauss(0.0, 1.0)
        gauss, longest = rng.gauss, self.longest
        return [
            min(longest, max(1, round(math.exp(min(shared + own * gauss(0.0, 1.0), 30.0)))))
            for _ in range(num)
        ]


@dataclass(frozen=True, slots=True)
class Recorded:
    """Lengths of a recorded run, drawn again."""

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 1:
            raise ConfigError("recorded lengths: expected at least one, each >= 1 token")

    def draw(self, rng: random.Random, num: int) -> list[int]:
        """Return some of the recorded lengths."""
        return rng.choices(self.tokens, k=num)


def cut(lengths: Lengths, longest: int) -> Lengths:
    """Return recorded or fixed lengths, limited to ``longest`` tokens; others unchanged."""
    match lengths:
        case Recorded(tokens):
            return Recorded(tuple(min(longest, length) for length in tokens))
        case Fixed(tokens):
            return Fixed(min(longest, tokens))
        case _:
            return lengths


def mean_after_cut(median: float, sigma: float, longest: float) -> float:
    """Return E[min(X, longest)] of a log-normal X; ``median`` is of log X.

    E[X; X < c] = exp(m + s^2 / 2) Phi((ln c - m - s^2) / s), plus c P(X > c).
    """
    place = (math.log(longest) - median) / sigma
    below = math.exp(median + sigma**2 / 2) * _phi(place - sigma)
    return below + longest * (1 - _phi(place))


def _median_of(mean: float, sigma: float, longest: float) -> float:
    """Return the median of log X that gives this mean after the cut."""
    low, high = math.log(mean) - 20.0, math.log(longest) + 20.0
    for _ in range(100):
        middle = (low + high) / 2
        if mean_after_cut(middle, sigma, longest) < mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _phi(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of the sorted ``values`` are."""
    return values[min(len(values) - 1, int(share * len(values)))]
