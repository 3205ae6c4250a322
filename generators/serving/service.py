"""Runs a generator of a command server: an engine, and a loop that asks for samples."""

import asyncio
import logging
from contextlib import AsyncExitStack

from slipstream.broker.commands.link import CommandLink
from slipstream.generators.config import GeneratorSettings
from slipstream.generators.serving.engine import ServingEngine
from slipstream.generators.sglang.running import running_engine, watch
from slipstream.wire.errors import EngineError, EngineRefusedError, ProtocolError, RefusedError
from slipstream.wire.messages.codec import Frame, decode_sample, encode
from slipstream.wire.messages.commands import (
    CommandFailed,
    FetchVersion,
    HandedSamples,
    Outcome,
    ReportSample,
    Sample,
    TakeSamples,
)
from slipstream.wire.process.health import Health
from slipstream.wire.process.run_until import run_until
from slipstream.wire.process.stopping import stop_event

_log = logging.getLogger(__name__)
_TRIES, _AGAIN_S = 3, 2.0  # tries of a sample without an answer, and the pause between them
_WAIT_S = 5.0  # wait for samples; well below the silence after which others get this one's


async def serve_samples(settings: GeneratorSettings, name: str, health: Health) -> None:
    """Answer samples until SIGTERM or SIGINT; ends if its engine does."""
    stop = stop_event()
    health.drains_when(stop.is_set)
    async with AsyncExitStack() as cleanup:
        stopping: asyncio.Task[object] = asyncio.create_task(stop.wait())
        cleanup.callback(stopping.cancel)
        health.waits_for("its engine to start")
        started = await cleanup.enter_async_context(running_engine(settings, name, stopping))
        if started is None:
            return
        process, _ = started
        link = CommandLink(settings.run)
        cleanup.callback(link.close)

        async def fetch(version: str) -> tuple[bytes, bytes]:
            _, frames = await link.ask(FetchVersion(version=version))
            if len(frames) != 2:
                raise ProtocolError(f"two files of a version are expected, got {len(frames)}")
            return bytes(frames[0]), bytes(frames[1])

        engine = ServingEngine(
            process.url,
            process.api_key,
            kept=settings.num_kept_adapters,
            folder=process.scratch / "adapters",
            fetch=fetch,
            request_timeout_s=settings.generators.request_timeout_s,
            control_timeout_s=settings.weightbus.timeout_s,
            load_timeout_s=settings.weightbus.receive_timeout_s,
            num_ranks=settings.generators.num_ranks,
        )
        cleanup.push_async_callback(engine.close)
        worker = SampleWorker(link, engine, name, settings.generators.max_sequences)
        with health.main_loop(lambda: worker.num_rounds):
            await run_until(stop.wait(), worker.run(), watch(process))


class SampleWorker:
    """Takes samples as there is room for them, and reports each when it is drawn."""

    def __init__(self, link: CommandLink, engine: ServingEngine, name: str, lanes: int) -> None:
        self._link = link
        self._engine = engine
        self._name = name
        self._lanes = lanes  # answers at a time; one sample of more is taken alone
        self._drawing: dict[str, tuple[int, asyncio.Task[None]]] = {}  # answers of each sample
        self.num_rounds = 0

    async def run(self) -> None:
        """Draw samples until it is cancelled, or the server is gone for good."""
        try:
            while True:
                await self._round()
                self.num_rounds += 1
        finally:
            tasks = [task for _, task in self._drawing.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _round(self) -> None:
        room = self._lanes - sum(count for count, _ in self._drawing.values())
        if room <= 0:
            tasks = [task for _, task in self._drawing.values()]
            await asyncio.wait(tasks, timeout=_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        request = TakeSamples(
            name=self._name,
            held=tuple(self._drawing),
            room=max(0, room),
            wait_s=_WAIT_S if room > 0 else 0.0,
        )
        answer, frames = await self._link.ask(request, wait_s=request.wait_s)
        if not isinstance(answer, HandedSamples):
            return
        for name in answer.cancelled:
            if name in self._drawing:
                self._drawing[name][1].cancel()
        for name, body in zip(answer.requests, frames, strict=True):
            self._begin(name, body)

    def _begin(self, name: str, body: Frame) -> None:
        if name in self._drawing:
            return
        sample = decode_sample(body)
        task = asyncio.create_task(self._draw(name, sample))
        self._drawing[name] = (sample.count, task)
        task.add_done_callback(lambda _: self._drawing.pop(name, None))

    async def _draw(self, name: str, sample: Sample) -> None:
        outcome: Outcome | None = None
        tries_left = _TRIES
        while outcome is None:
            tries_left -= 1
            try:
                outcome = await self._engine.answer(sample)
            except (EngineError, RefusedError) as error:
                _log.warning("sample %s has no answer: %s", name, error)
                is_final = isinstance(error, RefusedError | EngineRefusedError)
                if is_final or not tries_left:
                    outcome = CommandFailed(reason=str(error)[:1000], category="server")
                else:  # an engine that has died ends this process before
                    await asyncio.sleep(_AGAIN_S)
        await self._link.ask(ReportSample(request=name), encode(outcome))
