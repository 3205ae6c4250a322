"""Number of sequences in an engine: additive increase, multiplicative decrease.

More of them use an accelerator better, until their keys and values no longer fit. Then the engine
retracts some (it gives up their keys and values, and computes them again later), which is work
done twice. How many fit depends on how long answers become, so it is found out while they are
generated, as TCP probes a path's capacity: increase by a little while there is room, decrease
to a part when something was lost (Chiu and Jain, 1989; Jacobson, 1988).

Units: limits are sequences. ``kv_use`` is the share of the cache, 0 to 1, that sequences under way
hold; prefixes of sleeping trajectories count in ``live_tokens``.
"""

from dataclasses import dataclass, replace
from typing import Literal

GROW_BELOW = 0.6  # share of the cache; below it more sequences fit
TRIM_FROM = 0.8  # share of the cache; from here on sequences that grow may fill it
_CUT_TO = 0.75  # share of the number in flight that remains after a retraction

Verdict = Literal["hold", "grow", "trim", "cut"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The limits to choose from."""

    lowest: int  # one group must always fit, or nothing would be generated
    highest: int  # generators.max_sequences
    step: int  # sequences of a group, which start together

    def clamp(self, limit: int) -> int:
        """Return the nearest limit within the range."""
        return max(self.lowest, min(self.highest, limit))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineObservation:
    """An engine and the work that it has, at one moment."""

    in_flight: int  # sequences that the engine has and has not answered
    num_finished: int  # since the start
    kv_use: float  # share that running sequences hold
    num_running: int  # sequences being generated; others are being sent or wait in the engine
    num_waiting: int
    num_retractions: int  # sequences given up for lack of memory since the start


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """The last decision, and the history that the next one needs."""

    limit: int  # sequences that may be in flight
    verdict: Verdict = "hold"
    is_starting: bool = True  # nothing was trimmed or cut yet: the limit may double
    num_finished: int = 0  # when the limit was changed last
    num_retractions: int = 0  # retractions taken into account


def first_limit(within: Range, *, capacity_tokens: int, longest_tokens: int) -> int:
    """Return the first limit: as many sequences as fit at their greatest length.

    Whole groups, so that no lane of the first ones is left over. ``longest_tokens`` is the most
    that a prompt and its response take.
    """
    fitting = capacity_tokens // longest_tokens
    return within.clamp(fitting if fitting >= within.highest else fitting - fitting % within.step)


def decide(state: Concurrency, seen: EngineObservation, within: Range) -> Concurrency:
    """Return the next state.

    A lowered limit takes effect when sequences end, since none is taken back. Until then nothing
    more is decided: the load still shows the old limit, and a burst of retractions is one loss.
    """
    retracted = seen.num_retractions > state.num_retractions
    state = replace(state, verdict="hold", num_retractions=seen.num_retractions)
    if seen.in_flight > state.limit:
        return state
    if retracted:
        return _lowered(state, seen, within, "cut", int(_CUT_TO * seen.in_flight))
    if seen.kv_use >= TRIM_FROM:
        return _lowered(state, seen, within, "trim", seen.in_flight - within.step)
    if _may_grow(state, seen, within):
        limit = state.limit + within.step
        if state.is_starting:  # doubles, if as many fit at current lengths
            doubled = 2 * state.limit
            if _use_of(doubled, seen) > GROW_BELOW:
                doubled = int(GROW_BELOW / seen.kv_use * seen.num_running)
            limit = max(limit, doubled)
        limit = within.clamp(limit)
        return replace(state, limit=limit, verdict="grow", num_finished=seen.num_finished)
    return state


def _lowered(
    state: Concurrency, seen: EngineObservation, within: Range, verdict: Verdict, limit: int
) -> Concurrency:
    return replace(
        state,
        limit=within.clamp(limit),
        verdict=verdict,
        is_starting=False,
        num_finished=seen.num_finished,
    )


def _may_grow(state: Concurrency, seen: EngineObservation, within: Range) -> bool:
    """True if there is room, and more lanes would be used.

    After the start phase the limit grows once per turnover of all lanes: only then does the share
    of the cache show the effect of the last increase.
    """
    if seen.kv_use >= GROW_BELOW or state.limit >= within.highest:
        return False
    if seen.num_waiting or not seen.num_running:
        return False  # more would wait, too; or the size of a sequence is unknown
    if seen.in_flight + within.step <= state.limit:
        return False  # another group would have fit: it is not the limit that holds back work
    if state.is_starting:
        return True
    is_turned_over = seen.num_finished - state.num_finished >= state.limit
    return is_turned_over and _use_of(state.limit + within.step, seen) < TRIM_FROM


def _use_of(limit: int, seen: EngineObservation) -> float:
    """Return the share of the cache that ``limit`` sequences would hold."""
    return seen.kv_use * limit / seen.num_running
