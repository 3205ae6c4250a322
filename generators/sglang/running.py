"""An SGLang server and its client, for as long as a block of code needs them."""

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from slipstream.generators.config import GeneratorSettings
from slipstream.generators.engine import InferenceEngine, SamplingParams
from slipstream.generators.rollout import Sampler
from slipstream.generators.sglang.adapter_engine import AdapterEngine
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.generators.sglang.start_order import EngineNode
from slipstream.generators.text.codec import TextCodec
from slipstream.wire.errors import ChildDiedError
from slipstream.wire.messages.trajectory import ItemKind
from slipstream.wire.process.run_until import run_until

T = TypeVar("T")
_log = logging.getLogger(__name__)
_WATCH_S = 0.5


class OtherNodes(Protocol):
    """The other hosts' servers of one engine; implemented in ``generators/nodes``."""

    async def start(self) -> tuple[EngineNode, socket.socket]:
        """Order every node to start; return this node's part, and the store where ranks meet."""
        ...

    async def explained(self, work: Awaitable[T], process: SglangProcess) -> T:
        """Return the result of some work on this node's server; name the node that made it fail."""
        ...

    async def until_all_run(self) -> None:
        """Wait for the servers of every node to run."""
        ...

    async def watch(self) -> None:
        """Wait until another node ends, then raise."""
        ...

    async def dismiss(self, error: BaseException | None, *, is_orderly: bool = False) -> None:
        """Order the other nodes to end, as this one does."""
        ...


def sampling_by_item(settings: GeneratorSettings) -> dict[ItemKind, SamplingParams]:
    """Return the sampling parameters of training and evaluation responses."""
    sampling, evaluation = settings.sampling, settings.eval
    return {
        "train": SamplingParams(
            temperature=sampling.temperature,
            max_new_tokens=sampling.max_response_tokens,
            min_new_tokens=sampling.min_response_tokens,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_kept=sampling.max_kept_tokens if sampling.records_kept else 0,
            experts_of=settings.expert_layers,
            stop=sampling.stop,
            stop_token_ids=sampling.stop_token_ids,
        ),
        "eval": SamplingParams(
            temperature=evaluation.temperature,
            max_new_tokens=evaluation.max_response_tokens or sampling.max_response_tokens,
            top_p=evaluation.top_p,
            top_k=evaluation.top_k,
            stop=sampling.stop,
            stop_token_ids=sampling.stop_token_ids,
        ),
    }


def make_sampler(settings: GeneratorSettings, engine: InferenceEngine, codec: TextCodec) -> Sampler:
    """Return the sampler that turns leased groups into trajectories."""
    return Sampler(
        engine=engine,
        codec=codec,
        params=sampling_by_item(settings),
        run_seed=settings.run.seed if settings.sampling.seed_per_sibling else None,
    )


def engine_of(
    settings: GeneratorSettings, process: SglangProcess, tenant: str = ""
) -> SglangEngine:
    """Return the client of a server that answers, for one of the tenants that share it if any."""
    options: dict[str, Any] = {
        "request_timeout_s": settings.generators.request_timeout_s,
        "control_timeout_s": settings.weightbus.timeout_s,
        "load_timeout_s": settings.weightbus.receive_timeout_s,
        "num_ranks": settings.generators.num_ranks,
        "keeps_sessions": settings.keeps_sessions,
    }
    if settings.lora.is_named:
        return AdapterEngine(
            process.url,
            process.api_key,
            facts=settings.lora.facts().of_engine,
            kept=settings.num_kept_adapters,
            tenant=tenant,
            folder=process.scratch / "adapters",
            **options,
        )
    in_flight = settings.weightbus.in_flight
    return SglangEngine(process.url, process.api_key, in_flight=in_flight, **options)


@asynccontextmanager
async def running_engine(
    settings: GeneratorSettings,
    name: str,
    stopping: "asyncio.Task[object]",
    leader: OtherNodes | None = None,
) -> AsyncIterator[tuple[SglangProcess, SglangEngine] | None]:
    """Start a server, yield it once it answers, then end it and remove its leftovers.

    Yields None if ``stopping`` is done first. With a ``leader`` the server is the first of several
    of one engine, and all of the engine's hosts have come.

    Raises:
        ChildDiedError: the server ended, or did not answer in time.
        PeerLostError: another host's server did.
    """
    if stopping.done():
        yield None
        return
    if leader is None:
        process = SglangProcess.start(settings, name)
    else:
        node, store = await leader.start()
        with store:
            process = SglangProcess.start(settings, name, node, store)
    ready = asyncio.create_task(_ready(process, settings, leader))
    try:
        await asyncio.wait({stopping, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            yield None
            return
        ready.result()
        _log.info("engine answers at %s", process.url)
        engine = engine_of(settings, process)
        try:
            yield process, engine
        finally:
            await engine.close()
    finally:
        ready.cancel()
        if leader is not None:  # do this before other ranks miss ours
            await leader.dismiss(sys.exception(), is_orderly=stopping.done())
        await asyncio.to_thread(process.stop)


async def _ready(
    process: SglangProcess, settings: GeneratorSettings, leader: OtherNodes | None
) -> None:
    """Return once a server answers, and the engine's servers on other hosts run."""
    starting = process.until_ready(settings.generators.start_timeout_s)
    if leader is None:
        await starting
    else:
        await run_until(_all_ready(starting, process, leader), leader.watch())


async def _all_ready(
    starting: Coroutine[Any, Any, None], process: SglangProcess, leader: OtherNodes
) -> None:
    await leader.explained(starting, process)
    await leader.until_all_run()


async def watch_all(process: SglangProcess, leader: OtherNodes | None) -> None:
    """Wait until a server ends, or another host of its engine, then raise.

    Raises:
        ChildDiedError: the server ended.
        PeerLostError: another host did.
    """
    if leader is None:
        await watch(process)
    else:
        await run_until(leader.explained(watch(process), process), leader.watch())


async def watch(process: SglangProcess) -> None:
    """Wait until the server ends, then raise.

    Raises:
        ChildDiedError: the server ended.
    """
    while True:
        try:
            process.check_alive()
        except ChildDiedError:
            process.clean()
            raise
        await asyncio.sleep(_WATCH_S)
