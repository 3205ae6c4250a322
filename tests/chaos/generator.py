"""A generator with the real agent loop, client and tokenizer around a scripted engine."""

import argparse
import asyncio
import random
from pathlib import Path

from slipstream.broker.client import BrokerClient
from slipstream.generators.config import GeneratorSettings, generator_settings
from slipstream.generators.lanes.lanes import lanes_of
from slipstream.generators.sglang.running import make_sampler
from slipstream.generators.text.codec import TextCodec
from slipstream.generators.worker import GeneratorWorker
from slipstream.wire.process.command_line import run_role
from slipstream.wire.process.logs import start_logging
from slipstream.wire.process.stopping import stop_event
from slipstream.wire.settings.load import load_table
from tests.support.drawn_images import NO_IMAGES
from tests.support.published import published
from tests.support.scripted_engine import ScriptedEngine


async def follow(folder: Path, engine: ScriptedEngine, worker: GeneratorWorker, seed: str) -> None:
    """Adopt what is published, soon or a little later."""
    rng = random.Random(seed)
    adopted = None
    while True:
        await asyncio.sleep(rng.uniform(0.01, 0.1))
        version = published(folder)
        if version is None or (adopted is not None and version <= adopted):
            continue
        worker.pausing()
        await engine.pause()
        await asyncio.sleep(rng.uniform(0.0, 0.02))
        await engine.label(version)
        await engine.resume()
        worker.adopted(version)
        adopted = version


async def serve(settings: GeneratorSettings, name: str, rate: float) -> None:
    stop = asyncio.create_task(stop_event().wait())
    codec = TextCodec(settings.model, settings.sampling)
    engine = ScriptedEngine(vocabulary=40, end_token_id=2, tokens_per_second=rate)
    client, welcome = await BrokerClient.connect(
        settings.run.broker_endpoint, role="generator", name=name, outage_s=settings.run.outage_s
    )
    worker = GeneratorWorker(
        client=client,
        images=NO_IMAGES,
        sampler=make_sampler(settings, engine, codec),
        lanes=lanes_of(settings),
        siblings_together=False,
        skips_bad_prompts=settings.skips_bad_prompts,
    )
    job = asyncio.create_task(worker.run(heartbeat_s=welcome.heartbeat_s))
    side = asyncio.create_task(follow(settings.run.folder, engine, worker, name))
    try:
        await asyncio.wait({stop, job, side}, return_when=asyncio.FIRST_COMPLETED)
        for task in (job, side):
            if task.done():
                task.result()
    finally:
        for task in (stop, job, side):
            task.cancel()
        await asyncio.gather(stop, job, side, return_exceptions=True)
        client.close()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--rate", type=float, default=200.0)
    arguments = parser.parse_args()
    settings = generator_settings(load_table(arguments.config))
    start_logging(arguments.name)

    def body() -> int:
        asyncio.run(serve(settings, arguments.name, arguments.rate))
        return 0

    return run_role(body)


if __name__ == "__main__":
    raise SystemExit(main())
