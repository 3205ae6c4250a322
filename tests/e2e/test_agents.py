"""Trajectories of several turns in a whole run: what is trained is what was sampled."""

from pathlib import Path

import pytest

from tests.support.tiny_run import TinyRun

pytestmark = [pytest.mark.e2e]
ENVIRONMENT = """
from slipstream.generators.environments.sdk import Environment, Prompt, Reply, Step


class Sums(Environment):
    async def reset(self, prompt: Prompt) -> str:
        self._turns = 0
        return prompt.text

    async def step(self, reply: Reply) -> Step:
        self._turns += 1
        digits = sum(one.isdigit() for one in reply.text)
        reward = digits / max(1, len(reply.text))
        done = self._turns == 3
        return Step(messages="+1=", reward=reward, done=done, parts={"turns": self._turns})
"""


def test_a_run_trains_trajectories_of_several_turns(tmp_path: Path):
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    run = TinyRun(
        tmp_path,
        {
            "environment.function": f"{tmp_path / 'env.py'}:Sums",
            "environment.max_turns": 3,
            "environment.max_tokens": 150,
            "sampling.max_response_tokens": 24,
            "reward.workers": 0,
        },
    )
    assert run.wait() == 0, run.output
    summary = run.summary()
    assert (summary["finished"], summary["unaccounted"], summary["trained"]) == (True, 0, 16)
    rows = run.rollouts()
    assert len(rows) == 4 * 4 * 2
    assert {row["parts"]["turns"] for row in rows} == {3.0}
    for row in rows:
        assert 0.0 <= row["reward"] <= 3.0
        assert len(row["turns"]) == 3
        for one, difference in zip(
            row["version_runs"], row["logprob_abs_diff_by_run"], strict=True
        ):  # of the weights that the learner has then; it has those of earlier versions no more
            assert one["step"] <= row["step"]
            assert difference < 1e-5 or one["step"] < row["step"]
    run.assert_nothing_left()
