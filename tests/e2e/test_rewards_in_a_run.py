"""Rewards in a run of real parts: every reward trained on is the function's value."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.wire.files.run_folder import ACCOUNT
from tests.support.tiny_run import TinyRun

pytestmark = [pytest.mark.e2e]
WHIMSICAL = """
import os, pathlib
from slipstream.broker.rewards.sdk import Transcript, Unavailable, reward

FOLDER = pathlib.Path(__file__).parent

@reward(version="9")
async def score(transcript: Transcript) -> dict:
    first = FOLDER / f"tried-{transcript.prompt.row}"
    if not first.exists():
        first.touch()
        raise Unavailable("ask me again")
    digits = [int(c) for c in transcript.response if c.isdigit()]
    return {"score": 1 + len(digits), "digits": len(digits), "process": os.getpid()}
"""


def dropped_without_a_reward(run: TinyRun) -> int:
    account = json.loads((run.folder / ACCOUNT).read_text())
    assert account["unaccounted"] == 0
    return int(account["dropped"].get("reward_unavailable", 0))


def assert_rewards_are_true(run: TinyRun, offset: int) -> None:
    rows = run.rollouts()
    assert rows
    for row in rows:
        digits = [int(c) for c in row["answer"] if c.isdigit()]
        assert row["parts"]["digits"] == len(digits)
        expected = offset + len(digits) if offset else sum(digits) / (9 * max(1, len(digits)))
        assert row["reward"] == pytest.approx(expected)


def test_generators_score_their_own_answers_and_try_again_what_others_could_not(tmp_path: Path):
    function = tmp_path / "whimsical.py"
    function.write_text(WHIMSICAL)
    run = TinyRun(
        tmp_path,
        {
            "reward.function": f"{function}:score",
            "reward.inline": True,
            "reward.workers": 0,
            "generators.count": 1,
            "run.steps": 3,
        },
    )
    assert run.wait() == 0, run.output
    assert dropped_without_a_reward(run) == 0
    assert_rewards_are_true(run, offset=1)
    assert "no reward for trajectory" in run.log("broker")
    assert "ask me again" in run.log("broker")
    run.assert_nothing_left()


@pytest.mark.slow  # tests/chaos/test_reward_workers.py kills three of them in a scripted run
def test_a_reward_worker_killed_in_mid_run_loses_no_reward_and_none_becomes_zero(
    start_run: Callable[..., TinyRun],
):
    run = start_run(reward__workers=2, run__steps=6)
    run.wait_until(lambda: run.steps() >= 2, "second step")
    worker = run.process_with("--name reward-worker-0")
    assert worker is not None
    worker.kill()
    assert run.wait() == 0, run.output
    assert dropped_without_a_reward(run) == 0
    assert_rewards_are_true(run, offset=0)
    assert "reward-worker-0" in run.output
    run.assert_nothing_left()
