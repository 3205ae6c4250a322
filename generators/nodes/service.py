"""Runs the ranks of an engine that are on another host than its node 0."""

import asyncio
import logging
import sys
from contextlib import AsyncExitStack
from typing import Any

from slipstream.generators.config import GeneratorSettings
from slipstream.generators.nodes.follower import EngineFollower
from slipstream.generators.nodes.host_fetcher import HostFetcher
from slipstream.generators.nodes.leader import FAILED
from slipstream.generators.nodes.membership import membership_of
from slipstream.generators.sglang.process import SglangProcess
from slipstream.generators.sglang.running import watch
from slipstream.generators.sglang.start_order import EngineNode
from slipstream.generators.versions.staging_room import room_for
from slipstream.weightbus.agent.tensor_set import model_tensors
from slipstream.weightbus.hosts.explained import explained
from slipstream.weightbus.hosts.follower import following
from slipstream.weightbus.hosts.membership import HostPlace
from slipstream.weightbus.hosts.verdict import ended_by
from slipstream.wire.errors import ChildDiedError, ConfigError, PeerLostError
from slipstream.wire.process.health import Health
from slipstream.wire.process.run_until import running, unless
from slipstream.wire.process.stopping import stop_event
from slipstream.wire.settings.rendezvous import Address

_log = logging.getLogger(__name__)
_DRAIN_S = 60.0  # wait for node 0 to hand its work back, when this node was asked to end


async def follow(
    settings: GeneratorSettings, name: str, place: HostPlace, health: Health | None = None
) -> None:
    """Run the ranks of one host for node 0, until it ends.

    Raises:
        ConfigError: node 0 refuses this node, or the ranks cannot start.
        NameTakenError: another process is this node.
        PeerLostError: node 0 is missing, or has ended before its time.
        ChildDiedError: the server of this host has ended.
    """
    stop = stop_event()
    health = health or Health()
    health.drains_when(stop.is_set)
    health.waits_for(f"node 0 of its engine at {place.address}")
    is_fp8 = settings.weightbus.is_fp8
    tensors = model_tensors(settings.model, dtype=settings.dtype, is_fp8=is_fp8)
    own = membership_of(settings, name, place)
    link = EngineFollower(own)
    async with AsyncExitStack() as cleanup:
        stopping: asyncio.Task[object] = asyncio.create_task(stop.wait())
        cleanup.callback(stopping.cancel)
        part = f"{name}-node-{place.node}"
        staging = await cleanup.enter_async_context(room_for(settings, part, tensors))
        keeping_up = following(link, lambda: ended_by(place.node, sys.exception()))
        linking = await cleanup.enter_async_context(keeping_up)
        order = await unless(link.until_started(), stopping, linking)
        if order is None:
            _end_as_told(link)
            return
        store = Address(order.host, order.port)
        node = EngineNode(place.node, place.nodes, store, staging.folder)
        process = SglangProcess.start(settings, name, node)
        cleanup.push_async_callback(asyncio.to_thread, process.stop)  # signs of life continue
        await link.report("starting")
        fetcher = HostFetcher(settings.weightbus, place.node, link, staging, tensors, own.key)
        async with running(_serve(process, settings, link), fetcher.run()) as jobs:
            with health.main_loop(lambda: link.num_heard, lambda: _missing(link)):
                await _until_ended(link, process, {*jobs, linking}, stopping)


def _missing(link: EngineFollower) -> str:
    return "" if link.state == "running" else "its engine starts"


async def _serve(process: SglangProcess, settings: GeneratorSettings, link: EngineFollower) -> None:
    """Report once the ranks of this host run; raise if they end."""
    await process.until_ready(settings.generators.start_timeout_s)
    _log.info("its ranks run")
    if link.state == "starting":
        await link.report("running")
    await watch(process)


async def _until_ended(
    link: EngineFollower,
    process: SglangProcess,
    jobs: "set[asyncio.Task[Any]]",
    stopping: "asyncio.Task[object]",
) -> None:
    """Wait until node 0 ends this node, or a job fails; if asked to end, let node 0 end first."""
    async with running(link.until_ended()) as (ended,):
        await asyncio.wait({*jobs, ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done() and not ended.done():
            _log.info("asked to end: node 0 hands its work back first")
            await link.report("stopping")
            again = stop_event()
            async with running(again.wait()) as (twice,):
                await asyncio.wait(
                    {*jobs, ended, twice}, return_when=asyncio.FIRST_COMPLETED, timeout=_DRAIN_S
                )
        await _raise_failure(link, process, jobs)
        _end_as_told(link)


async def _raise_failure(
    link: EngineFollower, process: SglangProcess, jobs: "set[asyncio.Task[Any]]"
) -> None:
    """Raise the error that ended a job, unless node 0 is the reason and reports it."""
    for job in jobs:
        if not job.done() or link.end is not None:
            continue
        try:
            job.result()
        except (ChildDiedError, ConfigError) as error:
            if (code := process.process.poll()) is None:
                raise
            own = process.reason()
            end = await explained(link, own, FAILED)
            if link.end is None and end.node != link.node:
                raise PeerLostError(link.line(end)) from error
            if link.end is None:  # node 0 gets the first line
                raise ChildDiedError(f"SGLang ended with code {code}: {own}\n{error}") from error


def _end_as_told(link: EngineFollower) -> None:
    """Raise node 0's reason, unless this node or node 0 was asked to end."""
    if link.end is not None and not link.end.is_orderly:
        raise PeerLostError(link.line(link.end))
