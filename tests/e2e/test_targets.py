"""A target of an evaluation, which ends the run, and one of staleness below the bound.

The first run's learner has ranks of every kind; its generators give the rewards, and ask again.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.weightbus.version.engine_checksums import EngineLayout
from tests.support.families import as_family
from tests.support.served import assert_trained_and_served
from tests.support.tiny_run import TinyRun, assert_complete, rows_of

pytestmark = [pytest.mark.e2e]
STEPS = 3  # until the evaluation that reaches the target
HELD_STEPS, LAST = 32, 6
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


def as_deepseek(folder: Path) -> None:
    """Make the policy a DeepSeek-V3 of the same tokens."""
    as_family(folder, "deepseek_v3")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRun]:
    """Yield a run of latent attention, experts behind a router with a bias, a dense layer.

    Ranks of the learner and of its engine have half of the experts each.
    """
    folder = tmp_path_factory.mktemp("targets")
    (folder / "whimsical.py").write_text(WHIMSICAL)
    (folder / "other.jsonl").write_text('{"prompt": "11+11=", "data_source": "other"}\n' * 3)
    run = TinyRun(
        folder,
        {
            "run.steps": STEPS + 20,
            "sampling.temperature": 0.6,
            "learner.ranks": 4,
            "learner.tensor_parallel": 2,
            "learner.pipeline_parallel": 2,
            "learner.expert_parallel": 2,
            "generators.sglang.tp_size": 2,
            "generators.sglang.ep_size": 2,
            "reward.function": f"{folder / 'whimsical.py'}:score",
            "reward.inline": True,
            "reward.workers": 0,
            "eval.sets.ours.file": folder / "held_out.jsonl",
            "eval.sets.ours.max_rows": 8,
            "eval.sets.more.file": folder / "other.jsonl",
            "eval.samples": 4,
            "eval.temperature": 1.0,
            "eval.before_train": False,
            "eval.every_steps": STEPS,
            "eval.metric": "other:mean",
            "eval.target": 0.01,
        },
        before=as_deepseek,
    )
    assert run.wait() == 0, run.output
    yield run
    run.assert_nothing_left()


def test_a_learner_of_tensor_pipeline_and_expert_ranks_publishes_to_expert_ranks(run: TinyRun):
    summary = assert_trained_and_served(run, EngineLayout("cpu", 2, 1, 2))
    assert set(summary["versions"]) >= {"torch", "sglang", "megatron-core", "redis"}
    assert summary["busy"]["learner"] > 0


# tests/unit/broker/ledger/test_throttle.py has the decision.
@pytest.mark.slow
def test_generators_ahead_of_a_slow_learner_are_held_back_to_the_target(tmp_path: Path):
    run = TinyRun(
        tmp_path,
        {
            "run.steps": HELD_STEPS,
            "run.max_staleness_steps": 5,
            "run.staleness_target.p95_lag": 1,
            "learner.max_tokens_per_microbatch": 80,  # an answer at a time: slow
            "generators.count": 2,
            "generators.max_sequences": 64,
        },
    )
    assert run.wait() == 0, run.output
    rows = rows_of(run.folder / "metrics.jsonl")
    steps = [row for row in rows if "staleness/bound_in_force" in row]
    assert [row["step"] for row in steps] == list(range(1, HELD_STEPS + 1))
    oldest: dict[int, int] = {}
    for row in run.rollouts():
        lags = [row["step"] - one["step"] for one in row["version_runs"]]
        oldest[row["step"]] = max(oldest.get(row["step"], 0), *lags)
    assert max(oldest.values()) >= 3, "nothing was to be held back"
    last = [oldest[step] for step in range(HELD_STEPS - LAST, HELD_STEPS)]
    assert sum(last) / LAST <= 1.5, f"{oldest}, {steps}"  # it tries more now and then
    assert steps[0]["staleness/bound_in_force"] == 5
    assert steps[HELD_STEPS - 1]["staleness/bound_in_force"] <= 2
    assert "is above its target" in run.log("broker")
    run.assert_nothing_left()


def test_several_sets_are_sampled_and_scored_and_end_the_run_at_the_target(run: TinyRun):
    summary = run.summary()
    assert "eval.target" in summary["stop_reason"]
    assert STEPS <= summary["steps"] < STEPS + 20
    assert summary["total_steps"] == summary["steps"]
    assert summary["equation"]["unaccounted"] == 0
    newest = summary["eval"][-1]
    assert newest["step"] == summary["steps"]
    assert set(newest["by_source"]) == {"ours", "other"}
    assert newest["by_source"]["other"]["num_answers"] == 12
    assert newest["overall"]["num_problems"] == 11
    assert set(newest["overall"]["metrics"]) == {
        *("mean@4", "pass@1", "pass@2", "pass@4"),
        *("response_tokens", "truncated"),
    }
    versions = json.loads((run.folder / "versions.json").read_text())
    assert set(versions["packages"]) >= {"torch", "sglang", "megatron-core"}


def test_generators_score_their_own_answers_and_try_again_what_they_could_not(run: TinyRun):
    assert_complete(run.folder)
    assert "reward_unavailable" not in run.summary()["dropped"]
    rows = run.rollouts()
    assert rows
    for row in rows:
        digits = sum(one.isdigit() for one in row["answer"])
        assert (row["parts"]["digits"], row["reward"]) == (digits, 1 + digits)
    assert "no reward for trajectory" in run.log("broker")
    assert "ask me again" in run.log("broker")
