"""The audit by probe: faults that no checksum sees, in real SGLang, over the relay and the agent.

The versions and their probes are of a real learner that trains. No check of the engine's tensors
runs: what is caught here is caught by what the engine computes.
"""

import asyncio
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor
from typing_extensions import override

from slipstream.generators.config import GeneratorSettings, generator_settings
from slipstream.generators.engine import SamplingParams
from slipstream.generators.sglang.adapter_engine import AdapterEngine
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.generators.sglang.running import engine_of
from slipstream.generators.versions.probe_audit import ProbeAudit
from slipstream.generators.versions.probe_noise import CALIBRATION, Noise
from slipstream.weightbus.agent.engine import Adoption
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.tensor_set import TensorSet, model_tensors
from slipstream.wire.errors import QuarantineError
from slipstream.wire.messages.probe import ProbeLogprobs
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import PublishRecord
from slipstream.wire.models.adapters import adapter_shapes
from slipstream.wire.models.model_files import WEIGHTS
from tests.support.blank_model import write_blank_model
from tests.support.bus.published import Published, subscriber_of
from tests.support.random_llama import write_random_weights
from tests.support.ranks.run import outputs, reports, start_ranks
from tests.support.tiny_run import serving
from tests.support.waiting import HANG_S, NEVER_S

pytestmark = pytest.mark.integration
STEPS = CALIBRATION + 4
LORA: dict[str, object] = {"rank": 4, "alpha": 8.0}
LR = 1e-5  # the policy moves little from one version to the next
PROBE: dict[str, object] = {"probe_tokens": 48, "probe_sequences": 4}
_epochs = itertools.count(1)  # one server serves many tests, and its version never goes back


@dataclass(frozen=True)
class Trained:
    """Versions of a learner, and their probes."""

    tensors: list[dict[str, Tensor]]
    probes: list[ProbeLogprobs]


def trained(folder: Path, name: str, lora: dict[str, object] | None, **learner: object) -> Trained:
    order = json.dumps({"steps": STEPS, "lora": lora, "weightbus": PROBE})
    work = folder / name
    outputs(start_ranks("support.ranks.probes", folder / "model", work, 1, [order], **learner))
    (report,) = reports(work, 1)
    return Trained(
        [load_file(work / f"{step}.safetensors") for step in range(STEPS + 1)],
        [msgspec.convert(one, ProbeLogprobs) for one in report["probes"]],
    )


def settings_of(folder: Path, *, lora: bool = False, **sglang: object) -> GeneratorSettings:
    return generator_settings(
        {
            "run": {"name": "p", "dir": str(folder), "model": str(folder / "model")},
            **({"lora": LORA} if lora else {}),
            "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 440},
            "generators": {
                "device": "cpu",
                "max_cached_tokens": 8192,
                "max_sequences": 16,
                "sglang": sglang,
            },
            "weightbus": {"timeout_s": NEVER_S, "receive_timeout_s": NEVER_S},
        }
    )


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name:
        model = Path(name) / "model"
        write_blank_model(model, hidden=128, layers=2)
        write_random_weights(model, scale=0.1, seed=3)
        yield Path(name)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Trained:
    return trained(folder, "whole", None, lr=LR)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[GeneratorSettings, SglangProcess]]:
    settings = settings_of(folder)
    with serving(settings) as process:
        yield settings, process


class Keeping(SglangEngine):
    """Keeps the prefixes of the weights before, but for the first load."""

    num_loads = 0

    @override
    async def adopt_folder(self, folder: Path, version: PolicyVersion, *, digest: str) -> Adoption:
        self.num_loads += 1
        return await super().adopt_folder(folder, version, digest=digest)

    @property
    @override
    def _forgets_prefixes(self) -> bool:
        return self.num_loads == 1


class Behind(SglangEngine):
    """Loads the version that it received before, but for the first."""

    before: Path | None = None

    @override
    async def stage_folder(self, folder: Path, version: PolicyVersion) -> dict[str, float]:
        return {}

    @override
    async def adopt_folder(self, folder: Path, version: PolicyVersion, *, digest: str) -> Adoption:
        own = Path(tempfile.mkdtemp(dir=folder.parent))
        save_file(load_file(folder / WEIGHTS), own / WEIGHTS)  # without a label, which would tell
        before, self.before = self.before or own, own
        return await super().adopt_folder(before, version, digest=digest)


class Undelivered(AdapterEngine):
    """Loads adapters that add nothing, whatever was received."""

    @override
    def write_folder(self, received: Path, own: Path) -> None:
        empty = own.parent / "empty"
        empty.mkdir(parents=True, exist_ok=True)
        tensors = load_file(received / WEIGHTS)
        save_file({name: 0 * tensor for name, tensor in tensors.items()}, empty / WEIGHTS)
        super().write_folder(empty, own)


class Bus(Published):
    """A learner's memory and a publisher of it, with one engine that is audited."""

    def __init__(
        self, settings: GeneratorSettings, engine: SglangEngine, versions: Trained
    ) -> None:
        folder = Path(settings.run.dir)
        self.engine, self.trained = engine, versions
        super().__init__(
            folder,
            versions.tensors[0],
            bucket_bytes=1 << 20,
            epoch=next(_epochs),
            is_in_sight=False,  # engine of another host
            engine_check_every=0,
        )
        self.audit = ProbeAudit(engine, Noise("float32"))
        tensors = model_tensors(settings.model, dtype="float32")
        if settings.lora.is_named:
            shapes = adapter_shapes(tensors.shapes, settings.lora.facts())
            tensors = TensorSet(shapes, "float32")
        self.subscriber = subscriber_of(
            engine,
            tensors,
            Staging(folder, "generator-0"),
            transport="tcp",
            on_pause=self.audit.pausing,
            on_adopt=lambda _version, _stood_s: self.audit.resumed(),
            on_probe=self.audit.adopted,
            adapters=engine if isinstance(engine, AdapterEngine) else None,
        )

    async def publish(self, step: int, damaged: dict[str, Tensor] | None = None) -> PublishRecord:
        """Publish a version, with other tensors where some are ``damaged``; return once adopted."""
        tensors = self.trained.tensors[step] | (damaged or {})
        record = await self.record_of(self.write(step, tensors, self.trained.probes[step]))
        assert record.adopted_by, record.failed
        return record

    async def proven(self, step: int, damaged: dict[str, Tensor] | None = None) -> None:
        """Publish a version and wait until it is proven.

        Raises:
            QuarantineError: it is not.
        """
        await self.publish(step, damaged)
        proven = asyncio.create_task(self.audit.until_proven(PolicyVersion(self.epoch, step)))
        done, _ = await asyncio.wait(
            {proven, self.auditing}, timeout=HANG_S, return_when=asyncio.FIRST_COMPLETED
        )
        proven.cancel()
        assert done, "no verdict"
        if self.auditing in done:
            self.auditing.result()

    auditing: "asyncio.Task[None]"


@asynccontextmanager
async def running(
    settings: GeneratorSettings, engine: SglangEngine, versions: Trained
) -> AsyncIterator[Bus]:
    bus = Bus(settings, engine, versions)
    bus.auditing = asyncio.create_task(bus.audit.run())
    try:
        async with bus.running(bus.subscriber):
            yield bus
    finally:
        bus.auditing.cancel()
        with suppress(asyncio.CancelledError, QuarantineError):
            await bus.auditing
        await engine.close()


def engine_for(kind: type[SglangEngine], process: SglangProcess) -> SglangEngine:
    return kind(process.url, process.api_key, request_timeout_s=HANG_S, control_timeout_s=HANG_S)


def reason_of(
    served: tuple[GeneratorSettings, SglangProcess],
    versions: Trained,
    kind: type[SglangEngine] = SglangEngine,
    *,
    honest: int = 1,
    damaged: dict[str, Tensor] | None = None,
) -> str:
    """Publish ``honest`` versions and then one that is to be caught; return why it was."""
    settings, process = served

    async def scenario() -> str:
        engine = (
            engine_of(settings, process) if settings.lora.is_named else engine_for(kind, process)
        )
        if settings.lora.is_named and kind is not SglangEngine:
            engine.__class__ = kind
        async with running(settings, engine, versions) as bus:
            for step in range(honest):
                await bus.proven(step)
            with pytest.raises(QuarantineError) as caught:
                await bus.proven(honest, damaged)
            assert bus.audit.condemned == PolicyVersion(bus.epoch, honest)
            return str(caught.value)

    return asyncio.run(scenario())


async def test_honest_publishes_are_proven_while_answers_are_made(
    served: tuple[GeneratorSettings, SglangProcess], whole: Trained
):
    settings, process = served

    async with running(settings, engine_for(SglangEngine, process), whole) as bus:
        await bus.proven(0)
        params = SamplingParams(temperature=1.0, max_new_tokens=400, min_new_tokens=400)
        answers = asyncio.create_task(bus.engine.sample([3, 4, 13], params, count=16))
        for step in range(1, STEPS + 1):
            await bus.proven(step)
        assert bus.audit.counters == {"probes": STEPS + 1, "unproven": 0}
        noise = bus.audit._noise
        assert noise.bound.mean < 1e-4
        await answers


def test_two_tensors_that_changed_places_are_caught(
    served: tuple[GeneratorSettings, SglangProcess], whole: Trained
):
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)]
    first, second = (whole.tensors[1][name] for name in names)
    why = reason_of(served, whole, damaged={names[0]: second, names[1]: first})
    assert "its logprobs of the probe differ by" in why


@pytest.mark.parametrize("honest", [1, CALIBRATION])
def test_a_scale_that_is_off_is_caught(
    served: tuple[GeneratorSettings, SglangProcess], whole: Trained, honest: int
):
    name = "model.layers.1.mlp.down_proj.weight"
    times = 1.01 if honest == 1 else 1.001
    why = reason_of(
        served, whole, honest=honest, damaged={name: times * whole.tensors[honest][name]}
    )
    assert "its logprobs of the probe differ by" in why


def test_prefixes_of_the_weights_before_are_caught(
    served: tuple[GeneratorSettings, SglangProcess], whole: Trained
):
    why = reason_of(served, whole, Keeping)
    assert "its prefix cache held 23 tokens of the probe from before" in why


def test_the_version_before_under_a_new_label_is_caught(
    served: tuple[GeneratorSettings, SglangProcess], whole: Trained
):
    assert "its logprobs of the probe differ by" in reason_of(served, whole, Behind)


def test_another_rope_is_caught(
    served: tuple[GeneratorSettings, SglangProcess], folder: Path, tmp_path: Path
):
    other = Path(shutil.copytree(folder / "model", tmp_path / "model"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 500.0}))
    why = reason_of(served, trained(tmp_path, "turned", None, lr=LR), honest=0)
    assert "its logprobs of the probe differ by" in why


def test_adapters_that_do_not_arrive_are_caught(folder: Path):
    adapters = trained(folder, "adapters", LORA, lr=1e-3)
    settings = settings_of(folder, lora=True)
    with serving(settings) as process:
        why = reason_of((settings, process), adapters, Undelivered)
        assert "its logprobs of the probe differ by" in why

        async def scenario() -> None:
            async with running(settings, engine_of(settings, process), adapters) as bus:
                for step in range(STEPS + 1):
                    await bus.proven(step)

        asyncio.run(scenario())
