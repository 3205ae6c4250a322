"""Simulates a run unchanged, and with one change at a time."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec

from slipstream.deploy.predict.advise.fit import Fit, fit, scenario_of_record, warm_steps
from slipstream.deploy.predict.advise.record import Record
from slipstream.deploy.predict.simulate.outcome import SimulatedRun
from slipstream.deploy.predict.simulate.scenario import Scenario
from slipstream.deploy.predict.simulate.world import simulate
from slipstream.wire.errors import ConfigError

TRUSTED = 0.15  # largest share by which the simulated unchanged run may miss the measured one
_EVERY = (2, 4)  # learner steps between two publishes
_NOTABLE = 0.02
_BY_HAND = "slipstream scale, start-generator"  # commands for generators beyond the settings file
OnChange = Callable[[str], None]


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """One change and its expected effect."""

    change: str  # "one more generator"
    setting: str  # setting that makes the change; empty if no setting does
    step_s: tuple[float, float]  # from, to; equal if the run determines the law
    gain: tuple[float, float]  # additional steps per hour, as a share; from, to
    learner_waits: float  # share of its time
    mean_staleness: float
    p95_staleness: int


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """Advice from a run's own figures; everything but ``measured_s`` is predicted."""

    run: str
    num_steps: int  # learner steps of the fit
    measured_s: float  # mean of a learner step
    simulated_s: tuple[float, float]  # the same, by the laws
    now: Expected
    changes: list[Expected]
    sentence: str
    laws: list[str]
    cautions: list[str]


def advise(record: Record, on_change: OnChange = lambda _change: None) -> Advice:
    """Return the expected effects of changes; ``on_change`` is called before each.

    Seconds of a change are simulated, then scaled by measured over simulated seconds of the
    unchanged run.

    Raises:
        ConfigError: the run's figures contradict each other.
    """
    found = fit(record)
    scenarios = [scenario_of_record(record, found, law) for law in found.engines]
    warm = warm_steps(record)
    on_change("as it is")
    before = [_simulated(scenario) for scenario in scenarios]
    before_s = [outcome.mean_step_s(warm) for outcome in before]
    now = _expected("as it is", "", record.step_s, before_s, before, warm)
    changes = []
    for change, setting, fields in _variants(record, scenarios[0]):
        on_change(change)
        outcomes = [_simulated(replace(scenario, **fields)) for scenario in scenarios]
        changes.append(_expected(change, setting, record.step_s, before_s, outcomes, warm))
    simulated = (min(before_s), max(before_s))
    return Advice(
        run=record.run,
        num_steps=len(record.wait_s) * record.every_steps,
        measured_s=record.step_s,
        simulated_s=simulated,
        now=now,
        changes=changes,
        sentence=_sentence(changes, shares_cores=record.shared_cores > 0),
        laws=list(_laws(record, found)),
        cautions=list(_cautions(record, found, simulated)),
    )


def _simulated(scenario: Scenario) -> SimulatedRun:
    try:
        return simulate(scenario)
    except RuntimeError as error:
        raise ConfigError(f"the simulation of this run stands still: {error}") from error


def _variants(record: Record, scenario: Scenario) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield one change at a time: its name, its setting, the scenario's new fields."""
    engines, bound = scenario.engines, scenario.max_staleness_steps
    for number in (engines - 1, engines + 1):
        if number >= 1:
            change = f"one {'more' if number > engines else 'fewer'} generator ({number} in all)"
            setting = f"generators.count = {number}" if record.count == engines else _BY_HAND
            yield change, setting, {"engines": number}
    for steps in (bound - 1, bound + 1):
        if steps >= 0 and (record.p95_lag is None or steps > record.p95_lag):
            mode = 'run.mode = "async", ' if record.mode == "sync" else ""
            setting = f"{mode}run.max_staleness_steps = {steps}"
            yield f"a bound of {steps}", setting, {"max_staleness_steps": steps}
    for every in _EVERY:
        # a target may push the bound in force below what rarer publishes need
        if every <= bound + 1 and record.p95_lag is None:
            yield f"a publish every {every} steps", "", {"publish_every": every}


def _expected(
    change: str,
    setting: str,
    measured_s: float,
    before_s: list[float],
    outcomes: list[SimulatedRun],
    warm: int,
) -> Expected:
    factors = [
        outcome.mean_step_s(warm) / base_s
        for outcome, base_s in zip(outcomes, before_s, strict=True)
    ]
    number = len(outcomes)
    return Expected(
        change=change,
        setting=setting,
        step_s=(measured_s * min(factors), measured_s * max(factors)),
        gain=(1 / max(factors) - 1, 1 / min(factors) - 1),
        learner_waits=sum(outcome.waited_share(warm) for outcome in outcomes) / number,
        mean_staleness=sum(outcome.mean_staleness(warm) for outcome in outcomes) / number,
        p95_staleness=max(outcome.p95_staleness(warm) for outcome in outcomes),
    )


def _sentence(changes: list[Expected], *, shares_cores: bool) -> str:
    possible = [
        change
        for change in changes
        if change.setting and not (shares_cores and change.change.startswith("one more"))
    ]
    best = max(possible, key=lambda one: one.gain[0], default=None)
    if best is None or best.gain[0] < _NOTABLE:
        text = "none of these changes makes the run notably faster"
    else:
        text = f"{best.change} makes it {span(best.gain, '{:.0%}')} faster"
    fewer = next((change for change in changes if change.change.startswith("one fewer")), None)
    if fewer is not None and fewer.gain[0] > -_NOTABLE:
        text += f"; {fewer.change} costs next to nothing"
    return text


def span(values: tuple[float, float], form: str) -> str:
    """Return one number, or two if they differ when printed."""
    low, high = form.format(values[0]), form.format(values[1])
    return low if low == high else f"{low} to {high}"


def _laws(record: Record, found: Fit) -> Iterator[str]:
    laws = " or ".join(
        f"{1e3 * law.base_s:.2f} ms + {1e3 * law.sequence_s:.3f} ms a sequence"
        for law in found.engines
    )
    yield (
        f"a decode step: {laws}; engines computed {found.sequences:.0f} sequences at a time, "
        f"deviation {found.deviation:.0f}"
    )
    yield (
        f"a learner step: {found.learner.step_s:.2f} s + {1e6 * found.learner.token_s:.1f} s for "
        f"10^6 tokens, with {sum(record.tokens) / len(record.tokens):,.0f} of them"
    )
    yield (
        f"a publish: {record.stall_s:.2f} s of the learner, {record.transfer_s:.2f} s under way, "
        f"{record.pause_s:.2f} s of each engine"
    )
    yield f"a reward: {record.score_s:.2f} s; {record.useless_share:.0%} of the groups of no use"


def _cautions(record: Record, found: Fit, simulated: tuple[float, float]) -> Iterator[str]:
    misses = max(abs(seconds / record.step_s - 1) for seconds in simulated)
    if misses > TRUSTED:
        yield (
            f"as it is, the run takes {record.step_s:.2f} s a step and its simulation "
            f"{span(simulated, '{:.2f}')} s: what is said of changes is worth little"
        )
    if len(found.engines) > 1:
        yield (
            "engines have always computed about as many sequences, so that it is not known how "
            "their pace depends on it: figures are a range"
        )
    if record.shared_cores:
        yield (
            f"all processes share {record.shared_cores} CPU cores: one more generator slows down "
            "the others, which is not simulated"
        )
    yield from record.notes
