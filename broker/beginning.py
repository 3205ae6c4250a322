"""How a run begins in the broker: its prompts, its ledger, its place in the store, its records."""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from broker.admission import StalenessBound
from broker.config import BrokerSettings
from broker.data.mixture import PromptSource, fingerprint_of
from broker.data.sources import load_eval_problems, load_training_prompts
from broker.evaluation import EvalPlan
from broker.events import LedgerSnapshot, Restored, TakenOver, decode_event, decode_snapshot
from broker.ledger import Ledger, LedgerRules
from broker.records import FolderRecords, forget_after
from broker.store import TrajectoryStore
from broker.trackers.background import BackgroundTrackers
from broker.trackers.base import Tracker
from broker.trackers.loading import load_trackers
from wire.checkpoints import checkpoints_in, read_checkpoint_info, read_ledger
from wire.errors import ConfigError
from wire.eval_metric import check_metric
from wire.run_folder import BATCHES
from wire.trajectory import Prompt
from wire.trajectory_file import TrajectoryFileWriter, read_steps
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


def build_ledger(settings: BrokerSettings, prompts: Prompts) -> Ledger:
    """Return an empty ledger over the run's prompts."""
    run = settings.run
    max_prompts = math.ceil(run.epochs * prompts.training.num_rows) if run.epochs else None
    if max_prompts is not None and max_prompts < run.groups_per_step:
        raise ConfigError(
            f"run.epochs = {run.epochs:g} of {prompts.training.num_rows} prompts are fewer than "
            f"the run.groups_per_step = {run.groups_per_step} of one learner step"
        )
    rules = LedgerRules(
        bound=StalenessBound(run.staleness_bound, run.groups_per_step),
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
        drop_overlong=settings.sampling.overlong_responses == "drop",
        prompts_fingerprint=prompts.training.fingerprint(),
        problems_fingerprint=fingerprint_of(prompts.held_out),
    )
    return Ledger(rules, prompt_at=prompts.training.at, eval_prompt_at=prompts.held_out.__getitem__)


async def begin_run(ledger: Ledger, store: TrajectoryStore, settings: BrokerSettings) -> None:
    """Begin a new run, or go on from run.resume_from.

    Raises:
        ConfigError: a run of this name has begun before, or the checkpoint cannot be used.
    """
    run = settings.run
    begun, epoch = False, 0
    async for data in store.replay():
        begun = True
        match decode_event(data):
            case TakenOver(version=version) | Restored(snapshot=LedgerSnapshot(version=version)):
                epoch = max(epoch, version.epoch)
            case _:
                continue
    if not run.resume_from:
        if begun:
            raise ConfigError(
                f"run {run.name!r} has begun already; go on with `slipstream run --resume auto` "
                "or choose another run.name"
            )
        return
    folder = Path(run.resume_from)
    data = read_ledger(folder)
    if not data:
        raise ConfigError(
            f"{folder} was trained without a broker: export it and start a new run from it "
            "(run.model)"
        )
    try:
        snapshot = decode_snapshot(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{folder}: its ledger cannot be read: {error}") from error
    _check_same_prompts(ledger, snapshot, settings)
    if reason := ledger.rules.eval_plan.verdict(snapshot.eval_points):
        raise ConfigError(f"this run has ended: {reason}; change that setting to train on")
    saved = (read_checkpoint_info(path).version.epoch for path in checkpoints_in(run.checkpoints))
    epoch = max(epoch, snapshot.version.epoch, *saved)
    version = PolicyVersion(epoch, snapshot.version.step)
    await store.clear()
    ledger.restore(msgspec.structs.replace(snapshot, version=version))
    forget_after(run.folder, version.step)
    _log.info(
        "going on from step %d with %d prompts that were in flight",
        version.step,
        len(snapshot.waiting),
    )


def _check_same_prompts(ledger: Ledger, snapshot: LedgerSnapshot, settings: BrokerSettings) -> None:
    """The cursor of a checkpoint means nothing in other data."""
    rules = ledger.rules
    if snapshot.prompts != rules.prompts_fingerprint and not settings.data.allow_change:
        raise ConfigError(
            f"the training prompts are not those of {settings.run.resume_from}: [data] or run.seed "
            "has changed; set data.allow_change = true to go on with these at the same position"
        )
    if snapshot.problems != rules.problems_fingerprint and snapshot.eval_points:
        _log.warning(
            "the held-out problems have changed ([eval]): figures of before and after step %d "
            "cannot be compared",
            snapshot.version.step,
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


def open_records(
    settings: BrokerSettings, ledger: Ledger, trackers: BackgroundTrackers
) -> FolderRecords:
    """Return what writes into the run folder."""
    run, broker = settings.run, settings.broker
    batches = None
    if broker.record_batches:
        path = run.folder / BATCHES
        if run.resume_from and _last_recorded(path) != ledger.step - 1:
            _log.warning("%s does not reach step %d: nothing is recorded", path, ledger.step)
        else:
            batches = TrajectoryFileWriter(path, broker.max_recorded_bytes)
    return FolderRecords(
        run,
        trackers,
        keep_answers=settings.eval.keep_answers,
        batches=batches,
        known=ledger.eval_points,
    )


def _last_recorded(path: Path) -> int:
    return max(read_steps(path), default=-1) if path.exists() else -1
