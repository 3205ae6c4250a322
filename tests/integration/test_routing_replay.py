"""Routing replay (R3): the learner's routers choose the experts that a real SGLang chose."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.generators.config import GeneratorSettings, generator_settings
from slipstream.generators.engine import Completion, SamplingParams
from slipstream.generators.rollout import Submission, run_rollouts
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.generators.sglang.running import make_sampler, sampling_by_item
from slipstream.generators.text.codec import TextCodec
from slipstream.generators.turns.conversation import Conversation
from slipstream.weightbus.agent.engine import Adoption
from slipstream.weightbus.version.engine_checksums import (
    EngineLayout,
    differing,
    digest_of,
    expected_checksums,
)
from slipstream.wire.messages.broker import LeasedGroup
from slipstream.wire.messages.codec import decode_payload
from slipstream.wire.messages.trajectory import Prompt
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.models.families.registry import FAMILIES
from slipstream.wire.models.model_files import WEIGHTS
from tests.integration.sglang_load import client_of, until_load
from tests.support.blank_model import write_blank_model
from tests.support.engine_steps import load_folder, pause
from tests.support.families import write_family
from tests.support.family_models import MODELS
from tests.support.random_llama import make_qwen3_moe, write_random_weights
from tests.support.ranks.decisions import write_submissions
from tests.support.ranks.run import outputs, reports, start_ranks
from tests.support.tiny_models import write_tiny_model
from tests.support.tiny_run import serving

pytestmark = pytest.mark.integration
LAYERS, EXPERTS = 3, 8
OLD, NEW = PolicyVersion(1, 0), PolicyVersion(1, 1)
GROUP = LeasedGroup(
    group_id=1,
    lease_id=1,
    item="train",
    position=0,
    prompt=Prompt(prompt="17+24="),
    siblings=tuple(range(4)),
)
MIXTURES = {
    name: family
    for name, model in MODELS.items()
    if (family := FAMILIES[str(model["model_type"])]).has_experts
}
# Engines of mixtures: by experts alone, by attention too where SGLang splits it, and of four ranks
# of which two share each expert.
OF_ENGINES = [
    *((name, EngineLayout("cpu", 2, 1, 2)) for name in MIXTURES),
    *(
        (name, EngineLayout("cpu", 2, 2, 2))
        for name, one in MIXTURES.items()
        if one.has_dp_attention
    ),
    ("deepseek_v3", EngineLayout("cpu", 4, 2, 2)),
    ("gpt_oss", EngineLayout("cpu", 2)),  # ranks share each expert, whose matrices are stacked
]
TRIES = 20  # to pause in the midst of an answer: a slow machine may do it too late
T = TypeVar("T")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routing") / "model"
    write_blank_model(folder, hidden=64, layers=LAYERS, vocab_size=200)
    write_random_weights(folder, scale=0.15, seed=3)
    make_qwen3_moe(folder, experts=EXPERTS)
    return folder


@pytest.fixture(scope="module")
def moved(model: Path) -> Path:
    """A policy whose routers choose other experts."""
    folder = model.parent / "moved"
    shutil.copytree(model, folder)
    tensors = load_file(model / WEIGHTS)
    generator = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if "mlp.gate." in name:
            tensors[name] = tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def settings_of(model: Path, **sglang: int) -> GeneratorSettings:
    return generator_settings(
        {
            "run": {
                "name": "p",
                "dir": str(model.parent),
                "model": str(model),
                "routing_replay": "R3",
            },
            "sampling": {
                "max_prompt_tokens": 16,
                "max_response_tokens": 440,
                "min_response_tokens": 8,
                "top_k": 20,
            },
            "generators": {"device": "cpu", "max_cached_tokens": 4096, "sglang": sglang},
        }
    )


@pytest.fixture(scope="module")
def settings(model: Path) -> GeneratorSettings:
    """Settings of an engine whose ranks have half of the experts each."""
    return settings_of(model, tp_size=2, ep_size=2)


@pytest.fixture(scope="module")
def server(settings: GeneratorSettings) -> Iterator[SglangProcess]:
    with serving(settings) as process:
        yield process


def on(
    server: SglangProcess, scenario: Callable[[SglangEngine], Awaitable[T]], ranks: int = 2
) -> T:
    async def run() -> T:
        async with client_of(server, OLD, num_ranks=ranks) as engine:
            return await scenario(engine)

    return asyncio.run(run())


def answers(server: SglangProcess, settings: GeneratorSettings) -> list[Submission]:
    async def scenario(engine: SglangEngine) -> list[Submission]:
        codec = TextCodec(settings.model, settings.sampling)
        sampler = make_sampler(settings, engine, codec)
        return await run_rollouts(sampler, GROUP, GROUP.siblings, codec.encode(GROUP.prompt))

    return on(server, scenario)


@pytest.fixture(scope="module")
def submissions(server: SglangProcess, settings: GeneratorSettings) -> list[Submission]:
    return answers(server, settings)


def learned(
    folder: Path, model: Path, submissions: list[Submission], ranks: int = 1, **learner: object
) -> dict[str, Any]:
    folder.mkdir()
    file, work = folder / "submissions", folder / "work"
    write_submissions(file, {"all": submissions})
    outputs(start_ranks("support.ranks.routing", model, work, ranks, [file], **learner))
    found: dict[str, Any] = reports(work, ranks)[0]["all"]
    return found


def gap(found: dict[str, list[float]]) -> float:
    pairs = zip(found["logprobs"], found["engine"], strict=True)
    return max(abs(a - b) for a, b in pairs)


def test_experts_travel_with_the_tokens_a_byte_each(submissions: list[Submission]):
    for message, frames in submissions:
        decisions = decode_payload(frames[0]).decisions
        assert decisions is not None
        assert decisions.experts is not None
        assert decisions.experts.dtype == "uint8"
        assert decisions.experts.shape == (message.header.num_tokens - 1, LAYERS, 2)


def test_an_engine_with_an_expert_on_another_rank_is_refused_and_repaired(
    server: SglangProcess, model: Path, tmp_path: Path
):
    """Loaded next to its weights, and into them: its routers would choose wrong experts."""
    tensors = load_file(model / WEIGHTS)
    swapped = {
        name.replace(f".experts.{one}.", f".experts.{other}."): tensor
        for one, other in ((0, EXPERTS - 1), (EXPERTS - 1, 0))
        for name, tensor in tensors.items()
        if f"layers.1.mlp.experts.{one}." in name
    }
    folder = Path(shutil.copytree(model, tmp_path / "swapped"))
    save_file(tensors | swapped, folder / WEIGHTS, metadata={"format": "pt"})
    expected = expected_checksums(tensors, EngineLayout("cpu", 2, 1, 2))
    right = digest_of(expected)

    async def scenario(engine: SglangEngine) -> list[Adoption]:
        await engine.stage_folder(folder, NEW)
        return [
            await engine.adopt_folder(folder, NEW, digest=right),  # of its shadow
            await engine.adopt_folder(folder, NEW, digest=right),
            await engine.adopt_folder(model, OLD, digest=right),
        ]

    beside, live, repaired = on(server, scenario)
    names = [f"model.layers.1.mlp.experts.{name}_weight" for name in ("w13", "w2")]
    wrong = sorted([*names, *(f"{name} of rank 1" for name in names)])
    assert differing(expected, beside.differing) == differing(expected, live.differing) == wrong
    assert (beside.is_paused, live.is_paused, repaired.is_paused) == (False, True, False)
    assert not repaired.differing


def test_routers_choose_exactly_what_the_engine_chose(
    model: Path, moved: Path, submissions: list[Submission], tmp_path: Path
):
    found = learned(tmp_path / "moved", moved, submissions)
    assert found["off"]["other"] > found["off"]["all"] / 10, "they would have chosen alike"
    assert found["R3"]["other"] == 0 < found["R3"]["all"]
    assert found["R3"]["each has"] == [2], "the last token of each, too"
    same = learned(tmp_path / "same", model, submissions)
    assert same["R3"]["other"] == 0
    assert gap(same["R3"]) < 1e-4, "of answers of up to 440 tokens"
    assert gap(found["R3"]) > 1e-3, "weights are the learner's own"


@pytest.mark.slow  # of the kind above
@pytest.mark.parametrize(("name", "layout"), OF_ENGINES)
def test_an_engine_by_experts_of_every_family_holds_and_chooses_what_the_learner_does(
    name: str, layout: EngineLayout, model: Path, tmp_path: Path
):
    folder = write_family(tmp_path / "model", name, max_position_embeddings=512)
    for file in model.glob("token*"):
        shutil.copyfile(file, folder / file.name)
    ranks, groups, expert_groups = layout[1:]
    settings = settings_of(folder, tp_size=ranks, ep_size=expert_groups, attn_dp_size=groups)
    with serving(settings) as server:
        submissions = answers(server, settings)
        held = on(server, SglangEngine.checksums, ranks)
    expected = expected_checksums(load_file(folder / WEIGHTS), layout)
    assert differing(expected, held) == []
    found = learned(tmp_path / "learned", folder, submissions)
    assert found["R3"]["other"] == 0 < found["R3"]["all"]
    assert gap(found["R3"]) < 1e-4


async def until_begun(server: SglangProcess, asked: "asyncio.Task[list[Completion]]") -> None:
    await until_load(server, lambda load: load.num_tokens > 40 or asked.done())


async def change(engine: SglangEngine, folder: Path, version: PolicyVersion) -> None:
    await pause(engine)
    await load_folder(engine, folder)
    await engine.label(version)
    await engine.resume()


def test_an_answer_keeps_the_experts_from_before_new_weights(
    server: SglangProcess, settings: GeneratorSettings, moved: Path
):
    """Its keys and values are computed again under them, and with other experts."""
    prompt = [3, 4, 13, 5]
    params = sampling_by_item(settings)["train"]
    long = SamplingParams(
        temperature=1.0, max_new_tokens=420, min_new_tokens=400, experts_of=params.experts_of
    )
    later = replace(long, experts_from=len(prompt) - 1)

    async def scenario(engine: SglangEngine) -> tuple[Completion, Completion]:
        (whole,) = await engine.sample(prompt, long, count=1, seeds=[7])
        for _ in range(TRIES):
            asked = asyncio.create_task(engine.sample(prompt, later, count=1, seeds=[7]))
            await until_begun(server, asked)
            await change(engine, moved, NEW)
            (changed,) = await asked
            await change(engine, settings.model, OLD)
            if len(changed.version_starts) == 2:
                return whole, changed
        raise AssertionError("every pause came too late")

    whole, changed = on(server, scenario)
    (_, first), (start, second) = changed.version_starts
    assert (first, second) == (OLD, NEW)
    assert changed.token_ids[:start] == whole.token_ids[:start]
    assert whole.experts is not None
    assert changed.experts is not None
    of_reply = whole.experts[later.experts_from :]
    assert np.array_equal(changed.experts[:start], of_reply[:start])
    assert len(changed.experts) == len(changed.token_ids)
    if changed.token_ids[start] == whole.token_ids[start]:
        assert not np.array_equal(changed.experts[start:], of_reply[start:])


def test_turns_record_each_tokens_experts_once_as_one_request_for_all_does(
    server: SglangProcess, settings: GeneratorSettings
):
    long = sampling_by_item(settings)["train"]
    conversation = Conversation(max_turns=4, max_tokens=400)
    num_rows: list[int] = []

    async def scenario(engine: SglangEngine) -> Completion:
        prompt: list[int] = []
        for turn in range(4):
            prompt = [*prompt, *range(20, 30)]
            known = conversation.known_experts(prompt)
            params = replace(long, max_new_tokens=20, experts_from=sum(map(len, known)))
            (reply,) = await engine.sample(prompt, params, count=1, seeds=[turn])
            conversation.add(prompt, reply, known)
            prompt = conversation.token_ids
            assert reply.experts is not None
            num_rows.append(len(reply.experts))
        (whole,) = await engine.sample(prompt, replace(long, max_new_tokens=8), count=1)
        return whole

    whole = on(server, scenario)
    assert whole.experts is not None
    assert conversation.experts is not None
    count = conversation.num_tokens - 1
    assert sum(num_rows) == len(conversation.experts) == count
    assert np.array_equal(conversation.experts, whole.experts[:count])


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "computed-again"])
def test_later_updates_choose_as_before_the_first(tmp_path: Path, recompute: bool):
    learner = {"recompute": "selective", "recompute_modules": ["moe"]} if recompute else {}
    folder = write_tiny_model(tmp_path / "model", "qwen3_moe")
    outputs(start_ranks("support.ranks.old_routing", folder, tmp_path / "work", 1, **learner))
    (found,) = reports(tmp_path / "work", 1)
    assert found["R2"] == 0.0 < 0.05 < found["off"]
