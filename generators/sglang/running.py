"""An SGLang server and its client, for as long as a block of code needs them."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from slipstream.generators.config import GeneratorSettings
from slipstream.generators.engine import InferenceEngine, SamplingParams
from slipstream.generators.rollout import Sampler
from slipstream.generators.sglang.adapter_engine import AdapterEngine
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.generators.text.codec import TextCodec
from slipstream.wire.errors import ChildDiedError
from slipstream.wire.messages.trajectory import ItemKind

_log = logging.getLogger(__name__)
_WATCH_S = 0.5


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


def engine_of(settings: GeneratorSettings, process: SglangProcess) -> SglangEngine:
    """Return the client of a server, which answers."""
    options: dict[str, Any] = {
        "request_timeout_s": settings.generators.request_timeout_s,
        "control_timeout_s": settings.weightbus.timeout_s,
        "load_timeout_s": settings.weightbus.receive_timeout_s,
        "num_ranks": settings.generators.num_ranks,
    }
    if settings.lora.is_named:
        return AdapterEngine(
            process.url,
            process.api_key,
            facts=settings.lora.facts(),
            kept=settings.num_kept_adapters,
            folder=process.scratch / "adapters",
            **options,
        )
    in_flight = settings.weightbus.in_flight
    return SglangEngine(process.url, process.api_key, in_flight=in_flight, **options)


@asynccontextmanager
async def running_engine(
    settings: GeneratorSettings, name: str, stopping: "asyncio.Task[object]"
) -> AsyncIterator[tuple[SglangProcess, SglangEngine] | None]:
    """Start a server, yield it once it answers, then end it and remove its leftovers.

    None when ``stopping`` is done before.

    Raises:
        ChildDiedError: the server ended, or did not answer in time.
    """
    process = SglangProcess.start(settings, name)
    ready = asyncio.create_task(process.until_ready(settings.generators.start_timeout_s))
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
        process.stop()


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
