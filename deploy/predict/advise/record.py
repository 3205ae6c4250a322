"""A run's own records, as far as laws are fitted to them."""

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from operator import add
from pathlib import Path
from statistics import fmean, median

import msgspec

from slipstream.broker.config import BrokerSection
from slipstream.broker.history.columns import StepColumns, StoredState, TimeColumns, read_state
from slipstream.deploy.config import DeploySection
from slipstream.generators.config import GeneratorsSection
from slipstream.learner.config import LearnerSection
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import PAGE_STATE, SETTINGS
from slipstream.wire.messages.status import GONE_S, Pace, RoleStatus
from slipstream.wire.messages.weightbus import PublishRecord
from slipstream.wire.process.phases import PHASE_TIME, WAIT
from slipstream.wire.settings.load import Table, load_table, section
from slipstream.wire.settings.sections import EnvironmentSection, EvalSection, RunSection

MOST_STEPS = 200  # only the newest: a run's answers change while it learns
FEWEST_STEPS = 4
_WAIT = PHASE_TIME + WAIT
_EXPORT = PHASE_TIME + "export"
_PAUSED = ("pause", "load", "verify", "commit")  # phases of a publish in which an engine pauses
_NEEDED = (PHASE_TIME + WAIT, "throughput/tokens_per_s", "response/tokens")
_QUEUED = ("queue:waiting_for_reward", "queue:being_scored")
_USELESS = "zero_variance"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A run's settings and figures; seconds are the clock's, lists are by learner step."""

    run: str
    mode: str = "async"  # run.mode
    count: int = 0  # generators.count
    groups_per_step: int
    group_size: int
    max_staleness_steps: int
    max_in_flight: int | None  # None: as many groups as the bound allows
    staleness_mode: str
    siblings_together: bool
    prefetch: bool
    engines: int
    max_sequences: int  # newest limit of an engine
    wait_s: list[float]
    active_s: list[float]  # seconds of a step without the wait for its batch
    tokens: list[float]  # tokens of a batch, prompts included
    prompt_tokens: float
    mean_tokens: float  # mean of a response
    lengths: dict[str, int]  # up to so many response tokens -> answers
    pace: Pace  # sum over all engines
    stall_s: float  # learner's pause for a publish
    transfer_s: float  # until the slowest engine runs a version
    pause_s: float  # engine's pause for a publish
    score_s: float  # from an answer to its reward
    useless_share: float  # share of groups
    p95_lag: int | None = None  # run.staleness_target, in learner steps
    every_steps: int = 1  # learner steps that each list item averages
    shared_cores: int = 0  # cores shared by all processes; 0 if not shared or unknown
    notes: list[str] = []  # features of the run that are not simulated

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return fmean(self.wait_s) + fmean(self.active_s)


def record_of(folder: Path) -> Record:
    """Return the records of a run that is under way or has ended.

    Raises:
        ConfigError: the run recorded too little.
    """
    table = load_table(folder / SETTINGS, [])
    state = read_state(folder / PAGE_STATE)
    if state is None:
        raise ConfigError(
            f"{folder} has no {PAGE_STATE} that can be read: the broker writes it every few seconds"
        )
    return record_of_state(table, state)


def record_of_state(table: Table, state: StoredState) -> Record:
    """Return the records in a run's state; its settings may come from another host.

    Raises:
        ConfigError: the state holds too little.
    """
    status, run = state.status, section(table, "run", RunSection)
    generators = section(table, "generators", GeneratorsSection)
    if section(table, "environment", EnvironmentSection).is_named:
        text = "has an environment (environment.function): what environments take is not simulated"
        raise ConfigError(f"{status.run_name} {text}")
    roles = _generators(status.roles, is_over=status.outcome != "running")
    if not (paces := [role.pace for role in roles if role.pace is not None]):
        raise ConfigError(
            f"no generator of {status.run_name} has reported how fast its engine is: none has "
            "answered yet, or an earlier version recorded it"
        )
    steps, note = _steady_steps(state, youngest_s=min(role.age_s for role in roles))
    phases = [_phases(step) for step in steps]
    wait_s = [phase.get(_WAIT, 0.0) for phase in phases]
    step_s = [sum(phase.values()) for phase in phases]
    tokens = [
        step["throughput/tokens_per_s"] * seconds
        for step, seconds in zip(steps, step_s, strict=True)
    ]
    trajectories = status.groups_per_step * status.group_size
    mean_tokens = fmean(step["response/tokens"] for step in steps)
    pause_s = _pause_s(status.publish_history)
    return Record(
        run=status.run_name,
        mode=run.mode,
        count=generators.count,
        groups_per_step=status.groups_per_step,
        group_size=status.group_size,
        max_staleness_steps=status.max_staleness_steps,
        max_in_flight=section(table, "broker", BrokerSection).max_in_flight,
        staleness_mode=run.staleness_mode,
        siblings_together=generators.siblings_together,
        prefetch=section(table, "learner", LearnerSection).prefetch,
        engines=len(roles),
        max_sequences=_lanes(roles, most=generators.max_sequences, least=status.group_size),
        wait_s=wait_s,
        active_s=[all_s - waited for all_s, waited in zip(step_s, wait_s, strict=True)],
        tokens=tokens,
        prompt_tokens=max(1.0, fmean(tokens) / trajectories - mean_tokens),
        mean_tokens=mean_tokens,
        lengths=status.survivorship.lengths,
        pace=reduce(add, paces),
        stall_s=fmean(phase.get(_EXPORT, 0.0) for phase in phases),
        transfer_s=max(0.0, _transfer_s(status.publish_history) - pause_s),
        pause_s=pause_s,
        score_s=_score_s(state.history.time),
        useless_share=_useless_share(status.dropped, status.trained),
        p95_lag=run.staleness_target.p95_lag,
        every_steps=state.history.steps.every_steps,
        shared_cores=state.history.shared_cores,
        notes=[*_notes(table, run), *note],
    )


def _steady_steps(
    state: StoredState, *, youngest_s: float
) -> tuple[list[dict[str, float]], list[str]]:
    """Return steps trained with the present generators if there are enough, and a note if not.

    Args:
        state: State of the run.
        youngest_s: Age of the youngest generator.

    Raises:
        ConfigError: There are too few steps.
    """
    status = state.status
    warm = status.max_staleness_steps + 2
    steps = _steps(state.history.steps, warm=warm)
    if len(steps) < FEWEST_STEPS:
        raise ConfigError(
            f"{status.run_name} has {status.steps} learner steps: expected at least "
            f"{FEWEST_STEPS} after the first {warm}, in which it fills"
        )
    late = [step for step in steps if step["at_s"] > status.elapsed_s - youngest_s]
    if len(late) >= FEWEST_STEPS:
        return late, []
    note = (
        f"a generator began {youngest_s:,.0f} s ago, when most of the steps were trained already: "
        "they are of another number of generators"
    )
    return steps, [] if late == steps else [note]


def _notes(table: Table, run: RunSection) -> Iterator[str]:
    """Yield the features of a run that are not simulated."""
    if run.staleness_target.mismatch_kl is not None:
        yield (
            "run.staleness_target.mismatch_kl holds back what is under way, which is not simulated"
        )
    if section(table, "deploy", DeploySection).share_gpus:
        yield (
            "deploy.share_gpus: learner and engines take turns on the GPUs, which is not simulated"
        )
    if section(table, "eval", EvalSection).enabled:
        yield "evaluations take time of engines and of the learner: it counts to all steps alike"


def _generators(roles: Sequence[RoleStatus], *, is_over: bool) -> list[RoleStatus]:
    """Return the generators that run, or ran at the end."""
    found = [role for role in roles if role.role == "generator" and (is_over or not role.has_left)]
    newest_s = min((role.silent_s for role in found), default=0.0)
    return [role for role in found if role.silent_s <= newest_s + GONE_S]


def _lanes(roles: Sequence[RoleStatus], *, most: int, least: int) -> int:
    limits = [role.sequence_limit for role in roles if role.sequence_limit]
    return max(least, round(fmean(limits))) if limits else most


def _steps(columns: StepColumns, *, warm: int) -> list[dict[str, float]]:
    """Return the newest rows that have all needed values, with their ``at_s``."""
    found: list[dict[str, float]] = []
    for place, step in enumerate(columns.step):
        if step <= warm:
            continue
        row = {name: series[place] for name, series in columns.series.items()}
        known = {name: float(value) for name, value in row.items() if value is not None}
        if all(name in known for name in _NEEDED):
            found.append({**known, "at_s": columns.at_s[place]})
    return found[-MOST_STEPS:]


def _phases(step: Mapping[str, float]) -> dict[str, float]:
    return {name: seconds for name, seconds in step.items() if name.startswith(PHASE_TIME)}


def _transfer_s(publishes: Sequence[PublishRecord]) -> float:
    """Return the median time from the offer to the slowest engine's commit."""
    seconds = [max(publish.adopted_by.values()) for publish in publishes if publish.adopted_by]
    return median(seconds) if seconds else 0.0


def _pause_s(publishes: Sequence[PublishRecord]) -> float:
    """Return the median pause of the slowest engine."""
    phases = [publish.phase_seconds for publish in publishes if publish.adopted_by]
    return median([sum(p.get(name, 0.0) for name in _PAUSED) for p in phases]) if phases else 0.0


def _score_s(time: TimeColumns) -> float:
    """Return the mean time to a reward: waiting answers over their rate (Little)."""
    queued, answered = 0.0, 0.0  # trajectories x seconds, trajectories
    names = ("answers", *_QUEUED)
    if not time.series.keys() >= set(names):
        return 0.0
    rows = zip(time.at_s, *(time.series[name] for name in names), strict=True)
    for (before_s, before, *_), (at_s, answers, *waiting) in pairwise(rows):
        if before is None or answers is None or answers < before:
            continue  # a generator restarted, or the time was not recorded
        queued += sum(value or 0.0 for value in waiting) * (at_s - before_s)
        answered += answers - before
    return queued / answered if answered else 0.0


def _useless_share(dropped: Mapping[str, int], trained: int) -> float:
    useless = dropped.get(_USELESS, 0)
    return useless / (useless + trained) if useless else 0.0
