"""Pure: a split of GPUs between learner and generators, with its bound and groups in flight.

A closed form: a function from a split to its rates. Letters:

    G, S   groups of a step, staleness bound
    A      seconds of a learner step, and of copying its weights out for a publish
    B      seconds in which all engines generate a step's answers, and are paused for a publish
    Z      seconds of the longest answer, and until its engine has the weights

    step   A + B' + Z'            with S = 0, where nothing overlaps: the longer of B and Z counts
           max(A, B, (A + Z) / (S + 1))    with S >= 1: version w exists once step w - 1 has begun
                                           and A passed, and an answer begun with it is trained
                                           at w + S
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from slipstream.deploy.predict.laws.engine_law import EngineLaw
from slipstream.deploy.predict.laws.publish_cost import Cost
from slipstream.deploy.predict.size.engines import EngineSize
from slipstream.deploy.predict.size.proposals import Proposal

_AS_GOOD = 0.99  # share of the most steps per hour at which the smaller bound wins


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """GPUs of the learner, number of engines, and a bound."""

    learner: Proposal
    engines: int
    engine: EngineSize
    bound: int  # S

    @property
    def generator_gpus(self) -> int:
        """GPUs of all engines."""
        return self.engines * self.engine.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRates:
    """Rates of both pools with a split, in seconds."""

    learner_s: float  # learner step, including the copy of its weights
    generate_s: float  # a step's answers on all engines, including their pause
    longest_s: float  # longest answer
    mean_s: float  # answer of mean length
    receive_s: float  # time until the last engine has new weights
    sequences: float  # sequences that an engine generates at a time


RatesLaw = Callable[[Split], PoolRates]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Needs of a step from the generators."""

    groups: int
    group_size: int
    prompt_tokens: float  # mean
    response_tokens: float  # mean
    longest_response: int
    max_sequences: int  # limit of one engine

    @property
    def sequences(self) -> int:
        """Answers of a step."""
        return self.groups * self.group_size


def closed_form(
    demand: Demand, law: Callable[[EngineSize], EngineLaw], publish: Callable[[Split], Cost]
) -> RatesLaw:
    """Return the law of rates stated in this file."""

    def rates(split: Split) -> PoolRates:
        cost, engine = publish(split), law(split.engine)
        context = demand.prompt_tokens + demand.response_tokens / 2
        allowed = (split.bound + 1) * demand.sequences / split.engines
        cached = split.engine.cached_tokens / context
        at_a_time = max(1.0, min(allowed, demand.max_sequences, cached))
        token_s = engine.step_s(at_a_time, at_a_time * context)
        share = demand.sequences / split.engines
        prompts = share / demand.group_size * demand.prompt_tokens * engine.prefill_s
        generate = share * demand.response_tokens * token_s / at_a_time + prompts
        return PoolRates(
            learner_s=split.learner.step_s + cost.stall_s,
            generate_s=generate + cost.pause_s,
            longest_s=demand.longest_response * token_s,
            mean_s=demand.response_tokens * token_s,
            receive_s=cost.arrival_s,
            sequences=at_a_time,
        )

    return rates


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitForecast:
    """Expected outcome of a split."""

    split: Split
    rates: PoolRates
    step_s: float
    in_flight: int  # groups: broker.max_in_flight

    @property
    def steps_per_hour(self) -> float:
        """Learner steps in an hour."""
        return 3600 / self.step_s

    @property
    def busiest_s(self) -> float:
        """Seconds of a step in which the pool with more to do is busy."""
        return max(self.rates.learner_s, self.rates.generate_s)

    @property
    def limit(self) -> str:
        """Limiting part of the step."""
        rates, bound = self.rates, self.split.bound
        if not bound:
            return "all in turn"
        seconds = {
            "learner": rates.learner_s,
            "generators": rates.generate_s,
            "longest": _longest_s(rates, bound),
        }
        return max(seconds, key=lambda name: seconds[name])


def _longest_s(rates: PoolRates, bound: int) -> float:
    """Return the seconds of a step in which the longest answer can be trained in time."""
    return (rates.learner_s + rates.longest_s + rates.receive_s) / (bound + 1)


def outcome(split: Split, rates: PoolRates, groups: int) -> SplitForecast:
    """Return the seconds of a step, and the groups in flight that it needs."""
    if split.bound:
        step_s = max(rates.learner_s, rates.generate_s, _longest_s(rates, split.bound))
    else:
        step_s = rates.learner_s + max(rates.generate_s, rates.longest_s) + rates.receive_s
    # Little: groups in generation are its share of a step; G more are trained or ready
    needed = math.ceil(groups * (1 + max(rates.mean_s, rates.generate_s) / step_s))
    most = (split.bound + 1) * groups
    return SplitForecast(split=split, rates=rates, step_s=step_s, in_flight=min(needed, most))


def best_splits(splits: Iterable[Split], rates: RatesLaw, groups: int) -> list[SplitForecast]:
    """Return the best outcome for each number of the learner's GPUs, fastest first.

    Among outcomes about as fast, the smallest bound wins, then the smallest engines. Among
    numbers of GPUs about as fast as the fastest, the first is the one with the most spare time in
    both pools.
    """
    by_learner: dict[int, list[SplitForecast]] = {}
    for split in splits:
        by_learner.setdefault(split.learner.gpus, []).append(outcome(split, rates(split), groups))
    best = []
    for outcomes in by_learner.values():
        enough = _about_as_fast(outcomes)
        best.append(min(enough, key=lambda one: (one.split.bound, one.split.engine.ranks)))
    fastest = sorted(_about_as_fast(best), key=lambda one: one.busiest_s)
    others = [outcome for outcome in best if outcome not in fastest]
    return fastest + sorted(others, key=lambda one: one.step_s)


def _about_as_fast(found: Sequence[SplitForecast]) -> list[SplitForecast]:
    """Return the outcomes that are about as fast as the fastest."""
    fastest = min(outcome.step_s for outcome in found)
    return [outcome for outcome in found if outcome.step_s * _AS_GOOD <= fastest]
