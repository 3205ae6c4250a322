"""What a run recorded of itself, as far as laws are fitted on it."""

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from statistics import fmean, median

import msgspec

from slipstream.broker.dashboard.columns import StepColumns, StoredState, TimeColumns, read_state
from slipstream.deploy.config import RunConfig, run_config
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import PAGE_STATE, SETTINGS
from slipstream.wire.messages.status import GONE_S, Pace, RoleStatus
from slipstream.wire.process.phases import PHASE_TIME, WAIT
from slipstream.wire.settings.load import load_table

MOST_STEPS = 200  # the newest: a run's answers change while it learns
FEWEST_STEPS = 4
_WAIT = PHASE_TIME + WAIT
_EXPORT = PHASE_TIME + "export"
_QUEUED = ("queue:waiting_for_reward", "queue:being_scored")
_USELESS = "zero_variance"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A run's settings and figures; seconds are the clock's, lists are by learner step."""

    run: str
    groups_per_step: int
    group_size: int
    max_staleness_steps: int
    max_in_flight: int | None  # None: as many groups as the bound allows
    staleness_mode: str
    siblings_together: bool
    prefetch: bool
    engines: int
    max_sequences: int  # of an engine, as it was given them lately
    wait_s: list[float]
    active_s: list[float]  # of a step, all but waiting for its batch
    tokens: list[float]  # of a batch, prompts included
    prompt_tokens: float
    mean_tokens: float  # of a response
    lengths: dict[str, int]  # up to so many response tokens -> answers
    pace: Pace  # of all engines
    stall_s: float  # of the learner, for a publish
    transfer_s: float  # until the slowest engine runs a version
    pause_s: float  # for which an engine stands still, of a publish
    score_s: float  # from an answer to its reward
    useless_share: float  # of groups
    mean_turns: float = 1.0
    shared_cores: int = 0  # that all processes share; 0: they do not, or it is unknown

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return fmean(self.wait_s) + fmean(self.active_s)


def record_of(folder: Path) -> Record:
    """Return what a run under way, or one that has ended, recorded.

    Raises:
        ConfigError: it recorded too little.
    """
    config = run_config(load_table(folder / SETTINGS, []))
    state = read_state(folder / PAGE_STATE)
    if state is None:
        raise ConfigError(
            f"{folder} has no {PAGE_STATE} that can be read: the broker writes it every few seconds"
        )
    return record_of_state(config, state)


def record_of_state(config: RunConfig, state: StoredState) -> Record:
    """Return what a run's state says, with its settings.

    Raises:
        ConfigError: it says too little.
    """
    status, generators = state.status, config.generators.generators
    roles = _generators(status.roles)
    if not (paces := [role.pace for role in roles if role.pace is not None]):
        raise ConfigError(
            f"no generator of {status.run_name} has reported how fast its engine is: none has "
            "answered yet, its trajectories have several turns, or an earlier version recorded it"
        )
    steps = _steps(state.history.steps, warm=status.max_staleness_steps + 2)
    if len(steps) < FEWEST_STEPS:
        raise ConfigError(
            f"{status.run_name} has {status.steps} learner steps: expected at least "
            f"{FEWEST_STEPS} after the first {status.max_staleness_steps + 2}, in which it fills"
        )
    phases = [_phases(step) for step in steps]
    wait_s = [phase.get(_WAIT, 0.0) for phase in phases]
    step_s = [sum(phase.values()) for phase in phases]
    tokens = [
        step.get("throughput/tokens_per_s", 0.0) * seconds
        for step, seconds in zip(steps, step_s, strict=True)
    ]
    trajectories = status.groups_per_step * status.group_size
    mean_tokens = fmean(step.get("response/tokens", 0.0) for step in steps)
    return Record(
        run=status.run_name,
        groups_per_step=status.groups_per_step,
        group_size=status.group_size,
        max_staleness_steps=status.max_staleness_steps,
        max_in_flight=config.broker.broker.max_in_flight,
        staleness_mode=config.run.staleness_mode,
        siblings_together=generators.siblings_together,
        prefetch=config.learner.learner.prefetch,
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
        transfer_s=_transfer_s([one.adopted_by for one in status.publish_history]),
        pause_s=_pause_s(roles, status.publishes),
        score_s=_score_s(state.history.time),
        useless_share=_useless_share(status.dropped, status.trained),
        mean_turns=fmean(step.get("turns/mean", 1.0) for step in steps),
        shared_cores=state.history.shared_cores,
    )


def _generators(roles: Sequence[RoleStatus]) -> list[RoleStatus]:
    """Return the generators that run, or ran at the end."""
    found = [role for role in roles if role.role == "generator"]
    newest_s = min((role.silent_s for role in found), default=0.0)
    return [role for role in found if role.silent_s <= newest_s + GONE_S]


def _lanes(roles: Sequence[RoleStatus], *, most: int, least: int) -> int:
    limits = [role.sequence_limit for role in roles if role.sequence_limit]
    return max(least, round(fmean(limits))) if limits else most


def _steps(columns: StepColumns, *, warm: int) -> list[dict[str, float]]:
    """Return the figures of the newest steps, all of which are known."""
    found: list[dict[str, float]] = []
    for place, step in enumerate(columns.step):
        if step <= warm:
            continue
        row = {name: series[place] for name, series in columns.series.items()}
        known = {name: float(value) for name, value in row.items() if value is not None}
        if _WAIT in known:
            found.append(known)
    return found[-MOST_STEPS:]


def _phases(step: Mapping[str, float]) -> dict[str, float]:
    return {name: seconds for name, seconds in step.items() if name.startswith(PHASE_TIME)}


def _transfer_s(adopted: Sequence[Mapping[str, float]]) -> float:
    seconds = [max(one.values()) for one in adopted if one]
    return median(seconds) if seconds else 0.0


def _pause_s(roles: Sequence[RoleStatus], publishes: int) -> float:
    if not publishes:
        return 0.0
    return fmean(role.phase_seconds.get("adopt", 0.0) for role in roles) / publishes


def _score_s(time: TimeColumns) -> float:
    """Return the mean time to a reward: those that wait for one over their rate (Little)."""
    answers = [value for value in time.series.get("answers", ()) if value is not None]
    if len(answers) < 2 or answers[-1] <= answers[0]:
        return 0.0
    seconds = time.at_s[-1] - time.at_s[0]
    waiting = [
        sum(value or 0.0 for value in row)
        for row in zip(*(time.series.get(name, ()) for name in _QUEUED), strict=False)
    ]
    mean_s = fmean(waiting) * seconds / (answers[-1] - answers[0]) if waiting else 0.0
    return mean_s if math.isfinite(mean_s) else 0.0


def _useless_share(dropped: Mapping[str, int], trained: int) -> float:
    useless = dropped.get(_USELESS, 0)
    return useless / (useless + trained) if useless else 0.0
