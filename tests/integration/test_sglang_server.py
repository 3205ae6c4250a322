"""One real SGLang server: its log, its secrets, its seeds and stops, as a judge, as a teacher."""

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.broker.config import RewardSection
from slipstream.broker.reward_worker.pool import RewardPool
from slipstream.generators.config import generator_settings
from slipstream.generators.engine import Completion, SamplingParams
from slipstream.generators.sglang.process import SglangProcess
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.keys import write_private
from slipstream.wire.messages.broker import ScoringItem
from slipstream.wire.messages.trajectory import Score
from slipstream.wire.messages.versions import PolicyVersion
from tests.integration.sglang_load import client_of
from tests.integration.test_judge_reward import transcript
from tests.integration.test_secrets import shown
from tests.integration.test_teacher import batches, teacher, token_sequences, train_sequences
from tests.support.ranks.run import outputs, start
from tests.support.tiny_run import sglang_server, write_policy
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration
PROMPT = [3, 4, 13]
VERSION = PolicyVersion(1, 0)
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=40, min_new_tokens=40)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=60, min_new_tokens=60)
TRACKERS = "a-key-of-a-tracker"
NUCLEUS = SamplingParams(temperature=1.0, max_new_tokens=60, min_new_tokens=60, top_p=0.5, top_k=9)


@pytest.fixture(scope="module")
def server() -> Iterator[SglangProcess]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("WANDB_API_KEY", TRACKERS)
        with sglang_server() as process:
            yield process


def ids(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def test_a_healthy_start_has_neither_traceback_nor_warning_and_counts_what_is_left_out(
    server: SglangProcess,
):
    log = server.log_file.read_text()  # before it was asked for anything
    assert "Traceback" not in log, log
    assert "Warning" not in log, log
    (line,) = (line for line in log.splitlines() if line.startswith("[slipstream]"))
    found = re.match(r"\[slipstream\] (\d+) known warnings of libraries are left out here", line)
    assert found is not None
    assert int(found[1]) >= 3


async def test_a_server_answers_after_its_collectors_are_frozen(
    server: SglangProcess, caplog: pytest.LogCaptureFixture
):
    frozen = replace(server, freezes_collectors=True)
    await frozen.until_ready(HANG_S)
    assert not caplog.records, "it did as asked"
    async with client_of(server, VERSION) as engine:
        assert await engine.sample(PROMPT, PARAMS, count=1)


def test_a_failed_start_has_its_traceback(tmp_path: Path):
    write_policy(tmp_path / "model")
    weights = next((tmp_path / "model").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100])
    server = SglangProcess.start(
        generator_settings(
            {
                "run": {"name": "p", "dir": str(tmp_path), "model": str(tmp_path / "model")},
                "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 64},
                "generators": {"device": "cpu", "max_cached_tokens": 4096},
            }
        ),
        "generator-0",
    )
    try:
        with pytest.raises(ConfigError, match="SafetensorError"):
            asyncio.run(server.until_ready(HANG_S))
    finally:
        server.stop()
    log = server.log_file.read_text()
    assert "Traceback (most recent call last)" in log
    assert "SafetensorError" in log
    assert "known warnings of libraries are left out here" in log


def test_sglang_process_shows_neither_its_key_nor_secrets_of_its_parent(server: SglangProcess):
    assert TRACKERS not in shown(server.process.pid)
    assert len(server.api_key) >= 16
    assert server.api_key not in shown(server.process.pid)
    assert server.api_key not in repr(server)
    log = server.log_file.read_text(errors="replace")
    assert log
    assert server.api_key not in log


async def test_the_same_seed_gives_the_same_answer_whatever_ran_before(server: SglangProcess):
    async with client_of(server, VERSION) as engine:
        (first,) = ids(await engine.sample(PROMPT, PARAMS, count=1, seeds=[7]))
        (second,) = ids(await engine.sample(PROMPT, PARAMS, count=1, seeds=[7]))
        await engine.sample([5, 6], PARAMS, count=3)
        (third,) = ids(await engine.sample(PROMPT, PARAMS, count=1, seeds=[7]))
        assert first == second == third
        (other,) = ids(await engine.sample(PROMPT, PARAMS, count=1, seeds=[2**63 - 1]))
        assert other != first
        unseeded = ids(await engine.sample(PROMPT, PARAMS, count=3))
        assert len({tuple(answer) for answer in unseeded}) == 3


async def test_a_seeded_answer_is_the_same_beside_others_greedy_and_truncated_ones_too(
    server: SglangProcess,
):
    async with client_of(server, VERSION) as engine:
        (alone,) = ids(await engine.sample(PROMPT, PARAMS, count=1, seeds=[11]))
        (greedy,) = ids(await engine.sample(PROMPT, GREEDY, count=1))
        (nucleus,) = ids(await engine.sample(PROMPT, NUCLEUS, count=1, seeds=[12]))
        beside_greedy, beside_nucleus, among = await asyncio.gather(
            engine.sample(PROMPT, GREEDY, count=1),
            engine.sample(PROMPT, NUCLEUS, count=1, seeds=[12]),
            engine.sample(PROMPT, PARAMS, count=4, seeds=[9, 10, 11, 12]),
        )
        assert ids(among)[2] == alone
        assert ids(beside_greedy) == [greedy]
        assert ids(beside_nucleus) == [nucleus]


async def test_first_tokens_of_many_seeds_follow_the_softmax(server: SglangProcess):
    async with client_of(server, VERSION) as engine:
        one_token = SamplingParams(temperature=0.7, max_new_tokens=1)
        answers = await engine.sample(PROMPT, one_token, count=3000, seeds=range(3000))
        counts = Counter(answer.token_ids[0] for answer in answers)
        probs = {answer.token_ids[0]: math.exp(answer.logprobs[0]) for answer in answers}
        common = {token: p for token, p in probs.items() if p * 3000 >= 5}
        rest = 1.0 - sum(common.values())
        chi_square = sum((counts[t] - 3000 * p) ** 2 / (3000 * p) for t, p in common.items())
        rare = 3000 - sum(counts[token] for token in common)
        chi_square += (rare - 3000 * rest) ** 2 / (3000 * rest)
        degrees = len(common)
        assert degrees > 5
        assert chi_square < degrees + 4.5 * math.sqrt(2 * degrees)


async def test_a_response_ends_after_a_stop_token_or_a_stop_text(server: SglangProcess):
    async with client_of(server, VERSION) as engine:
        stop_id, text_id = 9, 12  # "6" and "9" of the quickstart's characters
        by_token = SamplingParams(temperature=1.0, max_new_tokens=400, stop_token_ids=(stop_id,))
        for answer in await engine.sample(PROMPT, by_token, count=8, seeds=range(8)):
            assert answer.finish_reason == "stop"
            assert answer.token_ids[-1] in {stop_id, 2}
            assert stop_id not in answer.token_ids[:-1]
        by_text = SamplingParams(temperature=1.0, max_new_tokens=400, stop=("9",))
        for answer in await engine.sample(PROMPT, by_text, count=8, seeds=range(8)):
            assert answer.token_ids[-1] in {text_id, 2}
            assert text_id not in answer.token_ids[:-1]
            assert len(answer.logprobs) == len(answer.token_ids)
        barred = SamplingParams(
            temperature=1.0, max_new_tokens=60, min_new_tokens=50, stop_token_ids=(stop_id,)
        )
        for answer in await engine.sample(PROMPT, barred, count=8, seeds=range(8)):
            assert not {stop_id, 2} & set(answer.token_ids[:50])


# ---- as a judge and as a teacher -----------------------------------------------


@pytest.fixture
def key_file(server: SglangProcess, tmp_path: Path) -> str:
    write_private(tmp_path / "sglang.key", server.api_key)
    return str(tmp_path / "sglang.key")


def scores(options: dict[str, Any], count: int = 4) -> list[Score]:
    settings = RewardSection(function="slipstream.broker.rewards.judge:LlmJudge", options=options)
    work = [
        (ScoringItem(group_id=0, sibling=n, lease_id=n), transcript(str(n))) for n in range(count)
    ]

    async def body() -> list[Score]:
        pool = await RewardPool.start(settings)
        try:
            return [score async for score in pool.score(work)]
        finally:
            await pool.close()

    return asyncio.run(body())


def test_a_model_of_sglang_grades(server: SglangProcess, key_file: str):
    found = scores(
        {
            "url": f"{server.url}/v1",
            "api": "completions",
            "template": "{answer}=",
            "pattern": r"(\d)",
            "scale": 9,
            "max_tokens": 64,
            "api_key_file": key_file,
            "extra": {"ignore_eos": True, "stop": list("0123456789"), "no_stop_trim": True},
        }
    )
    assert len(found) == 4
    for score in found:
        assert (score.reward is not None) or "the judge's reply" in score.unavailable
    assert any(score.reward is not None for score in found), found


def test_a_model_of_sglang_that_talks_nonsense_gives_no_reward(
    server: SglangProcess, key_file: str
):
    options = {
        "url": f"{server.url}/v1",
        "api": "completions",
        "template": "{answer}=",
        "max_tokens": 8,
        "api_key_file": key_file,
    }
    for score in scores(options):
        assert score.unavailable.startswith(
            ("the judge's reply holds no number", "the judge's reply was cut off")
        )


def test_sglang_without_the_key_gives_no_reward(server: SglangProcess):
    (score,) = scores({"url": f"{server.url}/v1", "template": "{answer}"}, count=1)
    assert "HTTP 401" in score.unavailable


def test_teacher_logprobs_of_sglang_are_those_of_transformers(
    server: SglangProcess, key_file: str, tmp_path: Path
):
    write_policy(tmp_path / "model")
    given = tmp_path / "sequences.json"
    given.write_text(json.dumps(token_sequences()))
    (printed,) = outputs(
        [start(tmp_path, "integration.transformers_logprobs", tmp_path / "model", given)]
    )
    expected = json.loads(printed)
    asked = teacher(server.url, api_key_file=key_file, concurrency=2)
    first, second = (values.tolist() for values in asked.logprobs(batches()))
    with pytest.raises(ConfigError, match=r"the teacher cannot be used: .* answered HTTP 401"):
        teacher(server.url)
    given_back = iter([*first, *second])
    for sequence, logprobs in zip(train_sequences(), expected, strict=True):
        for chosen, logprob in zip(sequence.loss_mask, [0.0, *logprobs], strict=True):
            assert next(given_back) == pytest.approx(logprob if chosen else 0.0, abs=2e-4)
    assert min(min(logprobs) for logprobs in expected) < -1.0, "nothing was compared"
