"""Truncated sampling: the learner's distribution is the one that a real SGLang sampled from."""

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.generators.config import GeneratorSettings, generator_settings
from slipstream.generators.rollout import Submission, run_rollouts
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.generators.sglang.running import make_sampler
from slipstream.generators.text.codec import TextCodec
from slipstream.wire.messages.broker import LeasedGroup
from slipstream.wire.messages.codec import decode_payload
from slipstream.wire.messages.trajectory import Prompt
from slipstream.wire.messages.versions import PolicyVersion
from tests.integration.sglang_load import client_of
from tests.support.blank_model import write_blank_model
from tests.support.random_llama import write_random_weights
from tests.support.ranks.decisions import write_submissions
from tests.support.ranks.run import outputs, reports, start_ranks
from tests.support.tiny_run import serving

pytestmark = pytest.mark.integration
VOCABULARY = 700
GROUP = LeasedGroup(
    group_id=1,
    lease_id=1,
    item="train",
    position=0,
    prompt=Prompt(prompt="17+24="),
    siblings=tuple(range(4)),
)
TRUNCATIONS: dict[str, dict[str, float]] = {
    "top-p": {"top_p": 0.6},
    "top-k": {"top_k": 5},
    "both": {"top_p": 0.8, "top_k": 300},
    "min-p": {"min_p": 0.2},
    "bounded": {"top_p": 0.9, "max_kept_tokens": 7},
}
DROPPED: dict[str, object] = {"top_p": 0.6, "kept_tokens": "drop"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept") / "model"
    write_blank_model(folder, hidden=64, layers=2, vocab_size=VOCABULARY)
    write_random_weights(folder, scale=0.15, seed=3)
    return folder


def settings_of(model: Path, **sampling: object) -> GeneratorSettings:
    return generator_settings(
        {
            "run": {"name": "p", "dir": str(model.parent), "model": str(model)},
            "sampling": {
                "max_prompt_tokens": 16,
                "max_response_tokens": 40,
                "min_response_tokens": 8,
                "temperature": 0.8,
                **sampling,
            },
            "generators": {"device": "cpu", "max_cached_tokens": 4096},
        }
    )


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[SglangProcess]:
    with serving(settings_of(model, top_p=0.9)) as process:
        yield process


Found = dict[str, dict[str, list[float]]]  # with decisions and without, by what was computed


async def sampled(engine: SglangEngine, settings: GeneratorSettings) -> list[Submission]:
    codec = TextCodec(settings.model, settings.sampling)
    truncated = make_sampler(settings, engine, codec)
    # Beside answers of which nothing is left out, as those of an evaluation.
    whole = make_sampler(settings_of(settings.model), engine, codec)
    prompt_ids = codec.encode(GROUP.prompt)
    found, _ = await asyncio.gather(
        *(run_rollouts(one, GROUP, GROUP.siblings, prompt_ids) for one in (truncated, whole))
    )
    return found


@pytest.fixture(scope="module")
def submissions(server: SglangProcess, model: Path) -> dict[str, list[Submission]]:
    async def run() -> dict[str, list[Submission]]:
        async with client_of(server, PolicyVersion(1, 0)) as engine:
            return {
                name: await sampled(engine, settings_of(model, **sampling))
                for name, sampling in {**TRUNCATIONS, "dropped": DROPPED}.items()
            }

    return asyncio.run(run())


@pytest.fixture(scope="module")
def learned(model: Path, submissions: dict[str, list[Submission]]) -> list[dict[str, Found]]:
    """By number of ranks, 1 and 2, that the vocabulary is split over."""
    folder = model.parent
    write_submissions(folder / "submissions", submissions)
    found = []
    for ranks in (1, 2):
        work = folder / f"ranks-{ranks}"
        outputs(
            start_ranks(
                "support.ranks.decisions",
                model,
                work,
                ranks,
                [folder / "submissions"],
                tensor_parallel=ranks,
            )
        )
        found.append(reports(work, ranks)[0])
    return found


def gap(found: dict[str, list[float]]) -> float:
    pairs = zip(found["logprobs"], found["engine"], strict=True)
    return max(abs(a - b) for a, b in pairs)


@pytest.mark.parametrize("name", TRUNCATIONS)
def test_the_learner_and_the_engine_agree_on_truncated_distributions(
    submissions: dict[str, list[Submission]], learned: list[dict[str, Found]], name: str
):
    for _, frames in submissions[name]:
        decisions = decode_payload(frames[0]).decisions
        assert decisions is not None
        assert decisions.kept_ids is not None
        assert decisions.kept_ids.dtype == "uint16"
    found = learned[0][name]
    assert len(found["with"]["logprobs"]) >= 4 * 8
    assert gap(found["with"]) < 1e-5
    assert gap(found["without"]) > 0.1, "nothing was left out"
    assert found["with"]["reference"] == pytest.approx(found["with"]["logprobs"], abs=1e-6)
    most = TRUNCATIONS[name].get("max_kept_tokens", TRUNCATIONS[name].get("top_k", VOCABULARY))
    assert max(found["with"]["entropy"]) <= math.log(most) + 1e-5


def test_a_vocabulary_over_two_ranks_gives_the_same(learned: list[dict[str, Found]]):
    one, two = learned
    for name in TRUNCATIONS:
        assert gap(two[name]["with"]) < 1e-5
        for what in ("logprobs", "reference", "entropy"):
            assert two[name]["with"][what] == pytest.approx(one[name]["with"][what], abs=5e-6)


def test_tokens_that_are_dropped_by_setting_do_not_travel(
    submissions: dict[str, list[Submission]], learned: list[dict[str, Found]]
):
    dropped = submissions["dropped"]
    assert all(decode_payload(frames[0]).decisions is None for _, frames in dropped)
    found = learned[0]["dropped"]
    assert found["with"] == found["without"]
    assert gap(found["with"]) < 1e-5, "both are over the whole vocabulary"
