"""Built-in rewards on recorded answers: right, wrong and malformed ones, each with its score.

The problems are reasoning-gym's (seed 0), or such as a data set of programs has.
"""

import asyncio
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from slipstream.broker.config import RewardSection, RewardTable
from slipstream.broker.data.gym import gym_rows
from slipstream.broker.reward_worker.pool import RewardPool
from slipstream.wire.messages.broker import ScoringItem
from slipstream.wire.messages.trajectory import Prompt, Transcript
from tests.support.commands import call_command
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration
GOLDEN = Path(__file__).parents[1] / "golden" / "rewards"
FUNCTIONS = {
    "math": "slipstream.broker.rewards.math_answer:score",
    "code": "slipstream.broker.rewards.code:score",
}


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (GOLDEN / f"{name}.jsonl").read_text().splitlines()]


# What a program may take for a test: one never ends, and on a slow machine others take long.
PATIENCES_S = {"math": (HANG_S,), "code": (2.0, 20.0, 60.0)}


def options(name: str, limit_s: float) -> dict[str, object]:
    return {"test_s": limit_s, "total_s": 15 * limit_s} if name == "code" else {"limit_s": limit_s}


def section(name: str, limit_s: float) -> RewardSection:
    return RewardSection(
        function=FUNCTIONS[name],
        options=options(name, limit_s),
        processes=2,
        timeout_s=HANG_S,
        cpu_s=HANG_S,
    )


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_recorded_answers_get_their_scores_from_a_pool(name: str):
    rows, answers = lines(name), lines(f"{name}_answers")
    work = [
        (
            ScoringItem(group_id=answer["row"], sibling=number, lease_id=number),
            Transcript(
                prompt=Prompt(**rows[answer["row"]]),
                response=answer["response"],
                num_response_tokens=1 + len(answer["response"]),
                finish_reason="stop",
            ),
        )
        for number, answer in enumerate(answers)
    ]

    async def body(limit_s: float) -> dict[int, float | str]:
        pool = await RewardPool.start(section(name, limit_s))
        try:
            return {
                score.sibling: score.unavailable if score.reward is None else score.reward
                async for score in pool.score(work)
            }
        finally:
            await pool.close()

    expected = {number: answer["score"] for number, answer in enumerate(answers)}
    for limit_s in PATIENCES_S[name]:
        found = asyncio.run(body(limit_s))
        if found == pytest.approx(expected):
            break
    assert found == pytest.approx(expected)
    assert {0.0, 1.0} <= set(expected.values())


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_recorded_answers_get_their_scores_from_the_command(
    name: str, capsys: pytest.CaptureFixture[str]
):
    rows, answers = lines(name), lines(f"{name}_answers")
    expected = [answer["score"] for answer in answers]
    for limit_s in PATIENCES_S[name]:
        code = call_command(
            *("reward", "test"),
            *(f"reward.options.{key}={value}" for key, value in options(name, limit_s).items()),
            *(f"reward.timeout_s={HANG_S}", f"reward.cpu_s={HANG_S}"),
            reward=FUNCTIONS[name],
            data=GOLDEN / f"{name}.jsonl",
            n=len(rows),
            answers=GOLDEN / f"{name}_answers.jsonl",
            json=True,
        )
        found = json.loads(capsys.readouterr().out)
        scores = [answer["reward"] for answer in found["answers"]]
        if scores == pytest.approx(expected):
            break
    assert scores == pytest.approx(expected)
    assert (code, found["unavailable"]) == (0, {})


async def test_each_data_source_may_have_its_own_reward():
    rows = [lines("math")[0], lines("code")[0]]
    answers = [lines("math_answers")[0], lines("code_answers")[0]]
    settings = RewardSection(
        function=FUNCTIONS["math"],
        options=options("math", HANG_S),
        sources={
            rows[1]["data_source"]: RewardTable(
                function=FUNCTIONS["code"], options=options("code", HANG_S)
            )
        },
    )
    work = [
        (
            ScoringItem(group_id=number, sibling=0, lease_id=number),
            Transcript(
                prompt=Prompt(**row),
                response=answer["response"],
                num_response_tokens=9,
                finish_reason="stop",
            ),
        )
        for number, (row, answer) in enumerate(zip(rows, answers, strict=True))
    ]

    pool = await RewardPool.start(settings)
    try:
        found = {score.function: score.reward async for score in pool.score(work)}
    finally:
        await pool.close()
    assert found == {FUNCTIONS["math"]: 1.0, FUNCTIONS["code"]: 1.0}


@pytest.mark.parametrize("name", ["simple_equations", "fraction_simplification", "gsm_symbolic"])
def test_the_recorded_problems_are_those_of_reasoning_gym(name: str):
    recorded = [row for row in lines("math") if row["data_source"] == name]
    size = len(recorded)
    generated = gym_rows(name, size=size, seed=0, options={}, setting="data")
    for row, raw in zip(recorded, islice(generated, size), strict=True):
        assert raw.values is not None
        assert row["prompt"] == raw.values["prompt"]
        assert row["ground_truth"] == raw.values["ground_truth"]
