"""Builds one generator from its settings and runs it until it is done or stopped."""

import asyncio
import functools
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from slipstream.broker.client import BrokerClient
from slipstream.broker.images import ImageFetcher, LocalImages
from slipstream.broker.reward_worker.pool import RewardPool
from slipstream.generators.config import GeneratorSettings
from slipstream.generators.environments.turn_sampler import TurnSampler
from slipstream.generators.lanes.lanes import Lanes, lanes_of, largest_group
from slipstream.generators.lanes.shares import SharedLanes
from slipstream.generators.nodes.leader import EngineLeader, leading_engine
from slipstream.generators.rollout import Sampler
from slipstream.generators.sglang.adapter_engine import AdapterEngine
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.generators.sglang.running import engine_of, make_sampler, running_engine, watch_all
from slipstream.generators.text.codec import TextCodec
from slipstream.generators.versions.probe_audit import ProbeAudit
from slipstream.generators.versions.probe_noise import Noise
from slipstream.generators.versions.staging_room import room_for
from slipstream.generators.versions.weights import take_weights
from slipstream.generators.worker import GeneratorWorker
from slipstream.weightbus.agent.host_identity import host_identity
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.subscriber import Subscriber
from slipstream.weightbus.agent.tensor_set import TensorSet, model_tensors
from slipstream.weightbus.hosts.membership import HostPlace
from slipstream.weightbus.net.compatibility import installed_libraries
from slipstream.weightbus.transports import FALLBACK, TRANSPORTS
from slipstream.wire.errors import (
    ChildDiedError,
    ConfigError,
    PeerLostError,
    QuarantineError,
    SlipstreamError,
    known_errors,
    text_of,
)
from slipstream.wire.files.keys import read_client_key
from slipstream.wire.files.tenant_end import write_tenant_end
from slipstream.wire.messages.broker import Welcome
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import Join
from slipstream.wire.models.adapters import adapter_shapes
from slipstream.wire.models.tokenizer_hash import tokenizer_hash
from slipstream.wire.process.health import Health
from slipstream.wire.process.logs import logging_for
from slipstream.wire.process.run_until import Job, run_until, running, unless
from slipstream.wire.process.stopping import stop_event
from slipstream.wire.settings.tenants import Tenant

_log = logging.getLogger(__name__)
Watch = Coroutine[Any, Any, None]


async def serve(
    settings: GeneratorSettings,
    name: str,
    health: Health | None = None,
    place: HostPlace | None = None,
) -> None:
    """Run a generator, which ends if its engine does; probes see its ``health``.

    Its engine answers one run, or the tenants of a pool. ``place`` is node 0 of an engine on
    several hosts.
    """
    stop, health = stop_event(), health or Health()
    health.drains_when(stop.is_set)
    async with AsyncExitStack() as cleanup:
        stopping: asyncio.Task[object] = asyncio.create_task(stop.wait())
        cleanup.callback(stopping.cancel)
        tensors = _tensors(settings)
        staging = None
        if not settings.tenants:
            staging = await cleanup.enter_async_context(room_for(settings, name, tensors))
        leader = await cleanup.enter_async_context(
            leading_engine(settings, name, place, stop, health)
        )
        health.waits_for("its engine to start")
        starting = running_engine(settings, name, stopping, leader)
        started = await cleanup.enter_async_context(starting)
        if started is None:
            return
        process, engine = started
        if staging is None:
            await _serve_tenants(settings, name, process, stopping, health)
            return
        health.waits_for(f"the broker at {settings.run.broker_endpoint}")
        watch = functools.partial(watch_all, process, leader)
        run = await _begin(
            settings, name, engine, lanes_of(settings), staging, stopping, watch, leader, cleanup
        )
        if run is None:
            return
        with health.main_loop(run.worker.signs, run.worker.missing):
            await _work(run.worker, (*run.jobs, watch()), stopping)


@dataclass(frozen=True, slots=True)
class _RunWork:
    """The work of one run in an engine."""

    worker: GeneratorWorker
    jobs: tuple[Job, ...]  # the worker's first


async def _begin(
    settings: GeneratorSettings,
    name: str,
    engine: SglangEngine,
    lanes: Lanes,
    staging: Staging,
    stopping: "asyncio.Task[object]",
    watch: Callable[[], Watch],
    leader: EngineLeader | None,
    cleanup: AsyncExitStack,
) -> _RunWork | None:
    """Connect to a run's broker; return None if asked to stop before it answers.

    Raises:
        SlipstreamError: the broker does not answer, or ``watch`` ends.
    """
    rewards = await _inline_rewards(settings, cleanup)
    sampler = make_sampler(settings, engine, TextCodec(settings.model, settings.sampling))
    turn_sampler = await _turn_sampler(settings, sampler, cleanup)
    connected = await _connected(settings, name, stopping, watch())
    if connected is None:
        return None
    client, welcome = connected
    cleanup.callback(client.close)
    folder = cleanup.enter_context(TemporaryDirectory(prefix="slipstream-images-"))
    fetcher = ImageFetcher(client)
    audit = ProbeAudit(engine, _noise(settings))
    worker = GeneratorWorker(
        client=client,
        images=LocalImages(fetcher.fetch_readable, Path(folder), store=fetcher.store),
        sampler=sampler,
        turn_sampler=turn_sampler,
        lanes=lanes,
        siblings_together=settings.generators.siblings_together,
        skips_bad_prompts=settings.skips_bad_prompts,
        rewards=rewards,
        max_credits=settings.reward.credits,
        engine_patience_s=settings.weightbus.timeout_s,
        audit=audit,
    )
    tensors = _tensors(settings)
    subscriber = _subscriber(settings, name, engine, tensors, staging, worker, audit, leader)
    return _RunWork(
        worker,
        (
            worker.run(
                heartbeat_s=welcome.heartbeat_s, more_counters=subscriber.traffic.as_counters
            ),
            take_weights(subscriber, settings.run, client),
            audit.run(),
        ),
    )


async def _serve_tenants(
    settings: GeneratorSettings,
    name: str,
    process: SglangProcess,
    stopping: "asyncio.Task[object]",
    health: Health,
) -> None:
    """Answer for all tenants until each has ended, or the engine has.

    Raises:
        ChildDiedError: the engine ended.
        QuarantineError: it computes something else than the learner.
    """
    _log.info(
        "the engine keeps %d versions of adapters, of rank %d at most, for %d tenants",
        settings.num_kept_adapters,
        settings.lora.rank,
        len(settings.tenants),
    )
    shared = SharedLanes(lanes_of(settings))
    workers: dict[str, GeneratorWorker] = {}

    async def serve_tenant(tenant: Tenant[GeneratorSettings]) -> None:
        with logging_for(tenant.name):
            try:
                await _serve_tenant(tenant, name, process, stopping, shared, workers)
            except (SlipstreamError, ExceptionGroup) as error:
                known = known_errors(error)
                of_engine = any(
                    isinstance(reason, ChildDiedError | QuarantineError) for reason in known
                )
                if of_engine or not known:
                    raise
                _log.error("this tenant ends here: %s", known[0])
                if not isinstance(known[0], PeerLostError):  # then its broker waits for answers
                    why = f"{name} gave it up: {text_of(known[0])}"
                    write_tenant_end(tenant.settings.run.folder, why)
            finally:
                workers.pop(tenant.name, None)

    async def serve_all() -> None:
        async with asyncio.TaskGroup() as group:
            for tenant in settings.tenants:
                group.create_task(serve_tenant(tenant))

    def signs() -> tuple[object, ...]:
        return tuple(worker.signs() for worker in workers.values())

    def missing() -> str:
        reasons = [worker.missing() for worker in workers.values()]
        return "" if "" in reasons else next(iter(reasons), "no broker of a tenant answers yet")

    with health.main_loop(signs, missing):
        await run_until(serve_all(), watch_all(process, None))


async def _serve_tenant(
    tenant: Tenant[GeneratorSettings],
    name: str,
    process: SglangProcess,
    stopping: "asyncio.Task[object]",
    shared: SharedLanes,
    workers: dict[str, GeneratorWorker],
) -> None:
    """Answer for one tenant until its run ends."""
    settings = tenant.settings
    async with AsyncExitStack() as own:
        engine = engine_of(settings, process, tenant.name)
        own.push_async_callback(engine.close)
        staging = await own.enter_async_context(room_for(settings, name, _tensors(settings)))
        lanes = lanes_of(settings, is_tenant=True)
        watch = functools.partial(watch_all, process, None)
        run = await _begin(settings, name, engine, lanes, staging, stopping, watch, None, own)
        if run is None:
            return
        shared.open(tenant.name, lanes, weight=tenant.weight, group=largest_group(settings))
        own.callback(shared.close, tenant.name)
        workers[tenant.name] = run.worker
        await _work(run.worker, run.jobs, stopping)
    _log.info("tenant %s has ended; %d others remain", tenant.name, len(workers) - 1)


def _tensors(settings: GeneratorSettings) -> TensorSet:
    """Return the tensors that a version of the engine's weights has."""
    is_fp8 = settings.weightbus.is_fp8
    tensors = model_tensors(settings.model, dtype=settings.dtype, is_fp8=is_fp8)
    if not settings.lora.is_named:
        return tensors
    return TensorSet(adapter_shapes(tensors.shapes, settings.lora.facts()), settings.dtype)


def _noise(settings: GeneratorSettings) -> Noise:
    """Return the noise of an engine before its first probe."""
    limit = settings.weightbus.probe_limit
    dtype = "fp8" if settings.weightbus.is_fp8 else settings.dtype
    return Noise(dtype, has_experts=settings.has_experts, limit=limit)


async def _inline_rewards(
    settings: GeneratorSettings, cleanup: AsyncExitStack
) -> RewardPool | None:
    """Start reward functions in this generator, if the settings ask for it."""
    if not settings.reward.inline:
        return None
    rewards = await RewardPool.start(settings.reward, hide=settings.hidden)
    cleanup.push_async_callback(rewards.close)
    if rewards.needs_groups:
        raise ConfigError(
            "reward.inline scores answers one by one, but a reward function takes whole groups: "
            "leave it to reward workers (reward.inline = false)"
        )
    return rewards


async def _turn_sampler(
    settings: GeneratorSettings, sampler: Sampler, cleanup: AsyncExitStack
) -> TurnSampler | None:
    """Start the environment of trajectories of several turns, if the settings name one."""
    if not settings.environment.is_named:
        return None
    turns = TurnSampler.running(
        settings.environment,
        settings.sampling,
        sampler,
        hide=settings.hidden,
        must_reward=settings.has_no_scorer,
    )
    return await cleanup.enter_async_context(turns)


async def _connected(
    settings: GeneratorSettings, name: str, stopping: "asyncio.Task[object]", watch: Watch
) -> tuple[BrokerClient, Welcome] | None:
    """Connect to the broker; return None if the generator is asked to stop or its engine ends."""
    connecting = BrokerClient.connect(
        settings.run.broker_endpoint,
        role="generator",
        name=name,
        packages={"sglang": version("sglang"), "torch": version("torch")},
        tokenizer=tokenizer_hash(settings.model),
        outage_s=settings.run.outage_s,
        key_file=settings.run.key_file,
    )
    watching: asyncio.Task[object] = asyncio.create_task(watch)
    try:
        return await unless(connecting, stopping, watching)
    finally:
        watching.cancel()


async def _work(
    worker: GeneratorWorker, jobs: Sequence[Job], stopping: "asyncio.Task[object]"
) -> None:
    """Run jobs, the worker's first, until one ends or the generator is asked to stop."""
    async with running(*jobs) as (job, *others):
        ends = {stopping, job, *others}
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if stopping in done:
            _log.info("asked to stop")
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)
            await worker.hand_back()
        for task in done:
            if isinstance(error := task.exception(), QuarantineError):
                await _leave_quarantined(worker, job, error)
            task.result()


async def _leave_quarantined(
    worker: GeneratorWorker, job: "asyncio.Task[object]", reason: QuarantineError
) -> None:
    """Return the work of an engine that is not trusted, and report the reason."""
    _log.error("%s; its work goes back, and its answers since then are not sent", reason)
    job.cancel()
    await asyncio.gather(job, return_exceptions=True)
    try:
        await worker.report_quarantine(str(reason))
        await worker.hand_back()
    except SlipstreamError as error:  # the leases lapse
        _log.warning("the broker was not told: %s", error)


def _subscriber(
    settings: GeneratorSettings,
    name: str,
    engine: SglangEngine,
    tensors: TensorSet,
    staging: Staging,
    worker: GeneratorWorker,
    audit: ProbeAudit,
    leader: EngineLeader | None,
) -> Subscriber:
    """Connect an engine to the weight bus, by a transport that reaches the learner's host."""
    bus, wanted = settings.weightbus, settings.transport
    is_far = bool(settings.run.broker)
    obstacle = TRANSPORTS[wanted].why_not_from_afar(bus.host) if is_far else ""
    if obstacle:
        _log.warning("weights come over %s instead of %s: %s", FALLBACK, wanted, obstacle)
    libraries = installed_libraries()
    is_apart = leader is not None or isinstance(engine, AdapterEngine)

    def pausing() -> None:
        audit.pausing()
        worker.pausing()

    def adopted(version: PolicyVersion, stood_s: float | None) -> None:
        audit.resumed()
        worker.adopted(version, stood_s)

    return Subscriber(
        engine,
        join=Join(
            name=name,
            incarnation=secrets.token_hex(4),
            device=settings.device,
            torch_version=libraries.torch_version,
            nccl_version=libraries.nccl_version,
            num_ranks=settings.generators.num_ranks,
            attention_groups=settings.generators.attention_groups,
            expert_groups=settings.generators.expert_groups,
            transport=FALLBACK if obstacle else wanted,
            host="" if is_apart else host_identity(),
        ),
        tensors=tensors,
        staging=staging,
        silence_s=bus.member_silence_s,
        fetch_timeout_s=bus.timeout_s,
        on_pause=pausing,
        on_adopt=adopted,
        on_probe=audit.adopted,
        key=read_client_key(Path(settings.run.key_file)) if is_far else None,
        adapters=engine if isinstance(engine, AdapterEngine) else None,
        forward=bus.forward if is_far else "",  # a learner's host has its relay
        forwards_plain=bus.bulk == "plain",
        connections=bus.connections,
        others=leader,
    )
