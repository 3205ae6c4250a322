"""How a run starts in the broker: its prompts, its ledger, its place in the store, its records."""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.broker.config import BrokerSettings, redis_folder
from slipstream.broker.data.mixture import PromptSource, fingerprint_of
from slipstream.broker.data.sources import load_eval_problems, load_training_prompts
from slipstream.broker.identity import (
    RunIdentity,
    begin_life,
    check_store,
    identity_of,
    read_identity,
    write_identity,
)
from slipstream.broker.ledger.admission import StalenessBound
from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.effects import apply
from slipstream.broker.ledger.evaluation import EvalPlan, EvalRound
from slipstream.broker.ledger.events import decode_event
from slipstream.broker.ledger.state import BookState, LedgerRules, decode_state, encode_state
from slipstream.broker.report.run_files import FolderRecords, forget_after, last_recorded
from slipstream.broker.report.trackers.background import BackgroundTrackers
from slipstream.broker.report.trackers.base import Tracker
from slipstream.broker.report.trackers.loading import load_trackers
from slipstream.broker.store.base import Changes, TrajectoryStore
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import (
    read_checkpoint_info,
    read_ledger,
    readable_checkpoints,
)
from slipstream.wire.files.run_folder import BATCHES
from slipstream.wire.files.trajectory_file import cut_from_step
from slipstream.wire.messages.trajectory import Prompt, TrajectoryKey
from slipstream.wire.process.patience import saying
from slipstream.wire.settings.eval_metric import check_metric

_log = logging.getLogger(__name__)
_TRACKERS_START_S = 300.0


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
    return Ledger(
        _rules(settings, prompts),
        prompt_at=prompts.training.at,
        eval_prompt_at=prompts.held_out.__getitem__,
        state=state,
    )


def _rules(settings: BrokerSettings, prompts: Prompts) -> LedgerRules:
    """Return the settings that a ledger obeys."""
    run, sampling = settings.run, settings.sampling
    max_prompts = math.ceil(run.epochs * prompts.training.num_rows) if run.epochs else None
    if max_prompts is not None and max_prompts < run.groups_per_step:
        raise ConfigError(
            f"run.epochs = {run.epochs:g} of {prompts.training.num_rows} prompts are fewer than "
            f"the run.groups_per_step = {run.groups_per_step} of one learner step"
        )
    return LedgerRules(
        bound=StalenessBound(
            run.staleness_bound, run.groups_per_step, reserves=run.staleness_mode == "wait"
        ),
        group_size=run.group_size,
        total_steps=run.steps,
        max_attempts=settings.broker.max_attempts,
        max_in_flight=settings.max_in_flight,
        drop_zero_variance=settings.broker.drop_zero_variance,
        lease_s=settings.broker.lease_s,
        max_lease_s=settings.broker.max_lease_s,
        eval_plan=EvalPlan(
            sources=tuple(problem.data_source for problem in prompts.held_out),
            section=settings.eval,
        ),
        max_prompts=max_prompts,
        min_groups=run.fewest_groups,
        zero_variance_of=settings.broker.zero_variance_of,
        high_water_bytes=settings.broker.high_water_bytes,
        replay_budget_bytes=settings.broker.replay_budget_bytes,
        drop_overlong=sampling.overlong_responses == "drop",
        max_prompt_tokens=sampling.max_prompt_tokens,
        max_response_tokens={
            "train": sampling.max_response_tokens,
            "eval": settings.eval.max_response_tokens or sampling.max_response_tokens,
        },
        prompts_fingerprint=prompts.training.fingerprint(),
        problems_fingerprint=fingerprint_of(prompts.held_out),
    )


@dataclass(frozen=True, slots=True)
class StartState:
    """What a broker starts from."""

    ledger: Ledger
    generation: int  # of this broker
    events: list[bytes]  # the newest, as they were read back
    identity: RunIdentity


async def start_run(
    settings: BrokerSettings,
    prompts: Prompts,
    store: TrajectoryStore,
    *,
    restarted: bool = False,
    first_event: int = 0,
) -> StartState:
    """Start a new run, or resume: with what the store holds, or from run.resume_from.

    A checkpoint is gone on from in the store where that still knows all that came after it: then
    nothing has to be generated again. Else the store is cleared, and what the checkpoint keeps of
    the ledger takes its place.

    Args:
        settings: the broker's.
        prompts: of the run.
        store: of the run; from now on this broker is its only writer.
        restarted: this process takes the place of one that died, and has resumed if it was to.
        first_event: of the trail: so many events were acknowledged in all lives of the run.

    Raises:
        ConfigError: the store is not this run's, the run has ended, has other data, or its
            checkpoint cannot be used. Nothing was changed then; other users of the store continue.
    """
    known = await _check_before(settings, prompts, store, restarted=restarted)
    generation = await store.claim()
    ledger, events = await _stored_ledger(settings, prompts, store)
    stored = Changes()
    if _is_to_resume(
        settings, ledger.book.state if ledger is not None else None, restarted=restarted
    ):
        ledger, stored = _resumed(settings, prompts, ledger, first_event, known)
        events = []
    elif ledger is None or not ledger.book.state.num_events:
        ledger = build_ledger(settings, prompts)  # or a broker was there without any client
        begin_life(ledger.book.state, known, apart=first_event > 0)
        stored = Changes(snapshot=encode_state(ledger.book.state))
    else:
        if ledger.book.over and not restarted:
            raise ConfigError(
                f"run {settings.run.name!r} has ended at step {ledger.book.step}; resume with "
                "`slipstream run --resume auto` or choose another run.name"
            )
        _check_same_run(ledger.book.rules, ledger.book.state, settings)
        _warn_of_other_problems(ledger)
        stands = identity_of(ledger.book.state)
        begin_life(ledger.book.state, known, apart=_has_lost_events(ledger, first_event))
        if identity_of(ledger.book.state) != stands:
            stored = Changes(snapshot=encode_state(ledger.book.state))
        _log.info("continuing with what the store holds, at step %d", ledger.book.step)
    if not stored.is_empty:
        await store.commit(stored)  # all of it or nothing, before anybody is spoken to
    identity = identity_of(ledger.book.state)
    if identity != known:
        settings.run.folder.mkdir(parents=True, exist_ok=True)
        write_identity(settings.run.folder, identity)
    return StartState(ledger, generation, events, identity)


def _is_to_resume(settings: BrokerSettings, state: BookState | None, *, restarted: bool) -> bool:
    """True if the run is to resume from run.resume_from, and has not already."""
    origin = settings.run.resume_from
    return bool(origin) and not (restarted and state is not None and state.origin == origin)


async def _check_before(
    settings: BrokerSettings, prompts: Prompts, store: TrajectoryStore, *, restarted: bool
) -> RunIdentity | None:
    """Return the identity in the run folder, if it fits the store."""
    run = settings.run
    known = read_identity(run.folder)
    data = await store.snapshot()
    try:
        stored = decode_state(data) if data is not None else None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unreadable(settings, error) from error
    has_begun = stored is not None and (stored.num_events > 0 or await _has_events(store))
    resumes = _is_to_resume(settings, stored, restarted=restarted)
    saved = _ledger_of(Path(run.resume_from)) if resumes else None
    check_store(
        known,
        stored,
        saved,
        has_begun=has_begun,
        restarted=restarted,
        run_folder=run.folder,
        store=settings.broker.redis.url or str(redis_folder(run)),
    )
    if stored is not None and has_begun and not resumes:
        _check_same_run(_rules(settings, prompts), stored, settings)
    return known


def _has_lost_events(ledger: Ledger, first_event: int) -> bool:
    """True if the store lacks events that it acknowledged, and so ids that were given out."""
    return ledger.book.state.num_events < first_event


async def _has_events(store: TrajectoryStore) -> bool:
    """True if anything has happened since the snapshot."""
    async for _ in store.replay():
        return True
    return False


def _unreadable(settings: BrokerSettings, error: Exception) -> ConfigError:
    return ConfigError(
        f"the store holds a ledger of run {settings.run.name!r} that cannot be read: {error!r}; go "
        "on from a checkpoint on an empty Redis, or choose another run.name"
    )


async def _stored_ledger(
    settings: BrokerSettings, prompts: Prompts, store: TrajectoryStore
) -> tuple[Ledger | None, list[bytes]]:
    """Return the ledger that the store holds, if any, and the events after its snapshot."""
    data = await store.snapshot()
    if data is None:
        return None, []
    try:
        ledger = build_ledger(settings, prompts, decode_state(data))
        events = []
        async for event in store.replay():
            apply(ledger.book, decode_event(event))
            events.append(event)
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError) as error:
        raise _unreadable(settings, error) from error
    ledger.drain()
    return ledger, events


def _resumed(
    settings: BrokerSettings,
    prompts: Prompts,
    known: Ledger | None,
    first_event: int,
    identity: RunIdentity | None,
) -> tuple[Ledger, Changes]:
    """Resume from run.resume_from: in the store if it reaches back to there, else without it.

    Returns the ledger, and what makes it that of the store.
    """
    run = settings.run
    folder = Path(run.resume_from)
    saved = _ledger_of(folder)
    version = saved.version
    goes_on = (
        known is not None
        and known.book.state.num_events > 0
        and known.book.is_ancestor(version)
        and known.book.can_go_back_to(version.step)
        and known.book.state.group_size == run.group_size
    )
    ledger = known if known is not None and goes_on else build_ledger(settings, prompts, saved)
    state = ledger.book.state
    points = [point for point in state.eval_points if point.step <= version.step]
    if reason := ledger.book.rules.eval_plan.verdict(points):
        raise ConfigError(f"this run has ended: {reason}; change that setting to train on")
    _check_same_run(ledger.book.rules, state, settings)
    _warn_of_other_problems(ledger)
    released: list[TrajectoryKey] = []
    if goes_on:
        lost = _has_lost_events(ledger, first_event)
        begin_life(state, identity, others=[saved], apart=lost)
        _log.info("going back from step %d to step %d", ledger.book.step, version.step)
    else:
        released = _begin_apart(state, known, settings, first_event, identity)
        forget_after(run.folder, version.step)
        count = len(state.groups)
        _log.info("resuming from step %d, %d prompts were in flight", version.step, count)
    state.origin, state.awaits_learner = run.resume_from, True
    state.stop_reason, state.last_step = "", run.steps
    return ledger, _under_present_settings(ledger, released)


def _ledger_of(checkpoint: Path) -> BookState:
    data = read_ledger(checkpoint)
    if not data:
        raise ConfigError(
            f"{checkpoint} was trained without a broker: export it and start a new run from it "
            "(run.model)"
        )
    try:
        return decode_state(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{checkpoint}: its ledger cannot be read: {error}") from error


def _begin_apart(
    state: BookState,
    known: Ledger | None,
    settings: BrokerSettings,
    first_event: int,
    identity: RunIdentity | None,
) -> list[TrajectoryKey]:
    """Make sure that nothing of an abandoned life is taken for something of this one.

    Returns the payloads of that life that the store holds.
    """
    infos = readable_checkpoints(settings.run.checkpoints)
    epochs = [info.version.epoch for info in infos.values()]
    others = [known.book.state] if known is not None else []
    begin_life(state, identity, others=others, epochs=epochs, apart=True)
    state.num_events = max(first_event, *(one.num_events for one in (state, *others)))
    if known is None:
        return []
    before = known.book.state
    held = [*before.groups.values(), *(g for groups in before.replay.values() for g in groups)]
    return [key for group in held for key in group.trajectory_keys()]


def _under_present_settings(ledger: Ledger, released: list[TrajectoryKey]) -> Changes:
    """Return the whole state as it is to be stored, fit for the settings of now.

    Under another bound or group size than it was admitted under, what is under way restarts; so
    do evaluations under other problems or samples.
    """
    state, rules = ledger.book.state, ledger.book.rules
    other_size = state.group_size != rules.group_size
    for group in list(ledger.book.groups.values()):
        if group.item == "train" and (other_size or (state.bound != rules.bound and group.is_live)):
            ledger.book.begin_anew(group, rules.group_size)
    _fit_evaluations(ledger)
    state.bound, state.group_size = rules.bound, rules.group_size
    state.prompts, state.problems = rules.prompts_fingerprint, rules.problems_fingerprint
    _, freed = ledger.drain()
    return Changes(remove=[*released, *freed], snapshot=encode_state(state))


def _fit_evaluations(ledger: Ledger) -> None:
    """Have open rounds answered from their beginning if they are not what they would be now."""
    state, rules = ledger.book.state, ledger.book.rules
    samples, count = rules.eval_plan.section.samples, rules.eval_plan.num_problems
    groups = [group for group in ledger.book.groups.values() if group.item == "eval"]
    same = state.problems == rules.problems_fingerprint and all(
        group.size == samples for group in groups
    )
    if same and all(one.num_problems == count for one in state.eval_rounds.values()):
        return
    for group in groups:
        ledger.book.forget(group)
    state.eval_rounds = {step: EvalRound(step, count) for step in state.eval_rounds if count}


def _check_same_run(rules: LedgerRules, state: BookState, settings: BrokerSettings) -> None:
    """The cursor of a ledger means nothing in other data, nor its deadlines under another bound."""
    where = settings.run.resume_from or f"run {settings.run.name!r}"
    if state.prompts != rules.prompts_fingerprint and not settings.data.allow_change:
        raise ConfigError(
            f"the training prompts are not those of {where}: [data] or run.seed "
            "has changed; set data.allow_change = true to continue with these at the same position"
        )
    if not settings.run.resume_from and state.bound != rules.bound:
        raise ConfigError(
            f"{where} started with other run.max_staleness_steps, run.staleness_mode or "
            "run.groups_per_step; change them with `slipstream run --resume`"
        )


def _warn_of_other_problems(ledger: Ledger) -> None:
    state = ledger.book.state
    if state.problems != ledger.book.rules.problems_fingerprint and state.eval_points:
        _log.warning(
            "the held-out problems have changed ([eval]): figures of before and after step %d "
            "cannot be compared",
            state.version.step,
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
        async with saying(f"logging.trackers = {list(settings.logging.trackers)} to start"):
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
    if path is not None:
        cut_from_step(path, ledger.book.step)  # a step that was recorded and not committed
    records = FolderRecords(
        run,
        trackers,
        keep_answers=settings.eval.keep_answers,
        batches=path,
        max_batch_bytes=broker.max_recorded_bytes,
        known=ledger.book.state.eval_points,
    )
    records.resume_evaluations(ledger.book.state.eval_rounds)
    if path is not None and ledger.book.step:
        for step in range(last_recorded(path) + 1, ledger.book.step):
            groups = ledger.book.state.replay.get(step)
            if groups is None:
                _log.warning("step %d cannot be recorded any more: %s ends before it", step, path)
                records.end_batches()
                break
            frames = [await store.fetch(sorted(group.trajectory_keys())) for group in groups]
            await records.batch(step, list(zip(groups, frames, strict=True)))
    return records
