"""Runs a broker until it is stopped."""

import asyncio
import gc
import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import zmq
from zmq.auth.asyncio import AsyncioAuthenticator

from slipstream.broker.config import BrokerSettings
from slipstream.broker.dashboard.items import RecordedItems
from slipstream.broker.dashboard.recorder import SnapshotRecorder, fsync_of
from slipstream.broker.dashboard.web import Dashboard
from slipstream.broker.data.prompts import Prompts, load_prompts
from slipstream.broker.identity import RunIdentity, write_identity
from slipstream.broker.ledger.events import Trained, decode_event
from slipstream.broker.ledger.scoring_queue import ScoringQueue
from slipstream.broker.report.run_report import RunReport
from slipstream.broker.report.telemetry import Telemetry
from slipstream.broker.report.trackers.background import BackgroundTrackers
from slipstream.broker.server.assembly import make_server
from slipstream.broker.server.keyring import BrokerKey, KeyRing, broker_key
from slipstream.broker.server.limits import ServerRules
from slipstream.broker.server.loop import BrokerServer
from slipstream.broker.startup import StartState, open_records, start_run, start_trackers
from slipstream.broker.store.base import TrajectoryStore
from slipstream.broker.store.event_log import CountedTrail, FolderTrail, Trail
from slipstream.broker.store.group_commit import GroupCommitter
from slipstream.broker.store.private_server import RedisServer
from slipstream.broker.store.redis import RedisStore
from slipstream.broker.store.store_opening import open_store, start_private_server
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.image_folder import ImageFolder
from slipstream.wire.files.keys import write_private
from slipstream.wire.files.run_folder import (
    BROKER_LOCK,
    IMAGES,
    NUM_EVENTS,
    PAGE_ADDRESS,
    PAGE_STATE,
    TRAIL,
)
from slipstream.wire.gpus import gpus_of_host
from slipstream.wire.process.health import Health
from slipstream.wire.process.processes import locked, raise_descriptor_limit
from slipstream.wire.process.run_until import run_until
from slipstream.wire.process.stopping import stop_event
from slipstream.wire.settings.sections import RunSection

_log = logging.getLogger(__name__)
_CLOCK_S = 1.0
_LEAST_DESCRIPTORS = 256
_LEAST_LISTENING = 4_096  # strangers are counted, and a few hundred more may come meanwhile
_FEW_DESCRIPTORS = 4_096
# Items hold no cycles, and a collection of all of them stops the loop.
_GARBAGE_AFTER = (20_000, 10, 50)


async def serve(
    settings: BrokerSettings, *, restarted: bool = False, health: Health | None = None
) -> None:
    """Run the broker until SIGTERM or SIGINT; a child or task that fails ends it with an error.

    Args:
        settings: Sections of the broker.
        restarted: This broker replaces one that died in the same run.
        health: State for probes.
    """
    stop = stop_event()
    health = health or Health()
    health.drains_when(stop.is_set)
    health.waits_for("its store to open")
    _raise_descriptor_limit(settings)
    gc.disable()  # the state read back stays
    run, broker = settings.run, settings.broker
    run.logs.mkdir(parents=True, exist_ok=True)
    run.make_socket_folder()
    telemetry = Telemetry(run)
    images = ImageFolder(run.folder / IMAGES, most_bytes=broker.image_budget_bytes)
    prompts = load_prompts(settings, images)
    telemetry.data = prompts.counts()
    async with AsyncExitStack() as cleanup:
        _take_lock(run, cleanup, restarted=restarted)
        redis_server = await start_private_server(settings, cleanup)
        store = await open_store(settings, redis_server, restarted=restarted)
        cleanup.push_async_callback(store.close)
        health.waits_for("logging.trackers to start")
        trackers = await start_trackers(settings)
        cleanup.callback(trackers.close)
        health.waits_for("its ledger to be read back")
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        cleanup.callback(context.term)
        ring, key = await _open_to_others(settings, context, cleanup)
        beginning, trail = await _begin(settings, prompts, store, restarted=restarted)
        committer = GroupCommitter(store)
        server = await _make_server(
            settings, beginning, trail, store, committer, telemetry, trackers, ring, images
        )
        cleanup.callback(server.close_records)
        gc.freeze()
        gc.set_threshold(*_GARBAGE_AFTER)
        gc.enable()
        telemetry.store_trouble = lambda: store_trouble(store, redis_server)
        jobs = [committer.run(), store.watch(), end_after(run.max_hours, server.plan_stop)]
        if broker.dashboard.enabled:
            recorder = await _open_dashboard(settings, server, store, beginning.events, cleanup)
            jobs.append(recorder.run())
        if redis_server is not None:
            jobs.append(redis_server.keep_alive(outage_s=run.outage_s))
        endpoint = f"ipc://{_own_socket(run, beginning.generation, cleanup)}"
        serving = server.serve(context, endpoint, listen=broker.listen, key=key)
        with health.main_loop(lambda: server.num_ticks, lambda: _missing(store, server)):
            await run_until(stop.wait(), serving, *jobs)


def _raise_descriptor_limit(settings: BrokerSettings) -> None:
    least = _LEAST_LISTENING if settings.broker.listen else _LEAST_DESCRIPTORS
    limit = raise_descriptor_limit(least)
    if limit < _FEW_DESCRIPTORS:
        _log.warning("this broker may open %d files; each client needs one (ulimit -Hn)", limit)


def _missing(store: RedisStore, server: BrokerServer) -> str:
    """Return why the broker is not ready; empty if it is."""
    if not store.is_answering:
        return "its store does not answer"
    return "" if server.num_ticks else "it does not listen yet"


def store_trouble(store: RedisStore, server: RedisServer | None) -> str:
    """Return what a run waits for while nothing is acknowledged; empty while it is."""
    if store.is_answering:
        return ""
    if server is not None and not server.has_room():
        what = f"room on the disk of {server.folder} (run.dir), which is full"
    else:
        what = "Redis, which does not answer (broker.redis.url)"
    return f"{what}: nothing is acknowledged until then"


def _take_lock(run: RunSection, cleanup: AsyncExitStack, *, restarted: bool) -> None:
    """Take the run folder's lock before claiming the store.

    Otherwise a second broker started by mistake would take over a shared store. A restarted
    broker may do so: its predecessor may be stopped, and cannot write any more.

    Raises:
        ConfigError: there is one.
    """
    try:
        lock = locked(run.folder / BROKER_LOCK, f"is the broker of the run in {run.folder}")
        cleanup.enter_context(lock)
    except ConfigError as error:
        if not restarted:
            raise
        _log.warning("%s; this broker takes its place (--restarted)", error)


async def _begin(
    settings: BrokerSettings, prompts: Prompts, store: TrajectoryStore, *, restarted: bool
) -> tuple[StartState, Trail]:
    """Read the ledger back, and the trail of its events; both go on from the same event."""
    started = time.monotonic()
    folder, max_bytes = settings.run.folder, settings.broker.max_trail_bytes
    kept = FolderTrail(folder / TRAIL, max_bytes) if max_bytes else Trail()
    trail = CountedTrail(folder / NUM_EVENTS, kept)
    first_event = trail.next_event
    beginning = await start_run(
        settings, prompts, store, restarted=restarted, first_event=first_event
    )
    book = beginning.ledger.book
    if (lost := first_event - book.state.num_events) > 0:
        _log.error(
            "the store lacks the last %d events that it acknowledged: the run continues at step "
            "%d, where the rest of its events ends, as another life",
            lost,
            book.step,
        )
        trail.cut_from(book.state.num_events)
    first = book.state.num_events - len(beginning.events)
    trail.append(first, time.time(), beginning.events)
    _log.info(
        "generation %d of the broker: %d groups under way, read in %.2f s",
        beginning.generation,
        len(book.groups),
        time.monotonic() - started,
    )
    return beginning, trail


async def _make_server(
    settings: BrokerSettings,
    beginning: StartState,
    trail: Trail,
    store: TrajectoryStore,
    committer: GroupCommitter,
    telemetry: Telemetry,
    trackers: BackgroundTrackers,
    ring: KeyRing | None,
    images: ImageFolder,
) -> BrokerServer:
    """Build the server around a ledger."""
    run, broker, ledger = settings.run, settings.broker, beginning.ledger
    telemetry.versions["redis"] = await store.server_version()
    durability = await store.durability()
    if "always" not in durability:
        _log.warning("%s (broker.redis.fsync)", durability)
    scoring = ScoringQueue(lease_s=broker.lease_s)
    report = RunReport(
        ledger.book,
        scoring,
        telemetry,
        await open_records(settings, ledger, trackers, store, trained_steps(beginning.events)),
        run_name=run.name,
        store_name=f"{telemetry.versions['redis']}, {durability}",
        generation=beginning.generation,
    )
    rules = ServerRules(
        max_message_bytes=broker.max_message_bytes,
        max_requests_per_s=broker.max_requests_per_s,
        scores_inline=settings.reward.inline,
        environment_scores=settings.environment.is_named,
        cache_bytes=broker.cache_bytes,
    )
    on_epoch = _remembered(run, beginning.identity)
    server = make_server(
        ledger,
        scoring,
        store,
        committer,
        report,
        rules,
        images,
        keys=ring,
        trail=trail,
        on_epoch=on_epoch,
    )
    for group in ledger.book.groups.values():
        if group.item == "eval" and group.headers:  # their part of eval/ is kept in memory
            keys = group.trajectory_keys()
            for key, stored in zip(keys, await store.fetch(keys), strict=True):
                server.frames.pin(key, stored)  # a group at a time, as much as there is room for
    return server


def _remembered(run: RunSection, identity: RunIdentity) -> Callable[[int], None]:
    """Return a function that writes epochs into the run folder; unwritten, none is granted."""
    newest = identity

    def granted(epoch: int) -> None:
        nonlocal newest
        if epoch > newest.epoch:
            write_identity(run.folder, newest.granted(epoch))
            newest = newest.granted(epoch)

    return granted


def _own_socket(run: RunSection, generation: int, cleanup: AsyncExitStack) -> Path:
    """Return this broker's socket, after making the one that all roles know a link to it.

    A broker whose place was taken removes its own socket when it ends, not its successor's.
    """
    own, known = run.socket(f"broker-{generation}"), run.socket("broker")
    for left in known.parent.glob("broker-*.sock*"):
        left.unlink()  # left by brokers that were killed
    new = known.with_name(f".{own.name}")
    new.unlink(missing_ok=True)
    new.symlink_to(own.name)
    new.replace(known)

    def remove() -> None:
        own.unlink(missing_ok=True)
        if known.is_symlink() and known.readlink().name == own.name:
            known.unlink()

    cleanup.callback(remove)
    return own


async def _open_dashboard(
    settings: BrokerSettings,
    server: BrokerServer,
    store: RedisStore,
    events: Iterable[bytes],
    cleanup: AsyncExitStack,
) -> SnapshotRecorder:
    folder = settings.run.folder
    recorder = SnapshotRecorder(
        server.report.status,
        folder / PAGE_STATE,
        letters=server.report.dead_letters,
        high_water_bytes=settings.broker.high_water_bytes,
        fsync=settings.broker.redis.known_fsync or fsync_of(await store.durability()),
        missed=trained_steps(events),
        shared_cores=await asyncio.to_thread(_shared_cores, settings),
    )
    page = settings.broker.dashboard
    dashboard = Dashboard(
        recorder, RecordedItems(folder), host=page.host, port=page.port, folder=folder
    )
    cleanup.push_async_callback(dashboard.stop)
    address = await dashboard.start()
    address_file = folder / PAGE_ADDRESS
    write_private(address_file, address + "\n")

    def remove_address() -> None:  # not that of a successor's page
        with suppress(OSError):
            if address_file.read_text().strip() == address:
                address_file.unlink()

    cleanup.callback(remove_address)
    _log.info("dashboard at %s", address_file)
    return recorder


def _shared_cores(settings: BrokerSettings) -> int:
    """Return the CPU cores that all roles share; 0 with other hosts or with GPUs."""
    if settings.broker.listen or gpus_of_host():
        return 0
    return len(os.sched_getaffinity(0))


def trained_steps(events: Iterable[bytes]) -> dict[int, dict[str, float]]:
    """Return the figures of the learner steps among events, by step; of one done twice, the last.

    A broker that was killed could not write its last seconds for the page.
    """
    found: dict[int, dict[str, float]] = {}
    for event in map(decode_event, events):
        if isinstance(event, Trained):
            while found and next(reversed(found)) >= event.version.step:
                found.popitem()
            found[event.version.step] = event.metrics
    return found


async def _open_to_others(
    settings: BrokerSettings, context: "zmq.Context[zmq.Socket[bytes]]", cleanup: AsyncExitStack
) -> tuple[KeyRing | None, BrokerKey | None]:
    """Start to check keys, if roles on other hosts may connect."""
    if not settings.broker.listen:
        return None, None
    folder = settings.keys_folder
    key, ring = broker_key(folder), KeyRing(folder)
    doorkeeper = AsyncioAuthenticator(context)
    doorkeeper.start()
    cleanup.callback(doorkeeper.stop)
    doorkeeper.configure_curve_callback("slipstream", credentials_provider=ring)
    return ring, key


async def end_after(
    hours: float, plan_stop: Callable[[str], None], *, every_s: float = _CLOCK_S
) -> None:
    """End the run in order when its time is up; 0 hours is no limit."""
    started = time.monotonic()
    while True:
        await asyncio.sleep(every_s)
        if hours and time.monotonic() - started > hours * 3600:
            plan_stop(f"run.max_hours = {hours:g} have passed")
            hours = 0.0  # logged once
