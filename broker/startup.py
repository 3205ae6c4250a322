"""Starts a run in the broker: its ledger, its place in the store, its records."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.broker.config import BrokerSettings, redis_folder
from slipstream.broker.data.prompts import Prompts
from slipstream.broker.identity import (
    RunIdentity,
    begin_life,
    check_store,
    identity_of,
    read_identity,
    write_identity,
)
from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.effects import apply
from slipstream.broker.ledger.events import decode_event
from slipstream.broker.ledger.state import BookState, decode_state, encode_state
from slipstream.broker.report.metrics_file import MetricsFile
from slipstream.broker.report.run_files import FolderRecords, last_recorded
from slipstream.broker.report.trackers.background import BackgroundTrackers
from slipstream.broker.report.trackers.loading import LOGGED_FILE, load_trackers
from slipstream.broker.run_ledger import (
    build_ledger,
    check_same_run,
    ledger_of,
    ledger_rules,
    resumed,
    warn_of_other_problems,
)
from slipstream.broker.store.base import Changes, TrajectoryStore
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import read_checkpoint_info
from slipstream.wire.files.run_folder import BATCHES, METRICS
from slipstream.wire.files.trajectory_file import cut_from_step
from slipstream.wire.process.patience import log_wait
from slipstream.wire.unreadable import UNREADABLE

_log = logging.getLogger(__name__)
_TRACKERS_START_S = 300.0


@dataclass(frozen=True, slots=True)
class StartState:
    """State that a broker starts from."""

    ledger: Ledger
    generation: int  # number of this broker
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
    """Start a new run, or resume one: from the store, or from run.resume_from.

    If the store still holds everything recorded after the checkpoint, the run resumes there and
    nothing has to be generated again; otherwise the store is cleared and filled from the
    checkpoint.

    From now on this broker is the only writer of the store. ``first_event`` is the number of events
    acknowledged in all lives of the run.

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
        ledger, stored = resumed(settings, prompts, ledger, first_event, known)
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
        check_same_run(ledger.book.rules, ledger.book.state, settings)
        warn_of_other_problems(ledger)
        stored_identity = identity_of(ledger.book.state)
        begin_life(ledger.book.state, known, apart=ledger.book.state.num_events < first_event)
        if identity_of(ledger.book.state) != stored_identity:
            stored = Changes(snapshot=encode_state(ledger.book.state))
        _log.info("continuing from the store at step %d", ledger.book.step)
    if not stored.is_empty:
        await store.commit(stored)  # all of it or nothing, before any client is answered
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
    except UNREADABLE as error:
        raise _unreadable(settings, error) from error
    has_begun = stored is not None and stored.num_events > 0
    if stored is not None and not has_begun:
        async for _ in store.replay():  # something has happened since the snapshot
            has_begun = True
            break
    resumes = _is_to_resume(settings, stored, restarted=restarted)
    saved = ledger_of(Path(run.resume_from)) if resumes else None
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
        check_same_run(ledger_rules(settings, prompts), stored, settings)
    return known


def _unreadable(settings: BrokerSettings, error: Exception) -> ConfigError:
    return ConfigError(
        f"the store holds a ledger of run {settings.run.name!r} that cannot be read: {error!r}; "
        "resume from a checkpoint on an empty Redis, or choose another run.name"
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
    except (LookupError, *UNREADABLE) as error:
        raise _unreadable(settings, error) from error
    ledger.drain()
    return ledger, events


async def start_trackers(settings: BrokerSettings) -> BackgroundTrackers:
    """Start the trackers of logging.trackers, before anything of an earlier life is touched.

    Raises:
        ConfigError: one cannot be started, or not in time.
    """
    run = settings.run
    resumed_at = None
    if run.resume_from and not (run.folder / LOGGED_FILE).exists():  # else it may be removed by now
        resumed_at = read_checkpoint_info(Path(run.resume_from)).step
    plain = msgspec.to_builtins(settings)
    starting = asyncio.to_thread(load_trackers, settings.logging, run, plain, resumed_at=resumed_at)
    try:
        async with log_wait(f"logging.trackers = {list(settings.logging.trackers)} to start"):
            async with asyncio.timeout(_TRACKERS_START_S):
                return await starting
    except TimeoutError as error:
        raise ConfigError(
            f"logging.trackers = {list(settings.logging.trackers)} did not start within "
            f"{_TRACKERS_START_S:.0f} s"
        ) from error


async def open_records(
    settings: BrokerSettings,
    ledger: Ledger,
    trackers: BackgroundTrackers,
    store: TrajectoryStore,
    missed: Mapping[int, Mapping[str, float]],
) -> FolderRecords:
    """Open the records in the run folder.

    Events that a broker did not record before it died are recorded now; ``missed`` are figures of
    learner steps, by step, that it may not have recorded.
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
        metrics=_open_metrics(run.folder / METRICS, ledger, missed, trackers),
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


def _open_metrics(
    path: Path,
    ledger: Ledger,
    missed: Mapping[int, Mapping[str, float]],
    trackers: BackgroundTrackers,
) -> MetricsFile:
    evaluated = [point.step for point in ledger.book.state.eval_points]
    metrics = MetricsFile(path, step=ledger.book.step, evaluated=evaluated)
    for step in sorted(missed):
        if metrics.newest_step < step <= ledger.book.step:
            metrics.step(step, None, missed[step])  # how many tokens it had is not among events
        if trackers.newest_step < step <= ledger.book.step:
            trackers.log(step, missed[step])
    return metrics
