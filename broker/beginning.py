"""How a run begins in the broker: its prompts, its ledger, its place in the store, its records."""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from broker.admission import StalenessBound
from broker.book import BookState, LedgerRules, decode_state, encode_state
from broker.config import BrokerSettings
from broker.data.mixture import PromptSource, fingerprint_of
from broker.data.sources import load_eval_problems, load_training_prompts
from broker.evaluation import EvalPlan
from broker.events import decode_event
from broker.ledger import Ledger
from broker.records import FolderRecords, forget_after, last_recorded
from broker.store import Changes, TrajectoryStore
from broker.trackers.background import BackgroundTrackers
from broker.trackers.base import Tracker
from broker.trackers.loading import load_trackers
from wire.checkpoints import checkpoints_in, read_checkpoint_info, read_ledger
from wire.errors import ConfigError
from wire.eval_metric import check_metric
from wire.run_folder import BATCHES
from wire.trajectory import Prompt
from wire.versions import PolicyVersion

_log = logging.getLogger(__name__)
_TRACKERS_START_S = 40.0


@dataclass(frozen=True, slots=True)
class Prompts:
    """All that the policy will be asked."""

    training: PromptSource
    held_out: Sequence[Prompt]

    def counts(self) -> dict[str, int]:
        """Return how many there are, and how many rows were left out."""
        return {
            "rows": self.training.num_rows,
            "rows_skipped": self.training.num_skipped,
            "eval_problems": len(self.held_out),
        }


def load_prompts(settings: BrokerSettings) -> Prompts:
    """Read the training prompts and the held-out problems.

    Raises:
        ConfigError: a file is missing, empty or malformed; or eval.metric does not fit them.
    """
    training = load_training_prompts(settings.data, seed=settings.run.seed)
    held_out = load_eval_problems(settings.eval, settings.data) if settings.eval.enabled else []
    if held_out:
        sources = {problem.data_source for problem in held_out}
        check_metric(settings.eval.metric, samples=settings.eval.samples, sources=sources)
    return Prompts(training, held_out)


def build_ledger(
    settings: BrokerSettings, prompts: Prompts, state: BookState | None = None
) -> Ledger:
    """Return a ledger over the run's prompts, empty or with a state that was stored."""
    run = settings.run
    max_prompts = math.ceil(run.epochs * prompts.training.num_rows) if run.epochs else None
    if max_prompts is not None and max_prompts < run.groups_per_step:
        raise ConfigError(
            f"run.epochs = {run.epochs:g} of {prompts.training.num_rows} prompts are fewer than "
            f"the run.groups_per_step = {run.groups_per_step} of one learner step"
        )
    rules = LedgerRules(
        bound=StalenessBound(
            run.staleness_bound, run.groups_per_step, reserves=run.staleness_mode == "wait"
        ),
        group_size=run.group_size,
        total_steps=run.steps,
        max_attempts=settings.broker.max_attempts,
        max_in_flight=settings.max_in_flight,
        drop_zero_variance=settings.broker.drop_zero_variance,
        lease_s=settings.broker.lease_s,
        eval_plan=EvalPlan(
            sources=tuple(problem.data_source for problem in prompts.held_out),
            section=settings.eval,
        ),
        max_prompts=max_prompts,
        min_groups=run.fewest_groups,
        zero_variance_of=settings.broker.zero_variance_of,
        high_water_bytes=settings.broker.high_water_bytes,
        replay_budget_bytes=settings.broker.replay_budget_bytes,
        drop_overlong=settings.sampling.overlong_responses == "drop",
        prompts_fingerprint=prompts.training.fingerprint(),
        problems_fingerprint=fingerprint_of(prompts.held_out),
    )
    return Ledger(
        rules,
        prompt_at=prompts.training.at,
        eval_prompt_at=prompts.held_out.__getitem__,
        state=state,
    )


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a broker starts from."""

    ledger: Ledger
    generation: int  # of this broker
    events: list[bytes]  # the newest, as they were read back
    stored: Changes  # what has to be written before anything else


async def begin_run(
    settings: BrokerSettings, prompts: Prompts, store: TrajectoryStore, *, restarted: bool = False
) -> Beginning:
    """Begin a new run, or go on: with what the store holds, or from run.resume_from.

    A checkpoint is gone on from in the store where that still knows all that came after it: then
    nothing has to be generated again. Else the store is cleared, and what the checkpoint keeps of
    the ledger takes its place.

    Args:
        settings: the broker's.
        prompts: of the run.
        store: of the run; from now on this broker is its only writer.
        restarted: this process takes the place of one that died, whatever run.resume_from says.

    Raises:
        ConfigError: the run has ended, has other data, or its checkpoint cannot be used.
    """
    generation = await store.claim()
    ledger, events = await _stored_ledger(settings, prompts, store)
    stored = Changes()
    if settings.run.resume_from and not restarted:
        ledger, stored = await _resumed(settings, prompts, store, ledger)
        events = events if stored.snapshot is None else []
    elif not ledger.state.num_events:
        await store.clear()  # of a broker that nobody spoke to
        ledger = build_ledger(settings, prompts)
        stored = Changes(snapshot=encode_state(ledger.state))
    else:
        if ledger.finished and not restarted:
            raise ConfigError(
                f"run {settings.run.name!r} has ended at step {ledger.step}; go on with "
                "`slipstream run --resume auto` or choose another run.name"
            )
        _check_same_run(ledger, settings)
        _log.info("going on with what the store holds, at step %d", ledger.step)
    return Beginning(ledger, generation, events, stored)


async def _stored_ledger(
    settings: BrokerSettings, prompts: Prompts, store: TrajectoryStore
) -> tuple[Ledger, list[bytes]]:
    """Return the ledger that the store holds, and the events after its snapshot."""
    data = await store.snapshot()
    try:
        ledger = build_ledger(settings, prompts, decode_state(data) if data else None)
        events = []
        async for event in store.replay():
            ledger.apply(decode_event(event))
            events.append(event)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the store holds a ledger of run {settings.run.name!r} that cannot be read: {error}; "
            "go on from a checkpoint on an empty Redis, or choose another run.name"
        ) from error
    ledger.drain()
    return ledger, events


async def _resumed(
    settings: BrokerSettings, prompts: Prompts, store: TrajectoryStore, known: Ledger
) -> tuple[Ledger, Changes]:
    """Go on from run.resume_from: in the store if it reaches back to there, else without it."""
    run = settings.run
    folder = Path(run.resume_from)
    data = read_ledger(folder)
    if not data:
        raise ConfigError(
            f"{folder} was trained without a broker: export it and start a new run from it "
            "(run.model)"
        )
    try:
        saved = decode_state(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{folder}: its ledger cannot be read: {error}") from error
    version = saved.version
    goes_on = (
        known.state.num_events > 0
        and known.is_ancestor(version)
        and known.can_go_back_to(version.step)
        and known.state.group_size == run.group_size
    )
    if goes_on:
        ledger = known
    else:
        others = [read_checkpoint_info(path).version for path in checkpoints_in(run.checkpoints)]
        epoch = max(one.epoch for one in (known.version, version, *others))
        saved.version = PolicyVersion(epoch, version.step)
        saved.origin = str(folder)
        ledger = build_ledger(settings, prompts, saved)
    state = ledger.state
    points = [point for point in state.eval_points if point.step <= version.step]
    if reason := ledger.rules.eval_plan.verdict(points):
        raise ConfigError(f"this run has ended: {reason}; change that setting to train on")
    _check_same_run(ledger, settings)
    if goes_on:
        _log.info("going back from step %d to step %d", known.step, version.step)
    else:
        await store.clear()
        forget_after(run.folder, version.step)
        count = len(state.groups)
        _log.info("going on from step %d, %d prompts were in flight", version.step, count)
    state.stop_reason, state.last_step = "", run.steps
    return ledger, _rewritten(ledger)


def _rewritten(ledger: Ledger) -> Changes:
    """Return the whole state as it is to be stored.

    Under another bound than it was admitted under, what is under way begins anew.
    """
    state, rules = ledger.state, ledger.rules
    if state.bound != rules.bound:
        for group in list(ledger.groups.values()):
            if group.is_live:
                ledger.begin_anew(group)
        state.bound = rules.bound
    state.prompts, state.problems = rules.prompts_fingerprint, rules.problems_fingerprint
    _, released = ledger.drain()
    return Changes(remove=released, snapshot=encode_state(state))


def _check_same_run(ledger: Ledger, settings: BrokerSettings) -> None:
    """The cursor of a ledger means nothing in other data; its groups have a size."""
    rules, state = ledger.rules, ledger.state
    where = settings.run.resume_from or f"run {settings.run.name!r}"
    if state.prompts != rules.prompts_fingerprint and not settings.data.allow_change:
        raise ConfigError(
            f"the training prompts are not those of {where}: [data] or run.seed "
            "has changed; set data.allow_change = true to go on with these at the same position"
        )
    if state.problems != rules.problems_fingerprint and state.eval_points:
        _log.warning(
            "the held-out problems have changed ([eval]): figures of before and after step %d "
            "cannot be compared",
            state.version.step,
        )
    if not settings.run.resume_from and state.bound != rules.bound:
        raise ConfigError(
            f"{where} began with other run.max_staleness_steps, run.staleness_mode or "
            "run.groups_per_step; change them with `slipstream run --resume`"
        )


async def start_trackers(settings: BrokerSettings) -> BackgroundTrackers:
    """Start what logging.trackers names, before anything of an earlier life is touched.

    Raises:
        ConfigError: one cannot be started, or not in time.
    """
    run = settings.run
    resumed_at = read_checkpoint_info(Path(run.resume_from)).step if run.resume_from else None
    plain = msgspec.to_builtins(settings)
    starting = asyncio.to_thread(load_trackers, settings.logging, run, plain, resumed_at=resumed_at)
    try:
        trackers: list[Tracker] = await asyncio.wait_for(starting, _TRACKERS_START_S)
    except TimeoutError as error:
        raise ConfigError(
            f"logging.trackers = {list(settings.logging.trackers)} did not start within "
            f"{_TRACKERS_START_S:.0f} s"
        ) from error
    return BackgroundTrackers(trackers)


async def open_records(
    settings: BrokerSettings, ledger: Ledger, trackers: BackgroundTrackers, store: TrajectoryStore
) -> FolderRecords:
    """Return what writes into the run folder.

    What a broker that died did not record any more is recorded now.
    """
    run, broker = settings.run, settings.broker
    path = run.folder / BATCHES if broker.record_batches else None
    records = FolderRecords(
        run,
        trackers,
        keep_answers=settings.eval.keep_answers,
        batches=path,
        max_batch_bytes=broker.max_recorded_bytes,
        known=ledger.state.eval_points,
    )
    if path is not None and ledger.step:
        for step in range(last_recorded(path) + 1, ledger.step):
            groups = ledger.state.replay.get(step)
            if groups is None:
                _log.warning("step %d cannot be recorded any more: %s ends before it", step, path)
                records.end_batches()
                break
            frames = [await store.fetch(sorted(group.trajectory_keys())) for group in groups]
            await records.batch(step, list(zip(groups, frames, strict=True)))
    return records
