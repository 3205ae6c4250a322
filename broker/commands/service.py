"""Runs a command server until it is stopped."""

import asyncio
import logging
import shutil
import sqlite3
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import zmq
from zmq.auth.asyncio import AsyncioAuthenticator

from slipstream.broker.commands.config import CommandServerSettings
from slipstream.broker.commands.keys import TenantKeys
from slipstream.broker.commands.log import CommandLog
from slipstream.broker.commands.site import CommandSite
from slipstream.broker.commands.waiting import LogThread, Waiters
from slipstream.broker.commands.workers import WorkerDesk
from slipstream.broker.listening.gate import limit_of
from slipstream.broker.server.keyring import KeyRing, broker_key
from slipstream.broker.server.router import EventLoopRouter
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.replace import replace_file
from slipstream.wire.files.run_folder import BROKER_LOCK
from slipstream.wire.process.health import Health
from slipstream.wire.process.processes import locked, raise_descriptor_limit
from slipstream.wire.process.rate_limited_log import RateLimitedLog
from slipstream.wire.process.run_until import run_until
from slipstream.wire.process.stopping import stop_event
from slipstream.wire.settings.serve import ServedPlaces

_log = logging.getLogger(__name__)
_DESCRIPTORS = 4_096
_WORKERS = 1 / 4  # part of all descriptors that workers may use
_CLEAN_S, _SWEEP_S = 1.0, 600.0
_NEW_S = 3600.0  # files younger than that may be named by a report under way


async def serve(settings: CommandServerSettings, health: Health) -> None:
    """Run a command server until SIGTERM or SIGINT.

    Raises:
        ConfigError: another one has the run folder, or an address cannot be listened at.
    """
    stop = stop_event()
    health.drains_when(stop.is_set)
    raise_descriptor_limit(_DESCRIPTORS)
    run, section, places = settings.run, settings.serve, ServedPlaces(settings.run)
    for folder in (places.states, places.weights, places.versions, run.logs):
        folder.mkdir(parents=True, exist_ok=True)
    run.make_socket_folder()
    async with AsyncExitStack() as cleanup:
        lock = locked(run.folder / BROKER_LOCK, f"is the command server of {run.folder}")
        cleanup.enter_context(lock)
        log = _opened(settings, places)
        cleanup.callback(log.close)
        thread, waiters = LogThread(), Waiters()
        cleanup.callback(thread.close)
        ring = KeyRing(settings.keys_folder) if settings.broker.listen else None
        desk = WorkerDesk(log, thread, waiters, places, ring)
        await _open_to_workers(settings, desk, ring, cleanup)
        keys = TenantKeys(settings.keys_folder / "tenants")
        site = CommandSite(log, thread, waiters, keys, settings.served)
        try:
            host, port = await site.open(section.host, section.port)
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {section.host}:{section.port} (serve.host, serve.port): {error}"
            ) from error
        cleanup.push_async_callback(site.close)
        replace_file(places.address, f"http://{host}:{port}\n".encode(), durable=False)
        _log.info("tenants are served at http://%s:%d", host, port)
        cleaner = _Cleaner(log, thread, waiters, places)
        with health.main_loop(lambda: cleaner.num_rounds):
            await run_until(stop.wait(), cleaner.run(site, keys, ring))


def _opened(settings: CommandServerSettings, places: ServedPlaces) -> CommandLog:
    try:
        log = CommandLog(places.log, settings.serve, now=time.time())
        known = log.base_model(settings.run.model)
    except sqlite3.Error as error:
        raise ConfigError(f"the log of commands {places.log} cannot be read: {error}") from error
    if known != settings.run.model:
        log.close()
        raise ConfigError(
            f"{places.folder} has adapters of {known}, and run.model is {settings.run.model}: take "
            "another run.name"
        )
    return log


async def _open_to_workers(
    settings: CommandServerSettings, desk: WorkerDesk, ring: KeyRing | None, cleanup: AsyncExitStack
) -> None:
    """Listen for workers of this host, and with a key for those of others."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    cleanup.callback(context.term)
    limit, own = limit_of(_WORKERS), settings.run.socket("broker")
    own.unlink(missing_ok=True)  # left by one that was killed
    near = EventLoopRouter(context, f"ipc://{own}", on_message=desk.on_message, limit=limit)
    cleanup.callback(near.close)
    if ring is None:
        return
    doorkeeper = AsyncioAuthenticator(context)
    doorkeeper.start()
    cleanup.callback(doorkeeper.stop)
    doorkeeper.configure_curve_callback("slipstream", credentials_provider=ring)
    far = EventLoopRouter(
        context,
        settings.broker.listen,
        on_message=desk.on_message,
        secret_key=broker_key(settings.keys_folder).secret,
        limit=limit,
    )
    cleanup.callback(far.close)


class _Cleaner:
    """Forgets what is not wanted any more, and reads keys again."""

    def __init__(
        self, log: CommandLog, thread: LogThread, waiters: Waiters, places: ServedPlaces
    ) -> None:
        self._log = log
        self._thread = thread
        self._waiters = waiters
        self._places = places
        self._rarely = RateLimitedLog(_log)
        self.num_rounds = 0

    async def run(self, site: CommandSite, keys: TenantKeys, ring: KeyRing | None) -> None:
        """Clean up every second, and files now and then."""
        swept_s = 0.0
        while True:
            await asyncio.to_thread(keys.refresh)
            if ring is not None:
                ring.refresh()
            try:
                await site.note_fetched()
                if await self._thread(self._log.expire, now=time.time()):
                    self._waiters.wake_all()
                if time.monotonic() - swept_s > _SWEEP_S:
                    used = await self._thread(self._log.used_digests)
                    await asyncio.to_thread(sweep, self._places, used, now=time.time())
                    swept_s = time.monotonic()
            except (sqlite3.OperationalError, OSError) as error:  # a full disk, maybe
                self._rarely.say("nothing can be cleaned up in %s: %s", self._places.folder, error)
            self.num_rounds += 1
            await asyncio.sleep(_CLEAN_S)


def sweep(places: ServedPlaces, used: set[str], *, now: float) -> None:
    """Remove weights that nothing names any more, but for new ones."""
    folders = (*places.weights.iterdir(), *places.versions.iterdir())
    for path in folders:
        with suppress(FileNotFoundError):  # an unfinished one that has its name by now
            if path.stem not in used and now - path.stat().st_mtime > _NEW_S:
                _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
