"""Versions that are adapters, over relay and agent into real SGLang, against the real PEFT."""

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.generators.config import GeneratorSettings, generator_settings
from slipstream.generators.engine import Completion, SamplingParams
from slipstream.generators.sglang.adapter_engine import AdapterEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.generators.sglang.running import engine_of
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.tensor_set import TensorSet, model_tensors
from slipstream.weightbus.version.snapshot import WeightSnapshot
from slipstream.wire.errors import EngineError
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import PublishRecord
from slipstream.wire.models.adapters import CONFIG, TENSORS, adapter_config, adapter_shapes
from tests.integration.sglang_load import num_mixed, until_load
from tests.support.blank_model import write_blank_model
from tests.support.bus.published import Published, subscriber_of
from tests.support.random_llama import write_random_weights
from tests.support.ranks.run import outputs, start
from tests.support.tiny_run import serving
from tests.support.waiting import NEVER_S, until

pytestmark = pytest.mark.integration
KEPT = 3  # run.max_staleness_steps + 1
PROMPT = [3, 4, 13]
LONG = SamplingParams(temperature=1.0, max_new_tokens=400, min_new_tokens=400)
SHORT = SamplingParams(temperature=1.0, max_new_tokens=8, min_new_tokens=8)
END = 2  # barred: no answer ends early
TOLERANCE = 1e-4  # of float32 logprobs; another version is off by a nat
TRIES = 10  # to have an answer in the making: a slow machine may be too late


def settings_of(folder: Path) -> GeneratorSettings:
    return generator_settings(
        {
            "run": {
                "name": "p",
                "dir": str(folder),
                "model": str(folder / "model"),
                "group_size": 2,
                "max_staleness_steps": KEPT - 1,
            },
            "lora": {"rank": 4, "alpha": 8.0},
            "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 440},
            "generators": {
                "device": "cpu",
                "max_cached_tokens": 8192,
                "max_sequences": 16,
                "sglang": {"enable_mixed_chunk": True, "log_level": "info"},
            },
            "weightbus": {"timeout_s": NEVER_S, "receive_timeout_s": NEVER_S},
        }
    )


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[GeneratorSettings, SglangProcess]]:
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name:
        model = Path(name) / "model"
        write_blank_model(model, hidden=128, layers=2)
        write_random_weights(model, scale=0.1, seed=3)
        settings = settings_of(Path(name))
        with serving(settings) as process:
            yield settings, process


class Bus(Published):
    """A learner's memory and a publisher of it, with one engine that is subscribed to it."""

    def __init__(
        self, settings: GeneratorSettings, engine: AdapterEngine, transport: str, epoch: int
    ) -> None:
        folder = Path(settings.run.dir)
        self.engine, self.epoch, self.facts = engine, epoch, settings.lora.facts()
        weights = model_tensors(settings.model, dtype="float32")
        self.shapes = adapter_shapes(weights.shapes, self.facts)
        self.published: dict[PolicyVersion, dict[str, Tensor]] = {}
        self.pauses = 0
        super().__init__(folder, self.random(0), bucket_bytes=16 * 1024, epoch=epoch)
        self.subscriber = subscriber_of(
            engine,
            TensorSet(self.shapes, "float32"),
            Staging(folder, "generator-0"),
            num_ranks=settings.generators.num_ranks,
            transport=transport,
            on_pause=self._paused,
            adapters=engine,
        )

    def _paused(self) -> None:
        self.pauses += 1

    def random(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(100 * self.epoch + seed)
        return {
            name: 0.15 * torch.randn(*shape, generator=generator)
            for name, shape in self.shapes.items()
        }

    async def publish(self, step: int) -> PublishRecord:
        """Publish a version and return the record of the first attempt."""
        tensors = self.random(step)
        version = self.write(step, tensors)
        self.published[version] = tensors
        return await self.record_of(version)


@asynccontextmanager
async def running_bus(
    started: tuple[GeneratorSettings, SglangProcess], transport: str, epoch: int
) -> AsyncIterator[Bus]:
    settings, process = started
    engine = engine_of(settings, process)
    assert isinstance(engine, AdapterEngine)
    bus = Bus(settings, engine, transport, epoch)
    try:
        async with bus.running(bus.subscriber):
            yield bus
    finally:
        for version in engine.versions:
            await engine.drop_adapter(version)
        await engine.close()


def by_peft(
    settings: GeneratorSettings, bus: Bus, answers: list[tuple[Completion, PolicyVersion]]
) -> list[list[float]]:
    """Return what the real PEFT computes for answers under versions."""
    work = Path(tempfile.mkdtemp(dir=settings.run.dir))
    asked: dict[str, list[list[int]]] = {}
    for answer, version in answers:
        folder = work / version.label
        if not folder.is_dir():
            folder.mkdir()
            (folder / CONFIG).write_bytes(adapter_config(bus.facts, str(settings.model)))
            save_file(bus.published[version], folder / TENSORS)
        asked.setdefault(str(folder), []).append(PROMPT + answer.token_ids)
    (work / "asked.json").write_text(json.dumps(asked))
    (printed,) = outputs(
        [start(work, "support.peft_logprobs", settings.model, work / "asked.json", END)]
    )
    found = {folder: iter(values) for folder, values in json.loads(printed).items()}
    labels = [version.label for _, version in answers]
    shutil.rmtree(work)
    return [next(found[str(work / label)])[len(PROMPT) - 1 :] for label in labels]


async def eventually(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(until, condition, "the newest versions alone")


@pytest.mark.parametrize("transport", ["tcp", "disk"])
async def test_answers_end_under_the_version_that_they_began_with(
    started: tuple[GeneratorSettings, SglangProcess], transport: str
):
    settings, process = started
    answers: list[Completion] = []

    async with running_bus(started, transport, epoch=2 if transport == "tcp" else 3) as bus:
        with pytest.raises(EngineError, match="has adopted no version yet"):
            await bus.engine.sample(PROMPT, SHORT, count=1)
        first = await bus.publish(0)
        assert first.adopted_by, first.failed
        step = 0
        for _attempt in range(TRIES):
            began = PolicyVersion(bus.epoch, step)
            asked = bus.engine.sample(PROMPT, LONG, count=2)
            generation = asyncio.create_task(asked)
            await until_load(process, lambda load: load.num_running == 2 or generation.done())  # noqa: B023
            in_flight: list[int] = []
            for _ in range(4):
                step += 1
                record = await bus.publish(step)
                assert record.transports == {"generator-0": transport}
                assert record.adopted_by, record.failed
                in_flight.append(record.num_in_flight["generator-0"])
                assert len(record.engine_digests["generator-0"]) == 32
            num_before, _ = num_mixed(process)
            (short,) = await bus.engine.sample(PROMPT, SHORT, count=1)
            assert short.version_starts == [(0, PolicyVersion(bus.epoch, step))]
            answers.append(short)
            was_generating = not generation.done()
            if was_generating:
                assert num_mixed(process)[0] > num_before, "of two adapters"
                assert in_flight == [2] * 4
                assert began in bus.engine.versions, "unloaded under its answers"
            long = await generation
            for one in long:
                assert one.version_starts == [(0, began)]
                assert len(one.token_ids) == 400
            if was_generating:
                answers.extend(long)
                break
        else:
            raise AssertionError("no answer took longer than four publishes")
        newest = [PolicyVersion(bus.epoch, one) for one in range(step - KEPT + 1, step + 1)]
        await eventually(lambda: list(bus.engine.versions) == newest)
        await bus.engine.checksums()  # those of older versions are as they were
        load = await bus.engine.load()
        assert load.num_retractions == 0
        assert bus.pauses == 0
    own = [(answer, answer.version_starts[0][1]) for answer in answers]
    newest = max(bus.published)
    of_peft = by_peft(settings, bus, [*own, *((answer, newest) for answer in answers)])
    of_own, of_newest = of_peft[: len(own)], of_peft[len(own) :]
    for (answer, _), expected in zip(own, of_own, strict=True):
        assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE)
    for (answer, version), other in zip(own, of_newest, strict=True):
        differences = [abs(a - b) for a, b in zip(answer.logprobs, other, strict=True)]
        assert (max(differences) > 0.1) == (version != newest)


async def test_a_version_that_is_not_what_was_sent_is_never_used(
    started: tuple[GeneratorSettings, SglangProcess], monkeypatch: pytest.MonkeyPatch
):
    async with running_bus(started, "tcp", epoch=4) as bus:
        await bus.publish(0)
        write = AdapterEngine.write_folder

        def damaged(engine: AdapterEngine, received: Path, own: Path) -> None:
            write(engine, received, own)
            with (own / TENSORS).open("r+b") as file:
                file.seek(-1, 2)
                last = file.read(1)
                file.seek(-1, 2)
                file.write(bytes([last[0] ^ 1]))

        with monkeypatch.context() as patch:
            patch.setattr(AdapterEngine, "write_folder", damaged)
            record = await bus.publish(1)
            assert "tensors differ in the engine" in record.failed["generator-0"]
            (answer,) = await bus.engine.sample(PROMPT, SHORT, count=1)
            assert answer.version_starts == [(0, PolicyVersion(4, 0))]
        while not record.adopted_by:
            record = await bus.record_of(record.version)
        (answer,) = await bus.engine.sample(PROMPT, SHORT, count=1)
        assert answer.version_starts == [(0, PolicyVersion(4, 1))]
        assert bus.pauses == 0

        with monkeypatch.context() as patch:
            bucket = WeightSnapshot.bucket

            def changed(snapshot: WeightSnapshot, index: int) -> Tensor:
                sent: Tensor = bucket(snapshot, index).clone()
                sent[:4] ^= torch.tensor(1, dtype=torch.uint8)
                return sent

            patch.setattr(WeightSnapshot, "bucket", changed)
            record = await bus.publish(2)
            assert "arrived with digest" in record.failed["generator-0"]
        (answer,) = await bus.engine.sample(PROMPT, SHORT, count=1)
        assert answer.version_starts[0][1] >= PolicyVersion(4, 1)
