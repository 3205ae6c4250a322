"""Pure: holds staleness near a target by starting fewer groups than the bound allows.

A throttle lowers what `admission.permits` would allow: the bound S to a bound in force S' <= S,
and the groups under way. A group first leased under S' falls due at w + S' for good. Every schedule
of throttles keeps the proof (docs/staleness.md#a-target-below-the-bound).

The controller moves one number, the groups under way L from G to the most that is allowed, and S' =
ceil(L / G) - 1 follows; with the most it is S. It compares a figure of the newest learner steps
with its target:

    above the target         L falls: where it is twice as high by half of what is over G, else by
                             G / 16 to G / 4
    below 0.7 of it          L rises by G / 8, if it kept a generator from starting a group; where
                             that was too much it returns to what it was
    between                  L stays

After a change it waits until groups that were started before are trained: S' + 2 learner steps, by
the larger S'. A raise that was too much is not tried again for 16 steps, then 32, and so on up to
256, so that the number does not swing.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, inf

from slipstream.broker.ledger.admission import StalenessBound

_RAISE_BELOW = 0.7  # share of the target
_FAR_ABOVE = 2.0
_WEIGHT = 0.5  # weight of the newest step in the mean
_TAIL = 0.05  # share of the tokens beyond a p95
_FIRST_PAUSE = 16  # learner steps until a number that was too high is tried again
_LONGEST_PAUSE = 256
_LEAST_SEEN = 2  # learner steps before a decision
_KEPT = 64  # changes


@dataclass(frozen=True, slots=True)
class StalenessTarget:
    """What is to be held; one of the two is set."""

    mismatch_kl: float | None = None  # nats a token, staleness/mismatch_kl
    p95_lag: int | None = None  # learner steps that 95% of the trained tokens do not pass

    @property
    def name(self) -> str:
        """Name of the figure."""
        return "mismatch_kl" if self.mismatch_kl is not None else "p95_lag"

    @property
    def value(self) -> float:
        """Value that is to be held."""
        value = self.mismatch_kl if self.mismatch_kl is not None else self.p95_lag
        return inf if value is None else float(value)

    def excess(self, staleness: Mapping[int, int], metrics: Mapping[str, float]) -> float | None:
        """Return how many times its target a learner step's figure is; None without a figure.

        Of a p95 it is the share of tokens beyond the target over the 5% that may be.
        """
        if self.mismatch_kl is not None:
            found = metrics.get("staleness/mismatch_kl")
            return None if found is None else max(0.0, found) / self.mismatch_kl
        tokens = sum(staleness.values())
        if not tokens or self.p95_lag is None:
            return None
        beyond = sum(count for lag, count in staleness.items() if lag > self.p95_lag)
        return beyond / tokens / _TAIL


@dataclass(frozen=True, slots=True)
class Throttle:
    """What is in force instead of what the bound allows."""

    bound: int  # S', learner steps
    in_flight: int  # L, groups
    step: int = 0  # learner steps completed when it began
    reason: str = ""

    def permits(
        self,
        bound: StalenessBound,
        *,
        learner_step: int,
        adopted_step: int,
        live: int,
        booked: Mapping[int, object],
    ) -> int:
        """Return how many groups may still start; at most what ``bound`` allows, in wait mode."""
        tighter = replace(bound, max_staleness_steps=min(self.bound, bound.max_staleness_steps))
        allowed = tighter.permits(
            learner_step=learner_step, adopted_step=adopted_step, live=live, booked=booked
        )
        return max(0, min(allowed, self.in_flight - live))


class StalenessController:
    """Decides a throttle after each learner step."""

    def __init__(
        self, target: StalenessTarget, bound: StalenessBound, *, max_in_flight: int
    ) -> None:
        """Begin with what the bound allows."""
        self.target = target
        self._size, self._bound = bound.groups_per_step, bound.max_staleness_steps
        allowed = (self._bound + 1) * self._size if bound.reserves else max_in_flight
        self._most = max(self._size, min(max_in_flight, allowed))
        self._mean: float | None = None
        self._num_seen = 0  # learner steps in it
        self._waits_until = 0  # learner step before which nothing changes
        self._most_now = self._most  # groups
        self._most_until = 0  # learner step
        self._pause = _FIRST_PAUSE
        self._raised_from: int | None = None  # groups; None if the newest change was a fall
        self.binds = False  # whether it kept a generator from a group since the last decision
        self.throttle = self._at(self._most, 0, "the bound allows this, and nothing was seen yet")
        self.changes: deque[Throttle] = deque(maxlen=_KEPT)  # the newest last

    @property
    def most_in_flight(self) -> int:
        """Groups under way that the settings allow."""
        return self._most

    @property
    def excess(self) -> float | None:
        """The figure over its target, mean of the newest steps."""
        return self._mean

    def went_back(self, step: int) -> None:
        """Keep what is in force for a learner that resumes from an earlier step."""
        self._waits_until = step + self._bound + 2  # batches of before are trained again
        self._most_until = min(self._most_until, step + self._pause)
        self._mean, self._num_seen = None, 0

    def observe(
        self, step: int, staleness: Mapping[int, int], metrics: Mapping[str, float]
    ) -> Throttle:
        """Return what is in force after a learner step.

        ``staleness`` are the step's tokens by staleness in learner steps.
        """
        excess = self.target.excess(staleness, metrics)
        if excess is None or step < self._waits_until:
            return self.throttle
        self._mean = excess if self._mean is None else _WEIGHT * excess + (1 - _WEIGHT) * self._mean
        self._num_seen += 1
        if self._num_seen < _LEAST_SEEN:
            return self.throttle
        wanted, now = self._wanted(self._mean, step), self.throttle.in_flight
        self.binds = False
        if wanted != now:
            self._change(wanted, step)
        return self.throttle

    def _change(self, wanted: int, step: int) -> None:
        before = self.throttle
        falls = wanted < before.in_flight
        if falls and self._raised_from is not None:  # nothing between is known to be better
            self._most_now, self._most_until = wanted, step + self._pause
            self._pause = min(_LONGEST_PAUSE, 2 * self._pause)
        elif falls:  # whatever is produced is older than it was
            self._pause = _FIRST_PAUSE
            self._most_now, self._most_until = before.in_flight - 1, step + self._pause
        self._raised_from = None if falls else before.in_flight
        verb = "above" if falls else "well below"
        change = f"{before.in_flight} -> {wanted} groups under way"
        self.throttle = self._at(wanted, step, f"{self._shown()} is {verb} its target: {change}")
        self._waits_until = step + max(before.bound, self.throttle.bound) + 2
        self._mean, self._num_seen = None, 0  # what follows is another regime's
        self.changes.append(self.throttle)

    def _wanted(self, excess: float, step: int) -> int:
        now, size = self.throttle.in_flight, self._size
        if excess > 1.0:
            if self._raised_from is not None:
                return self._raised_from
            part = ceil(size * min(0.25, max(0.0625, 0.25 * (excess - 1.0))))
            halved = (now + size) // 2 if excess > _FAR_ABOVE else now
            return max(size, min(now - part, halved))
        if excess < _RAISE_BELOW and self.binds:
            most = self._most if step >= self._most_until else self._most_now
            return max(now, min(most, now + ceil(size / 8)))
        return now

    def _shown(self) -> str:
        mean = self._mean or 0.0
        if self.target.mismatch_kl is not None:
            return f"mismatch_kl {mean * self.target.value:.3g} (target {self.target.value:g})"
        return (
            f"{mean * _TAIL:.1%} of tokens older than p95_lag = {self.target.value:g} (5% may be)"
        )

    def _at(self, in_flight: int, step: int, reason: str) -> Throttle:
        bound = ceil(in_flight / self._size) - 1
        if in_flight >= self._most:
            bound = self._bound
        return Throttle(min(bound, self._bound), in_flight, step, reason)
