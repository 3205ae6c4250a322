"""Builds one generator from its settings and runs it until it is done or asked to end."""

import asyncio
import logging
import secrets
from importlib.metadata import version

from broker.client import BrokerClient
from generators.config import GeneratorSettings
from generators.engine import SamplingParams
from generators.prompting import TextCodec
from generators.sglang_engine import SglangEngine
from generators.sglang_process import SglangProcess
from generators.worker import GeneratorWorker
from weightbus.subscriber import Subscriber
from weightbus.tensor_set import model_shapes
from wire.bus import Join
from wire.errors import ChildDiedError
from wire.stopping import stop_event
from wire.trajectory import ItemKind

_log = logging.getLogger(__name__)
_WATCH_S = 0.5


def sampling_by_item(settings: GeneratorSettings) -> dict[ItemKind, SamplingParams]:
    """Return how training and evaluation responses are sampled."""
    sampling = settings.sampling
    return {
        "train": SamplingParams(
            temperature=sampling.temperature,
            max_new_tokens=sampling.max_response_tokens,
            min_new_tokens=sampling.min_response_tokens,
        ),
        "eval": SamplingParams(
            temperature=settings.eval.temperature, max_new_tokens=sampling.max_response_tokens
        ),
    }


async def serve(settings: GeneratorSettings, name: str) -> None:
    """Run a generator. An engine that ends takes the generator with it."""
    stop = stop_event()
    codec = TextCodec(settings.model, max_prompt_tokens=settings.sampling.max_prompt_tokens)
    shapes = model_shapes(settings.model)
    process = SglangProcess.start(settings, name)
    stopping = asyncio.create_task(stop.wait())
    try:
        ready = asyncio.create_task(process.until_ready(settings.generators.start_timeout_s))
        await asyncio.wait({stopping, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            return
        ready.result()
        _log.info("engine answers at %s", process.url)
        engine = SglangEngine(
            process.url,
            process.api_key,
            request_timeout_s=settings.generators.request_timeout_s,
            control_timeout_s=settings.weightbus.timeout_s,
        )
        try:
            await _work(settings, name, process, engine, codec, shapes, stopping)
        finally:
            await engine.close()
    finally:
        stopping.cancel()
        process.stop()


async def _work(
    settings: GeneratorSettings,
    name: str,
    process: SglangProcess,
    engine: SglangEngine,
    codec: TextCodec,
    shapes: dict[str, tuple[int, ...]],
    stopping: "asyncio.Task[object]",
) -> None:
    client, welcome = await BrokerClient.connect(
        settings.run.endpoint("broker"),
        role="generator",
        name=name,
        packages={"sglang": version("sglang"), "torch": version("torch")},
    )
    worker = GeneratorWorker(
        client=client,
        engine=engine,
        codec=codec,
        sampling=sampling_by_item(settings),
        max_sequences=settings.generators.max_sequences,
        siblings_together=settings.generators.siblings_together,
    )
    subscriber = Subscriber(
        engine,
        join=Join(
            name=name,
            incarnation=secrets.token_hex(4),
            device=settings.device,
            torch_version=version("torch"),
        ),
        shapes=shapes,
        on_pause=worker.pausing,
        on_adopt=worker.adopted,
    )
    job = asyncio.create_task(worker.run(heartbeat_s=welcome.heartbeat_s))
    others = [
        asyncio.create_task(subscriber.run(settings.run.endpoint("weightbus"))),
        asyncio.create_task(_watch(process)),
    ]
    try:
        done, _ = await asyncio.wait({stopping, job, *others}, return_when=asyncio.FIRST_COMPLETED)
        if stopping in done:
            _log.info("asked to end")
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)
            await worker.hand_back()
        for task in done:
            task.result()
    finally:
        for task in (job, *others):
            task.cancel()
        await asyncio.gather(job, *others, return_exceptions=True)
        client.close()


async def _watch(process: SglangProcess) -> None:
    while True:
        try:
            process.check_alive()
        except ChildDiedError:
            process.clean()
            raise
        await asyncio.sleep(_WATCH_S)
