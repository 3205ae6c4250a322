"""Runs a broker until it is asked to end."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path

import zmq.asyncio

from broker.beginning import begin_run, build_ledger, load_prompts, open_records, start_trackers
from broker.commit import GroupCommitter
from broker.config import BrokerSettings
from broker.dashboard.web import Dashboard
from broker.redis_server import RedisServer
from broker.redis_store import RedisStore
from broker.scoring import ScoringQueue
from broker.server import BrokerServer
from broker.telemetry import Telemetry
from wire.errors import ConfigError
from wire.stopping import stop_event

_log = logging.getLogger(__name__)
_CLOCK_S = 1.0


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
        trackers = await start_trackers(settings)
        cleanup.callback(trackers.close)
        await begin_run(ledger, store, settings)
        telemetry.versions["redis"] = await store.server_version()
        records = open_records(settings, ledger, trackers)
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


async def end_after(
    hours: float, plan_stop: Callable[[str], Awaitable[None]], *, every_s: float = _CLOCK_S
) -> None:
    """End the run in order when its time is up; 0 hours is no limit."""
    started = time.monotonic()
    while True:
        await asyncio.sleep(every_s)
        if hours and time.monotonic() - started > hours * 3600:
            await plan_stop(f"run.max_hours = {hours:g} have passed")
            hours = 0.0  # said once
