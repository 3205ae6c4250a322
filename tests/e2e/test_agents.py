"""Trajectories of several turns in a whole run: what is trained is what was sampled."""

from pathlib import Path

import pytest

from tests.support.several_turns import environment_server, run_in, summary_of_all_trained
from tests.support.tiny_run import TinyRun

pytestmark = [pytest.mark.e2e]
ENVIRONMENT = """
import os

from slipstream.generators.environments.sdk import Environment, Prompt, Reply, Step


class Sums(Environment):
    def __init__(self, failures: str = "") -> None:
        self._failures = failures

    async def reset(self, prompt: Prompt) -> str:
        self._turns = 0
        if self._failures and prompt.row == 1:
            raise RuntimeError("there is no world for row 1")
        if self._failures and prompt.row in {2, 3}:
            fails_once(f"{self._failures}/{prompt.row}")
        return prompt.text

    async def step(self, reply: Reply) -> Step:
        self._turns += 1
        digits = sum(one.isdigit() for one in reply.text)
        reward = digits / max(1, len(reply.text))
        done = self._turns == 3
        return Step(messages="+1=", reward=reward, done=done, parts={"turns": self._turns})


def fails_once(path: str) -> None:
    try:
        open(path, "x").close()
    except FileExistsError:
        return
    os._exit(9)
"""


def assert_every_turn_was_trained(run: TinyRun) -> None:
    """The policy had three turns in each trajectory, and a reward for each."""
    rows = run.rollouts()
    assert len(rows) == 4 * 4 * 2
    assert {row["parts"]["turns"] for row in rows} == {3.0}
    for row in rows:
        assert 0.0 <= row["reward"] <= 3.0
        assert len(row["turns"]) == len(row["turn_rewards"]) == 3
        assert sum(row["turn_rewards"]) == pytest.approx(row["reward"])
    lags = run.differences()  # the learner has the weights of earlier versions no more
    assert min(lag for lag, _ in lags) == 0
    assert max(difference for lag, difference in lags if lag == 0) < 1e-5


REWRITING = """
async def rollout(client, prompt):
    rewards = []
    messages = [{"role": "user", "content": prompt.text}]
    for turn in range(3):
        found = await client.chat.completions.create(model="policy", messages=messages)
        said = found.choices[0].message.content or ""
        rewards.append(sum(one.isdigit() for one in said) / max(1, len(said)))
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "+1="}]
        if turn == 1:
            messages = [{"role": "user", "content": prompt.text + " again"}]
    return {"turn_rewards": rewards}
"""


@pytest.mark.slow  # trajectories of several turns are in make test, by an environment
def test_a_critic_learns_of_turns_where_an_agent_rewrites_its_history(tmp_path: Path):
    (tmp_path / "agent.py").write_text(REWRITING)
    run = run_in(
        tmp_path,
        "agent.py:rollout",
        {
            "environment.max_tokens": 200,
            "algo.preset": "ppo",
            "algo.advantage.rewards": "turns",
            "algo.advantage.over": "turns",
            "algo.advantage.discount": 0.9,
            "broker.drop_zero_variance": False,
        },
    )
    summary_of_all_trained(run)
    for row in run.rollouts():
        assert len(row["turns"]) == len(row["turn_rewards"]) == 3
        assert len(row["branches"]) == 1
        assert sum(row["turn_rewards"]) == pytest.approx(row["reward"])


def few_prompts(folder: Path) -> None:
    for name in ("train", "held_out"):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:6]))


# tests/e2e/test_custody.py has agents on a server that fail like these, the rest
# tests/integration/test_environments.py
@pytest.mark.slow
def test_environments_on_a_server_that_fail_are_tried_again_and_what_never_works_is_a_dead_letter(
    tmp_path: Path,
):
    """A failure is no reward of 0, siblings that were finished are kept, all is counted.

    What is trained is what was sampled, turn by turn. Keys, server and run are those of the guide.
    """
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    failures = tmp_path / "failures"
    failures.mkdir()
    failures.chmod(0o777)  # root's environments write what everybody may
    options = {"environment.options.failures": failures}
    served = options | {"environment.function": f"{tmp_path / 'env.py'}:Sums"}
    with environment_server(tmp_path, served) as there:
        run = run_in(
            tmp_path,
            "env.py:Sums",
            {
                **options,
                **there,
                "algo.advantage.over": "turns",
                "algo.advantage.discount": 0.9,
                "eval.file": tmp_path / "held_out.jsonl",
                "eval.every_steps": 2,
            },
            before=few_prompts,
        )
        summary = summary_of_all_trained(run)
    assert summary["dropped"]["lease_exhausted"] >= 1
    assert summary["queue"]["restarted_trajectories"] >= 2
    assert_every_turn_was_trained(run)
    assert "RuntimeError: there is no world for row 1" in run.log("broker")
    assert "its process ended with code 9" in run.log("broker")
    points = [(point["step"], point["overall"]) for point in summary["eval"]]
    assert [
        (step, found["num_problems"], found["num_answers"], found["num_dropped"])
        for step, found in points
    ] == [(step, 6, 5, 1) for step in (0, 2, 4)]
