"""Builds a broker from its settings and runs it until it is asked to end."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq.asyncio

from broker.admission import StalenessBound
from broker.commit import GroupCommitter
from broker.config import BrokerSettings
from broker.dashboard.web import Dashboard
from broker.data.mixture import PromptSource
from broker.data.sources import load_eval_problems, load_training_prompts
from broker.evaluation import EvalPlan
from broker.events import TakenOver, decode_event, decode_snapshot
from broker.ledger import Ledger, LedgerRules
from broker.records import FolderRecords
from broker.redis_server import RedisServer
from broker.redis_store import RedisStore
from broker.scoring import ScoringQueue
from broker.server import BrokerServer
from broker.store import TrajectoryStore
from broker.telemetry import Telemetry
from broker.trackers.background import BackgroundTrackers
from broker.trackers.loading import load_trackers
from wire.checkpoints import read_ledger
from wire.errors import ConfigError
from wire.eval_metric import check_metric
from wire.stopping import stop_event
from wire.trajectory import Prompt
from wire.trajectory_file import TrajectoryFileWriter, cut_from_step
from wire.versions import PolicyVersion

_log = logging.getLogger(__name__)
_CLOCK_S = 1.0


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
    )
    return Ledger(rules, prompt_at=prompts.training.at, eval_prompt_at=prompts.held_out.__getitem__)


async def serve(settings: BrokerSettings) -> None:
    """Run the broker until SIGTERM or SIGINT; a child or task that fails ends it with an error."""
    stop = stop_event()
    run = settings.run
    run.logs.mkdir(parents=True, exist_ok=True)
    run.make_socket_folder()
    telemetry = Telemetry(run)
    prompts = load_prompts(settings)
    telemetry.data = prompts.counts()
    ledger = build_ledger(settings, prompts)
    scoring = ScoringQueue(lease_s=settings.broker.lease_s)
    async with AsyncExitStack() as cleanup:
        redis_server = await _redis_server(settings, cleanup)
        url = settings.broker.redis.url or (redis_server.url if redis_server else "")
        password = redis_server.password if redis_server else _password(settings)
        store = await RedisStore.connect(url, run.name, password=password)
        cleanup.push_async_callback(store.close)
        await begin_run(ledger, store, settings)
        telemetry.versions["redis"] = await store.server_version()
        records = _records(settings, ledger)
        committer = GroupCommitter(store)
        server = BrokerServer(
            ledger=ledger,
            scoring=scoring,
            committer=committer,
            telemetry=telemetry,
            run_name=run.name,
            max_message_bytes=settings.broker.max_message_bytes,
            records=records,
        )
        if settings.broker.dashboard.enabled:
            dashboard = Dashboard(server.status, port=settings.broker.dashboard.port)
            cleanup.push_async_callback(dashboard.stop)
            address = await dashboard.start()
            address_file = run.folder / "dashboard.url"
            address_file.touch(mode=0o600)
            address_file.write_text(address + "\n")
            cleanup.callback(address_file.unlink, missing_ok=True)
            _log.info("dashboard at %s", address_file)
        context = zmq.asyncio.Context()
        cleanup.callback(context.term)
        try:
            await _run_until(
                stop,
                committer.run(),
                server.serve(context, run.endpoint("broker")),
                _watch(redis_server),
                end_after(run.max_hours, server.plan_stop),
            )
        finally:
            telemetry.outcome = "finished" if ledger.finished else "stopped"
            records.close(server.status())
            run.socket("broker").unlink(missing_ok=True)


async def _run_until(stop: asyncio.Event, *jobs: Coroutine[None, None, None]) -> None:
    """Run endless jobs until ``stop`` is set; the first that fails is raised."""
    tasks = [asyncio.create_task(job) for job in jobs]
    waiter = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait({waiter, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (waiter, *tasks):
            task.cancel()
        await asyncio.gather(waiter, *tasks, return_exceptions=True)


async def _redis_server(settings: BrokerSettings, cleanup: AsyncExitStack) -> RedisServer | None:
    redis = settings.broker.redis
    if redis.url:
        return None
    if redis.fsync != "always":
        _log.warning("broker.redis.fsync = %s: a crash can lose acknowledged work", redis.fsync)
    socket = settings.run.socket("redis")
    server = RedisServer.launch(
        socket=socket,
        folder=settings.run.folder / "redis",
        log_file=settings.run.logs / "redis.log",
        fsync=redis.fsync,
    )
    cleanup.callback(server.stop)
    await server.until_listening(socket)
    return server


def _password(settings: BrokerSettings) -> str | None:
    path = settings.broker.redis.password_file
    if not path:
        return None
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read broker.redis.password_file = {path}: {error.strerror}"
        ) from error


async def _watch(server: RedisServer | None) -> None:
    while True:
        await asyncio.sleep(1.0)
        if server is not None:
            server.check_alive()


async def begin_run(ledger: Ledger, store: TrajectoryStore, settings: BrokerSettings) -> None:
    """Begin a new run, or go on from run.resume_from.

    Raises:
        ConfigError: a run of this name has begun before, or the checkpoint cannot be used.
    """
    run = settings.run
    begun, epoch = False, 0
    async for data in store.replay():
        begun = True
        if isinstance(event := decode_event(data), TakenOver):
            epoch = max(epoch, event.version.epoch)
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
    version = PolicyVersion(max(epoch, snapshot.version.epoch), snapshot.version.step)
    await store.clear()
    ledger.restore(msgspec.structs.replace(snapshot, version=version))
    _log.info(
        "going on from step %d with %d prompts that were in flight",
        version.step,
        len(snapshot.waiting),
    )


def _records(settings: BrokerSettings, ledger: Ledger) -> FolderRecords:
    run, broker = settings.run, settings.broker
    resumed_at = ledger.step if run.resume_from else None
    batches = None
    if broker.record_batches:
        path = run.folder / "rollouts" / "batches.trajectories"
        if resumed_at is not None:
            cut_from_step(path, resumed_at)
        batches = TrajectoryFileWriter(path, broker.max_recorded_bytes)
    trackers = load_trackers(
        settings.logging, run, msgspec.to_builtins(settings), resumed_at=resumed_at
    )
    return FolderRecords(
        run,
        BackgroundTrackers(trackers),
        keep_answers=settings.eval.keep_answers,
        batches=batches,
        known=ledger.eval_points,
    )


async def end_after(
    hours: float, plan_stop: Callable[[str], Awaitable[None]], *, every_s: float = _CLOCK_S
) -> None:
    """End the run in order when its time is up; 0 hours is no limit."""
    started = time.monotonic()
    while True:
        await asyncio.sleep(every_s)
        if hours and time.monotonic() - started > hours * 3600:
            await plan_stop(f"run.max_hours = {hours:g} have passed")
