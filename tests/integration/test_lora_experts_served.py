"""Adapters of experts and of latent attention in a real engine, several versions at a time."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from slipstream.generators.config import GeneratorSettings, generator_settings
from slipstream.generators.engine import SamplingParams
from slipstream.generators.sglang.process import SglangProcess
from slipstream.wire.models.adapters import module_of
from tests.integration.test_lora_versions import KEPT, PROMPT, Bus, running_bus
from tests.support.families import as_family
from tests.support.family_models import MODELS, SHAPE
from tests.support.ranks.run import outputs, start
from tests.support.tiny_run import serving, write_policy
from tests.support.waiting import NEVER_S

pytestmark = pytest.mark.integration
MLP = ["gate_proj", "up_proj", "down_proj"]
TARGETS = {
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", *MLP],
    "deepseek_v2_lite": ["kv_b_proj", "o_proj", *(f"shared_experts.{name}" for name in MLP)],
    "qwen3_moe": ["q_proj", "v_proj", *MLP],
    "qwen2_moe": MLP,
    "qwen3_5_moe": ["q_proj", "k_proj", "v_proj", "o_proj", "out_proj", *MLP],
    "qwen3_next": ["out_proj", *MLP],
    "mixtral": ["w1", "w2", "w3", "o_proj"],
    "glm4": ["gate_up_proj", "down_proj"],
    "glm4_moe": ["q_proj", "k_proj", "v_proj", *MLP],
}
SIZES = {"intermediate_size": 128, "moe_intermediate_size": 64}  # 32 times the ranks
BRIEF = SamplingParams(temperature=1.0, max_new_tokens=8)
TOLERANCE = 2e-4  # of float32 logprobs; another version is off by more than a hundredth


def settings_of(folder: Path, family: str, ranks: int) -> GeneratorSettings:
    return generator_settings(
        {
            "run": {
                "name": "p",
                "dir": str(folder),
                "model": str(folder / "model"),
                "group_size": 2,
                "max_staleness_steps": KEPT - 1,
            },
            "lora": {"rank": 4, "alpha": 8.0, "targets": TARGETS[family], "publish": "named"},
            "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 64},
            "generators": {
                "device": "cpu",
                "max_cached_tokens": 1024,
                "max_sequences": 16,
                "sglang": {"tp_size": ranks} if ranks > 1 else {},
            },
            "weightbus": {"timeout_s": NEVER_S, "receive_timeout_s": NEVER_S},
        }
    )


@pytest.fixture(
    scope="module",
    params=[
        ("deepseek_v3", 1),
        *(
            pytest.param((family, ranks), marks=pytest.mark.slow)
            for family in TARGETS
            for ranks in (1, 2)
            if (family, ranks) != ("deepseek_v3", 1)
        ),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def started(request: pytest.FixtureRequest) -> Iterator[tuple[GeneratorSettings, SglangProcess]]:
    family, ranks = request.param
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name:
        write_policy(Path(name) / "model")
        sizes = {key: size for key, size in SIZES.items() if key in {**SHAPE, **MODELS[family]}}
        as_family(Path(name), family, num_hidden_layers=2, **sizes)
        settings = settings_of(Path(name), family, ranks)
        with serving(settings) as process:
            yield settings, process


async def test_every_answer_is_that_of_its_version(
    started: tuple[GeneratorSettings, SglangProcess],
):
    settings, _ = started
    async with running_bus(started, "tcp", epoch=2) as bus:
        answers = []
        for step in range(2):
            record = await bus.publish(step)
            assert record.adopted_by, record.failed  # every tensor's checksum is right
            answers += await bus.engine.sample(PROMPT, BRIEF, count=2)
    assert [answer.version_starts[0][1].step for answer in answers] == [0, 0, 1, 1]
    by_version = {
        step: logprobs_of(settings, bus, step, [PROMPT + answer.token_ids for answer in answers])
        for step in range(2)
    }
    for at, answer in enumerate(answers):
        step = answer.version_starts[0][1].step
        of_own, of_other = (by_version[number][at] for number in (step, 1 - step))
        assert answer.logprobs == pytest.approx(of_own, abs=TOLERANCE)
        differences = [abs(a - b) for a, b in zip(answer.logprobs, of_other, strict=True)]
        assert max(differences) > 1e-2


def logprobs_of(
    settings: GeneratorSettings, bus: Bus, step: int, sequences: list[list[int]]
) -> list[list[float]]:
    """Return what transformers computes with a version's s B A added to the weights."""
    (tensors,) = (found for version, found in bus.published.items() if version.step == step)
    merged = Path(settings.run.dir) / f"merged-{step}"
    shutil.copytree(settings.model, merged)
    weights = load_file(merged / "model.safetensors")
    for name in weights:
        module = f"base_model.model.{module_of(name)}"
        if (a := tensors.get(f"{module}.lora_A.weight")) is not None:
            weights[name] += bus.facts.scale * tensors[f"{module}.lora_B.weight"] @ a
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    asked = merged / "asked.json"
    asked.write_text(json.dumps(sequences))
    (printed,) = outputs([start(merged, "integration.transformers_logprobs", merged, asked)])
    return [row[len(PROMPT) - 1 :] for row in json.loads(printed)]
