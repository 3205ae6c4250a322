"""Builds a broker from its settings and runs it until it is asked to end."""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path

import zmq.asyncio

from broker.admission import StalenessBound
from broker.commit import GroupCommitter
from broker.config import BrokerSettings
from broker.dashboard.web import Dashboard
from broker.evaluation import EvalPlan
from broker.ledger import Ledger, LedgerRules
from broker.prompts import PromptSource, load_prompts
from broker.redis_server import RedisServer
from broker.redis_store import RedisStore
from broker.scoring import ScoringQueue
from broker.server import BrokerServer
from broker.summary import write_summary
from broker.telemetry import Telemetry
from broker.tensorboard_log import TensorBoardLog
from wire.errors import ConfigError
from wire.status import RunStatus, StepPoint
from wire.stopping import stop_event
from wire.trajectory import Prompt

_log = logging.getLogger(__name__)


def build_ledger(settings: BrokerSettings) -> Ledger:
    """Return an empty ledger over the run's prompt files."""
    run = settings.run
    source = PromptSource(load_prompts(Path(settings.data.file), "data.file"), seed=run.seed)
    held_out: list[Prompt] = []
    if settings.eval.file:
        held_out = load_prompts(Path(settings.eval.file), "eval.file")
    rules = LedgerRules(
        bound=StalenessBound(run.max_staleness_steps, run.groups_per_step),
        group_size=run.group_size,
        total_steps=run.steps,
        max_attempts=settings.broker.max_attempts,
        max_in_flight=settings.max_in_flight,
        drop_zero_variance=settings.broker.drop_zero_variance,
        lease_s=settings.broker.lease_s,
        eval_plan=EvalPlan(
            num_problems=len(held_out),
            total_steps=run.steps,
            every_steps=settings.eval.every_steps,
            before_train=settings.eval.before_train,
            at_end=settings.eval.at_end,
        ),
    )
    return Ledger(rules, prompt_at=source.at, eval_prompt_at=held_out.__getitem__)


async def serve(settings: BrokerSettings) -> None:
    """Run the broker until SIGTERM or SIGINT; a child or task that fails ends it with an error."""
    stop = stop_event()
    run = settings.run
    run.logs.mkdir(parents=True, exist_ok=True)
    run.make_socket_folder()
    telemetry = Telemetry(run)
    ledger = build_ledger(settings)
    scoring = ScoringQueue(lease_s=settings.broker.lease_s)
    async with AsyncExitStack() as cleanup:
        redis_server = await _redis_server(settings, cleanup)
        url = settings.broker.redis.url or (redis_server.url if redis_server else "")
        password = redis_server.password if redis_server else _password(settings)
        store = await RedisStore.connect(url, run.name, password=password)
        cleanup.push_async_callback(store.close)
        await _refuse_old_run(store, settings)
        telemetry.versions["redis"] = await store.server_version()
        board = TensorBoardLog(run.folder / "tensorboard")

        def on_step(point: StepPoint, status: RunStatus) -> None:
            board.step(point, status)
            write_summary(run.summary_file, status)

        committer = GroupCommitter(store)
        server = BrokerServer(
            ledger=ledger,
            scoring=scoring,
            committer=committer,
            telemetry=telemetry,
            run_name=run.name,
            max_message_bytes=settings.broker.max_message_bytes,
            on_step=on_step,
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
            )
        finally:
            telemetry.outcome = "finished" if ledger.finished else "stopped"
            board.close(server.status())
            write_summary(run.summary_file, server.status())
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


async def _refuse_old_run(store: RedisStore, settings: BrokerSettings) -> None:
    async for _ in store.replay():
        raise ConfigError(
            f"run {settings.run.name!r} has events already and resuming is not supported yet; "
            "choose another run.name or remove its folder"
        )
