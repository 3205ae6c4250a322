"""Answers decoded in batches that prefill others, on real SGLang, against transformers and alone.

An answer that is asked for alone is in no mixed batch. Adapters are in test_lora_versions.py.
"""

import asyncio
import json
import random
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pytest

from slipstream.generators.config import generator_settings
from slipstream.generators.engine import Completion, ExpertLayers, SamplingParams, Scores
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.wire.messages.versions import PolicyVersion
from tests.integration.sglang_load import client_of, num_mixed, until_load
from tests.support.blank_model import write_blank_model
from tests.support.engine_steps import load_folder, pause
from tests.support.random_llama import make_qwen3_moe, write_random_weights
from tests.support.ranks.run import outputs, start
from tests.support.tiny_run import serving

pytestmark = pytest.mark.integration
VOCABULARY = 40
END = 2
CHUNK = 64  # tokens that are prefilled at a time: prompts are longer
LANES = 8
TOLERANCE = 3e-5  # of float32 logprobs, whatever batches they were in; versions are 1e-3 apart
TRIES = 10  # to have enough happen: a slow machine may be too late
OLD, NEW = PolicyVersion(1, 0), PolicyVersion(1, 1)
PLAIN = SamplingParams(temperature=1.0, max_new_tokens=120)
KINDS = (
    PLAIN,
    replace(PLAIN, min_new_tokens=100),
    replace(PLAIN, max_kept=8, top_p=0.9),
    replace(PLAIN, stop=("7", "=")),
)
T = TypeVar("T")


def model_of(folder: Path, seed: int, scale: float = 0.2) -> Path:
    write_blank_model(folder, hidden=64, layers=2, vocab_size=VOCABULARY)
    write_random_weights(folder, scale=scale, seed=seed)
    return folder


def mixing(model: Path, run: dict[str, object], tokens: int, **sglang: object):
    """Return a server that mixes batches, as one with environments does."""
    return serving(
        generator_settings(
            {
                "run": {"name": "p", "dir": str(model.parent), "model": str(model), **run},
                "sampling": {
                    "max_prompt_tokens": 200,
                    "max_response_tokens": 200,
                    "top_p": 0.9,
                    "max_kept_tokens": 8,
                },
                "generators": {
                    "device": "cpu",
                    "max_cached_tokens": tokens,
                    "max_sequences": LANES,
                    "sglang": {
                        "enable_mixed_chunk": True,
                        "chunked_prefill_size": CHUNK,
                        "log_level": "info",
                        **sglang,
                    },
                },
            }
        )
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[PolicyVersion, Path]:
    folder = tmp_path_factory.mktemp("mixed")
    return {version: model_of(folder / version.label, version.step) for version in (OLD, NEW)}


@pytest.fixture(scope="module")
def overlapped(models: dict[PolicyVersion, Path]) -> Iterator[SglangProcess]:
    """Give a server that plans a batch while it computes one, with too small a cache."""
    eager = {"disable_overlap_schedule": False, "schedule_conservativeness": 0.05}
    with mixing(models[OLD], {}, 900, **eager) as process:
        yield process


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangProcess]:
    folder = model_of(tmp_path_factory.mktemp("mixture") / "model", 3, scale=0.1)
    make_qwen3_moe(folder, experts=8)
    with mixing(folder, {"routing_replay": "R3"}, 4096) as process:
        yield process


class Asked(NamedTuple):
    """A question: a prompt, how to sample, the answer's seed."""

    prompt: list[int]
    params: SamplingParams
    seed: int


def questions(count: int, kinds: Sequence[SamplingParams]) -> list[Asked]:
    numbers = random.Random(count)
    return [
        Asked(prompt_of(numbers, 4, 150), kinds[seed % len(kinds)], seed) for seed in range(count)
    ]


def prompt_of(numbers: random.Random, shortest: int, longest: int) -> list[int]:
    """Return random tokens, the last one of the vocabulary among them."""
    length = numbers.randrange(shortest, longest)
    return [VOCABULARY - 1, *numbers.choices(range(3, VOCABULARY), k=length - 1)]


async def answered(engine: SglangEngine, asked: Asked) -> Completion:
    prompt, params, seed = asked
    (answer,) = await engine.sample(prompt, params, count=1, seeds=[seed])
    return answer


async def begun_apart(parts: Sequence[Awaitable[T]]) -> list[T]:
    """Await all, begun a moment apart: one is prefilled while others are decoded."""

    async def later(number: int, part: Awaitable[T]) -> T:
        await asyncio.sleep(0.02 * number)
        return await part

    return await asyncio.gather(*(later(number, part) for number, part in enumerate(parts)))


def by_transformers(model: Path, work: Path, sequences: list[list[int]]) -> list[list[float]]:
    given = work / "sequences.json"
    given.write_text(json.dumps(sequences))
    (printed,) = outputs([start(work, "integration.transformers_logprobs", model, given)])
    values: list[list[float]] = json.loads(printed)
    return values


def error(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(one - other) for one, other in zip(found, expected, strict=True))


def assert_same(
    mixed: Sequence[Completion], alone: Sequence[Completion], tolerance: float = 2 * TOLERANCE
) -> None:
    """Assert that answers are those of an engine that mixes nothing."""
    for one, other in zip(mixed, alone, strict=True):
        assert one.token_ids == other.token_ids
        assert (one.kept, one.finish_reason) == (other.kept, other.finish_reason)
        assert error(one.logprobs, other.logprobs) < tolerance


async def test_answers_of_mixed_batches_are_those_of_transformers_and_those_given_alone(
    models: dict[PolicyVersion, Path], overlapped: SglangProcess, tmp_path: Path
):
    asked = questions(24, KINDS)
    numbers = random.Random(0)
    scored = [prompt_of(numbers, 70, 190) for _ in range(8)]
    async with client_of(overlapped, OLD) as engine:
        answers, scores = await asyncio.gather(
            begun_apart([answered(engine, one) for one in asked]),
            begun_apart([engine.score([tokens], num_context=20) for tokens in scored]),
        )
        batches, rows = num_mixed(overlapped)
        assert batches > 20
        assert rows > 2 * batches
        assert (await engine.load()).num_retractions > 0, "in a cache for some of them"
        alone = [await answered(engine, one) for one in asked]
        assert num_mixed(overlapped) == (batches, rows)
    assert_same(answers, alone)
    kinds = {answer.finish_reason for answer in answers}
    assert kinds == {"stop", "length"}
    plain = [
        (one, answer) for one, answer in zip(asked, answers, strict=True) if one.params == PLAIN
    ]
    sequences = [one.prompt + answer.token_ids for one, answer in plain]
    expected = by_transformers(models[OLD], tmp_path, [*sequences, *scored])
    for (one, answer), values in zip(plain, expected, strict=False):
        assert error(answer.logprobs, values[len(one.prompt) - 1 :]) < TOLERANCE
    for score, values in zip(scores, expected[len(plain) :], strict=True):
        assert isinstance(score, Scores)
        assert error(score.logprobs[0], values[19:]) < TOLERANCE


async def test_versions_of_tokens_are_exact_when_weights_change_amid_mixed_batches(
    models: dict[PolicyVersion, Path], overlapped: SglangProcess, tmp_path: Path
):
    asked = questions(24, [PLAIN])
    async with client_of(overlapped) as engine:
        for _ in range(TRIES):
            await change(engine, models[OLD], OLD)
            before = num_mixed(overlapped)[0]
            parts = begun_apart([answered(engine, one) for one in asked])
            answering = asyncio.create_task(parts)
            await until_busy(overlapped, answering)
            amid = num_mixed(overlapped)[0]
            await change(engine, models[NEW], NEW)
            answers = await answering
            changed = [answer for answer in answers if len(answer.version_starts) == 2]
            if before < amid < num_mixed(overlapped)[0] and len(changed) > 2:
                break
        else:
            raise AssertionError("the weights changed too early or too late")
    sequences = [one.prompt + answer.token_ids for one, answer in zip(asked, answers, strict=True)]
    columns = [by_transformers(folder, tmp_path, sequences) for folder in models.values()]
    for one, answer, *row in zip(asked, answers, *columns, strict=True):
        begin = len(one.prompt) - 1
        by_version = {version: row[version.step][begin:] for version in models}
        firsts = [first for first, _ in answer.version_starts] + [len(answer.token_ids)]
        for (first, end), (_, version) in zip(pairwise(firsts), answer.version_starts, strict=True):
            found = answer.logprobs[first:end]
            assert error(found, by_version[version][first:end]) < TOLERANCE
            others = [values[first:end] for other, values in by_version.items() if other != version]
            assert min(error(found[:1], values[:1]) for values in others) > TOLERANCE
            assert min(error(found[-1:], values[-1:]) for values in others) > TOLERANCE


async def until_busy(process: SglangProcess, asked: "asyncio.Task[list[Completion]]") -> None:
    await until_load(process, lambda load: load.num_running > LANES // 2 or asked.done())


async def change(engine: SglangEngine, model: Path, version: PolicyVersion) -> None:
    await pause(engine)
    await load_folder(engine, model)
    await engine.label(version)
    await engine.resume()


async def test_experts_of_mixed_batches_are_those_chosen_alone(mixture: SglangProcess):
    layers = ExpertLayers(total=2, dense=0)
    asked = questions(16, [replace(kind, experts_of=layers) for kind in KINDS])
    async with client_of(mixture, OLD) as engine:
        answers = await begun_apart([answered(engine, one) for one in asked])
        batches, rows = num_mixed(mixture)
        assert rows > batches > 10
        alone = [await answered(engine, one) for one in asked]
    assert_same(answers, alone, 1e-4)  # routers' weights carry rounding further
    for one, answer, other in zip(asked, answers, alone, strict=True):
        assert answer.experts is not None
        assert len(answer.experts) == len(one.prompt) + len(answer.token_ids) - 1
        assert np.array_equal(answer.experts, other.experts)
