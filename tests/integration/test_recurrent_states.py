"""Engines of models whose layers carry a state or have windows, on a CPU, against transformers.

In `make test` a dense hybrid: prompts by chunks and over cached states, and weights that change
under an answer. Both versions have the same tokens and unlike weights, so that a state of another
version is off by about 1 nat.
"""

import asyncio
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.generators.config import generator_settings
from slipstream.generators.engine import Completion, SamplingParams
from slipstream.generators.sglang.engine import SglangEngine, completion_of
from slipstream.generators.sglang.process import SglangProcess
from slipstream.weightbus.version.engine_checksums import (
    EngineLayout,
    differing,
    digest_of,
    expected_checksums,
)
from slipstream.wire.messages.versions import PolicyVersion
from tests.integration.sglang_load import client_of, num_mixed, until_load
from tests.support.families import write_family
from tests.support.family_models import MODELS as FAMILY_MODELS
from tests.support.hub_form import as_published
from tests.support.ranks.run import start
from tests.support.tiny_run import serving, write_policy

pytestmark = pytest.mark.integration
V0, V1 = VERSIONS = PolicyVersion(1, 0), PolicyVersion(1, 1)
Weights = Mapping[PolicyVersion, Path]
TOLERANCE = 1e-4  # largest difference of float32 logprobs
END = 2  # barred where an answer must not end early
CHUNK = 32  # tokens that are prefilled at a time; SGLang's own kernels go by 64
TRIES = 10  # attempts to change weights amid answers: a slow machine may be too late
SHORT = SamplingParams(temperature=1.0, max_new_tokens=12, min_new_tokens=12)
LONG = SamplingParams(temperature=1.0, max_new_tokens=200, min_new_tokens=200)
LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 130)
HYBRID = {
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
PUBLISHED_ROPE = {  # as published: its share of a head's channels, in sections for pictures
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [2, 1, 1],
}
OF_3_5 = HYBRID | {"rope_parameters": PUBLISHED_ROPE}
MODELS: dict[str, dict[str, object]] = {
    "dense": {**OF_3_5, "model_type": "qwen3_5_text"},
    "mixture": {**OF_3_5, **EXPERTS, "model_type": "qwen3_5_moe_text"},
    "next": {**HYBRID, **EXPERTS, "model_type": "qwen3_next"},
    "windows": {**FAMILY_MODELS["gpt_oss"], "max_position_embeddings": 512},
}


def tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 131, (length,), generator=generator).tolist()


PREFIX = tokens(96, 1)


def write_versions(root: Path, name: str) -> Weights:
    """Write two folders of one configuration; states fade within hundreds of tokens."""
    folders = {version: root / f"{name}-{version.step}" for version in VERSIONS}
    write_family(folders[V0], "qwen3", **MODELS[name])
    write_policy(root / "tokens")
    for file in (root / "tokens").glob("token*"):
        shutil.copyfile(file, folders[V0] / file.name)
    shutil.copytree(folders[V0], folders[V1])
    first = load_file(folders[V0] / "model.safetensors")
    for key, tensor in first.items():
        if key.endswith("A_log"):
            tensor -= 4
        elif "norm" in key and "linear_attn" not in key and name != "windows":
            tensor -= tensor.mean().round()  # what is stored there is added to 1
    first["lm_head.weight"] *= 0.3  # so that rounding in float32 stays far below the tolerance
    for folder, weights in (
        (folders[V0], first),
        (folders[V1], {key: tensor.flip(0).contiguous() for key, tensor in first.items()}),
    ):
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folders


class Oracle:
    """Asks the process that computes what logprobs must be."""

    def __init__(self, process: "subprocess.Popen[str]", weights: Weights) -> None:
        self._process, self._weights = process, weights

    def logprobs(
        self, sequence: list[int], runs: Sequence[tuple[int, PolicyVersion]], barred: int | None
    ) -> list[float]:
        """Return those of all tokens but the first; states are kept where a run begins."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        folders = [(first, str(self._weights[version])) for first, version in runs]
        question = {"sequence": sequence, "runs": folders, "barred": barred}
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the oracle ended with {self._process.wait()}"
        found: list[float] = json.loads(line)
        return found

    def error(
        self, prompt: list[int], answer: Completion, runs: Sequence[tuple[int, PolicyVersion]]
    ) -> float:
        """Return how far an engine's logprobs of an answer are off, at most."""
        expected = self.logprobs(prompt + answer.token_ids, runs, END)[len(prompt) - 1 :]
        return far(answer.logprobs, expected)


def far(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(one - other) for one, other in zip(found, expected, strict=True))


@contextmanager
def oracle_of(weights: Weights) -> Iterator[Oracle]:
    process = start(weights[V0], "support.in_flight_oracle", END, *weights.values(), asked=True)
    try:
        yield Oracle(process, weights)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def server(model: Path, in_flight: str = "retract", **sglang: object) -> Iterator[SglangProcess]:
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name:
        settings = generator_settings(
            {
                "run": {"name": "p", "dir": name, "model": str(model), "group_size": 2},
                "sampling": {"max_prompt_tokens": 256, "max_response_tokens": 256},
                "generators": {
                    "device": "cpu",
                    "dtype": "float32",
                    "max_cached_tokens": 8192,
                    "max_sequences": 8,
                    "sglang": {
                        "chunked_prefill_size": CHUNK,
                        "enable_mixed_chunk": in_flight == "retract",
                        "log_level": "info",
                        **sglang,
                    },
                },
                "weightbus": {"in_flight": in_flight, "probe_every": 0},
            }
        )
        with serving(settings) as process:
            yield process


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


@pytest.fixture(scope="module")
def weights(root: Path) -> Weights:
    return write_versions(root, "dense")


@pytest.fixture(scope="module")
def oracle(weights: Weights) -> Iterator[Oracle]:
    with oracle_of(weights) as asked:
        yield asked


@pytest.fixture(scope="module")
def process(weights: Weights, oracle: Oracle) -> Iterator[SglangProcess]:
    del oracle  # imports while the server starts
    with server(weights[V0]) as running:
        yield running


async def cached(engine: SglangEngine, prompt: list[int]) -> tuple[int, Completion]:
    """Return how many tokens of a prompt an engine had, and its answer."""
    (answer,) = await engine._answers(engine._question(prompt, SHORT, count=1, seeds=()), 1)
    return answer["meta_info"]["cached_tokens"], completion_of(answer, SHORT, len(prompt))


async def check_logprobs(process: SglangProcess, engine: SglangEngine, oracle: Oracle) -> None:
    """Prompts of any length in one batch, siblings, and turns over cached states."""
    prompts = [tokens(length, length) for length in LENGTHS]
    groups = await asyncio.gather(*(engine.sample(prompt, SHORT, count=2) for prompt in prompts))
    assert num_mixed(process)[0], "no answer was decoded in a batch that prefills others"
    for prompt, siblings in zip(prompts, groups, strict=True):
        for answer in siblings:
            assert oracle.error(prompt, answer, [(1, V0)]) < TOLERANCE, len(prompt)
    longer = [prompt for prompt in prompts if len(prompt) > 1]
    scored = await engine.score(longer, num_context=1)
    for prompt, logprobs in zip(longer, scored.logprobs, strict=True):
        assert far(logprobs, oracle.logprobs(prompt, [(1, V0)], None)) < TOLERANCE, len(prompt)
    for length in (2, 64 - SHORT.max_new_tokens, 65):
        prompt = tokens(length, -length)
        (answer,) = await engine.sample(prompt, SHORT, count=1)
        turn_prompt = prompt + answer.token_ids + tokens(3, 2)
        num_cached, turn = await cached(engine, turn_prompt)
        assert num_cached == len(prompt) + len(answer.token_ids) - 1, "the state after the answer"
        assert oracle.error(turn_prompt, turn, [(1, V0)]) < TOLERANCE, length


async def changed_in_flight(
    process: SglangProcess, engine: SglangEngine, weights: Weights
) -> list[Completion]:
    """Return two long answers in which the weights changed."""
    for _ in range(TRIES):
        await engine.adopt_folder(weights[V0], V0, digest="")
        asked = asyncio.create_task(engine.sample(PREFIX, LONG, count=2))
        await until_load(process, lambda load: asked.done() or load.num_tokens > 250)  # noqa: B023
        assert (await engine.stage_folder(weights[V1], V1)).keys() == {"stage", "prove"}
        await engine.adopt_folder(weights[V1], V1, digest="")
        answers = await asked
        if all([version for _, version in answer.version_starts] == [V0, V1] for answer in answers):
            return answers
    raise AssertionError("the change came too late")


def by_version(answer: Completion, values: Mapping[PolicyVersion, list[float]]) -> list[float]:
    (_, (first, _)) = answer.version_starts
    return values[V0][:first] + values[V1][first:]


async def check_updates(process: SglangProcess, weights: Weights, oracle: Oracle) -> None:
    """No answer of a version has a state of another, under way or cached."""
    async with client_of(process, V0) as engine:
        await engine.sample(PREFIX, SHORT, count=1)
        num_cached, before = await cached(engine, [*PREFIX, 5])
        assert num_cached >= len(PREFIX) - 1
        assert oracle.error([*PREFIX, 5], before, [(1, V0)]) < TOLERANCE
        for answer in await changed_in_flight(process, engine, weights):
            sequence = PREFIX + answer.token_ids
            values = {
                version: oracle.logprobs(sequence, [(1, version)], END)[len(PREFIX) - 1 :]
                for version in VERSIONS
            }
            assert far(answer.logprobs, by_version(answer, values)) < TOLERANCE
            assert far(answer.logprobs, values[V0]) > 0.1
        for version, is_staged in ((V0, False), (V1, True)):
            if is_staged:
                await engine.stage_folder(weights[version], version)
            await engine.adopt_folder(weights[version], version, digest="")
            for is_first in (True, False):
                num_cached, after = await cached(engine, [*PREFIX, 5])
                assert (num_cached == 0) == is_first, "states of this version alone"
                assert oracle.error([*PREFIX, 5], after, [(1, version)]) < TOLERANCE


async def check_bytes(engine: SglangEngine, weights: Weights, num_ranks: int = 1) -> None:
    """An engine holds a version fused as it fuses it, decays in float32, and nothing else.

    Another version's weights under its name are refused, loaded next to those in use or into them.
    """
    published = load_file(weights[V0] / "model.safetensors")
    expected = expected_checksums(published, EngineLayout("cpu", num_ranks))
    digest = digest_of(expected)
    for is_staged in (True, False):
        if is_staged:
            await engine.stage_folder(weights[V1], V0)
        refused = await engine.adopt_folder(weights[V1], V0, digest=digest)
        assert refused.is_paused != is_staged
        wrong = set(differing(expected, refused.differing))
        assert {name for name in expected if "linear_attn" in name} <= wrong
    assert not (await engine.adopt_folder(weights[V0], V0, digest=digest)).differing
    assert await engine.checksums() == expected


def test_prompts_answers_and_turns_have_transformers_logprobs(
    process: SglangProcess, oracle: Oracle
):
    async def check() -> None:
        async with client_of(process, V0) as engine:
            await check_logprobs(process, engine, oracle)

    asyncio.run(check())


def test_a_new_version_meets_no_state_of_the_one_before(
    process: SglangProcess, weights: Weights, oracle: Oracle
):
    asyncio.run(check_updates(process, weights, oracle))


def test_what_an_engine_holds_is_what_was_published(process: SglangProcess, weights: Weights):
    async def check() -> None:
        async with client_of(process, V0) as engine:
            await check_bytes(engine, weights)

    asyncio.run(check())


# In `make test` keys and values are kept with a Llama (test_in_flight.py), states are not.
@pytest.mark.slow
def test_an_update_in_place_keeps_states_as_it_keeps_keys_and_values(
    weights: Weights, oracle: Oracle
):
    async def check(process: SglangProcess) -> None:
        async with client_of(process, V0, in_flight="in_place") as engine:
            for answer in await changed_in_flight(process, engine, weights):
                (_, (first, _)) = answer.version_starts
                kept = [(1, V0), (len(PREFIX) + first, V1)]
                assert oracle.error(PREFIX, answer, kept) < TOLERANCE
                assert oracle.error(PREFIX, answer, [(1, V1)]) > 0.1
            _, after = await cached(engine, PREFIX)
            assert oracle.error(PREFIX, after, [(1, V1)]) < TOLERANCE

    with server(weights[V0], "in_place") as process:
        asyncio.run(check(process))


# In `make test` with the dense one.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sglang"),
    [
        ("mixture", {}),
        ("next", {}),
        ("sees", {}),
        ("windows", {}),
        ("windows", {"tp_size": 2}),
        ("dense", {"tp_size": 2}),
        ("next", {"tp_size": 2}),
    ],
)
def test_others_are_served_alike(
    tmp_path: Path, weights: Weights, name: str, sglang: dict[str, Any]
):
    published = weights if name in {"dense", "sees"} else write_versions(tmp_path, name)
    model = published[V0]
    if name == "sees":
        model = tmp_path / "sees"
        as_published(published[V0], model)
    num_ranks = sglang.get("tp_size", 1)

    async def check(process: SglangProcess) -> None:
        async with client_of(process, V0, num_ranks=num_ranks) as engine:
            await check_logprobs(process, engine, asked)
            await check_bytes(engine, published, num_ranks)
        await check_updates(process, published, asked)

    with oracle_of(published) as asked, server(model, **sglang) as process:
        asyncio.run(check(process))
        assert "visual" not in process.log_file.read_text()
