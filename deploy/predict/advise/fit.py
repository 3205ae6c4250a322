"""Pure: the laws that fit a run's own figures, and its scenario."""

import math
from dataclasses import dataclass
from statistics import fmean

from slipstream.broker.ledger.throttle import StalenessTarget
from slipstream.deploy.predict.advise.record import Record
from slipstream.deploy.predict.laws.engine_law import EngineLaw
from slipstream.deploy.predict.laws.learner_law import LearnerLaw, PublishLaw
from slipstream.deploy.predict.simulate.lengths import Fixed, Lengths, Recorded
from slipstream.deploy.predict.simulate.scenario import Scenario
from slipstream.wire.errors import ConfigError

_TOLD_APART = 0.1  # least deviation of the sequences over their mean that determines a slope
_DRAWN = 1_000  # lengths drawn for a distribution
_MOST_TRAJECTORIES = 8_000  # a simulation of a quarter of a second
_MEASURED = (8, 240)  # least and most learner steps, after those in which the run fills
_TOO_MANY = 4_000_000  # trajectories of a simulation: minutes


@dataclass(frozen=True, slots=True)
class Fit:
    """Laws of a run. Several engine laws: the run does not determine which holds."""

    engines: tuple[EngineLaw, ...]
    learner: LearnerLaw
    sequences: float  # sequences that an engine computes at a time, mean by token
    deviation: float  # standard deviation of the sequences


def fit(record: Record) -> Fit:
    """Return the laws of a run.

    A decode step of n sequences takes base + n m seconds: a line through the seconds per token of
    answers, weighted by tokens. A learner step takes fixed + tokens x slope.
    """
    pace = record.pace
    mean = pace.sequences / pace.tokens
    variance = max(0.0, pace.squares / pace.tokens - mean**2)
    per_token = pace.seconds / pace.tokens
    laws: tuple[EngineLaw, ...]
    if variance >= (_TOLD_APART * mean) ** 2:
        covariance = pace.sequence_seconds / pace.tokens - mean * per_token
        base_s, slope = _line(mean, per_token, covariance, variance)
        laws = (EngineLaw(base_s=base_s, sequence_s=slope),)
    else:
        laws = (EngineLaw(base_s=per_token), EngineLaw(sequence_s=per_token / mean))
    return Fit(laws, _learner(record), mean, math.sqrt(variance))


def _learner(record: Record) -> LearnerLaw:
    """Return a line through the steps, with no part below 0; the stall belongs to the publish."""
    seconds = [max(0.0, active - record.stall_s) for active in record.active_s]
    mean_s, mean_tokens = fmean(seconds), fmean(record.tokens)
    pairs = zip(record.tokens, seconds, strict=True)
    covariance = fmean((tokens - mean_tokens) * (s - mean_s) for tokens, s in pairs)
    variance = fmean((tokens - mean_tokens) ** 2 for tokens in record.tokens)
    base_s, slope = _line(mean_tokens, mean_s, covariance, variance)
    return LearnerLaw(step_s=base_s, token_s=slope)


def _line(mean_x: float, mean_y: float, covariance: float, variance: float) -> tuple[float, float]:
    """Return base and slope of the least-squares line, both >= 0."""
    if not variance or not mean_x:
        return mean_y, 0.0
    slope = min(max(0.0, covariance / variance), mean_y / mean_x)
    return max(0.0, mean_y - slope * mean_x), slope


def scenario_of_record(record: Record, found: Fit, law: EngineLaw) -> Scenario:
    """Return the scenario of the run as it was.

    Raises:
        ConfigError: the run's figures contradict each other.
    """
    useless = min(record.useless_share, 0.95) if record.group_size > 1 else 0.0
    a_step = record.groups_per_step * record.group_size / (1 - useless)
    least, most = _MEASURED
    steps = warm_steps(record) + max(least, min(most, round(_MOST_TRAJECTORIES / a_step)))
    if steps * a_step > _TOO_MANY:
        raise ConfigError(
            f"a step of {a_step:,.0f} trajectories (run.groups_per_step x run.group_size, useless "
            "ones included) is too large to be simulated in minutes"
        )
    return Scenario(
        steps=steps,
        groups_per_step=record.groups_per_step,
        group_size=record.group_size,
        max_staleness_steps=record.max_staleness_steps,
        max_in_flight=record.max_in_flight,
        siblings_together=record.siblings_together,
        staleness_mode="drop" if record.staleness_mode == "drop" else "wait",
        prefetch=record.prefetch,
        engines=record.engines,
        max_sequences=record.max_sequences,
        engine=law,
        learner=found.learner,
        publish=PublishLaw(
            stall_s=record.stall_s, transfer_s=record.transfer_s, pause_s=record.pause_s
        ),
        lengths=lengths_of(record),
        prompt_tokens=round(record.prompt_tokens),
        score_s=record.score_s,
        useless_share=useless,
        target=None if record.p95_lag is None else StalenessTarget(p95_lag=record.p95_lag),
    )


def warm_steps(record: Record) -> int:
    """Return the learner steps in which a run fills, even if its bound is one step larger."""
    return 2 * (record.max_staleness_steps + 2) + 2


def lengths_of(record: Record) -> Lengths:
    """Return the lengths of a run's answers: its histogram, scaled to its reported mean."""
    counts = {int(upper): count for upper, count in record.lengths.items() if count > 0}
    if record.mean_tokens < 1:
        raise ConfigError(f"answers of {record.mean_tokens:g} tokens on average: expected >= 1")
    if not counts:
        return Fixed(max(1, round(record.mean_tokens)))
    total, lower = sum(counts.values()), 0
    drawn: list[float] = []
    for upper in sorted(counts):
        number = max(1, round(_DRAWN * counts[upper] / total))
        part = (upper - lower) / number
        drawn += [lower + (place + 0.5) * part for place in range(number)]
        lower = upper
    factor = record.mean_tokens / fmean(drawn)
    return Recorded(tuple(max(1, round(factor * length)) for length in drawn))
