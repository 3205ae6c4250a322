"""Every algorithm trains through broker, ledger and agents, on answers of a scripted engine."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.algos.presets import PRESETS
from slipstream.wire.files.checkpoints import newest_checkpoint, read_checkpoint_info
from tests.chaos.harness import chaos_run
from tests.support import nursery
from tests.support.blank_model import write_blank_model
from tests.support.random_llama import write_random_weights

pytestmark = [pytest.mark.integration, pytest.mark.redis]
STEPS, BOUND, GROUPS, SIBLINGS, MINIBATCHES = 3, 2, 4, 4, 2
VOCABULARY = 40  # the scripted engine's
WITH_CRITIC = {"ppo", "vapo", "pf-ppo"}
WITH_REFERENCE = {"grpo", "reinforce++", "reinforce++-baseline", "renewed"}
REJECTING = {"m2po", "whole minibatch"}
WARMUP = {"vapo": 1}  # steps that train the critic alone; its own 50 leave no other
# Algorithms that are no presets: a part of each needs something that no other does.
OTHERS: dict[str, tuple[str, ...]] = {
    "optimal token baseline": ("algo.advantage=optimal-token-baseline",),
    "maxrl": ("algo.advantage=maxrl", "algo.data.bias=1.0"),
    "parts of the reward": ("algo.advantage={name = 'gdpo', weights = {low = 1.0, many = 0.1}}",),
    "whole minibatch": (
        "algo.preset=decoupled-ppo",
        "algo.correction.clip-cov={share = 0.5, low = -1.0, high = 9.0}",
        "algo.correction.kl-cov={share = 0.1}",
        "algo.correction.importance-sampling.normalize=true",
    ),
    "renewed": (
        "algo.kl={coefficient = 0.01, renew_every = 2, importance_weighted = true}",
        "checkpoint.every_steps=1",
    ),
}
# Each part of a run once; the others, of the same parts, are slow: their numbers are in
# tests/unit/algos, their steps in tests/unit/learner/training/test_step.py.
QUICK = {
    *("grpo", "vapo", "pf-ppo", "dppo", "distill"),  # reference, critic, warm-up, data, teacher
    *("parts of the reward", "whole minibatch", "renewed"),
}
OVERRIDES = {
    **{name: (f"algo.critic.warmup_steps={steps}",) for name, steps in WARMUP.items()},
    "distill": ("algo.teacher.model=file://{teacher}", "run.cache_dir={teacher}/../cache"),
}


class Report(msgspec.Struct):
    """The learner's report of a run: figures by step, digests of the weights before and after."""

    committed: list[dict[str, float]]
    weights: tuple[str, str]


class Learner:
    """A process that trains one run after another; one that a run has ended has a successor."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self.start()

    def start(self) -> None:
        with self._log.open("w") as errors:
            self.process = nursery.start(
                [sys.executable, "-m", "tests.support.ranks.presets"],
                env={"PYTHONPATH": str(nursery.ROOT), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def train(self, config: Path, *overrides: str) -> Report:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(config), *overrides]) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline() or "{}")
        if not answer:
            printed = self._log.read_text()
            self.end()
            self.start()
            raise AssertionError(printed)
        return Report(answer["committed"], (answer["weights"][0], answer["weights"][1]))


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learner]:
    learner = Learner(tmp_path_factory.mktemp("learner") / "learner.log")
    yield learner
    learner.end()


REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    codes = [*map(ord, solution_str)]
    return {"score": sum(codes) % 5 / 4, "low": sum(codes) % 3, "many": len(codes)}
"""


@pytest.mark.parametrize(
    "preset",
    [pytest.param(p, marks=[pytest.mark.slow] * (p not in QUICK)) for p in (*PRESETS, *OTHERS)],
)
def test_an_algorithm_trains_what_the_ledger_delivers(
    learner: Learner, short_folder: Path, preset: str
):
    with chaos_run(
        short_folder,
        prompts=500,
        reward=REWARD,
        generators=1,
        run__steps=STEPS,
        run__epochs=0.0,
        run__max_staleness_steps=BOUND,
        run__group_size=SIBLINGS,
        run__groups_per_step=GROUPS,
        sampling__max_response_tokens=48,
        generators__max_sequences=64,  # all that the bound allows at a time
    ) as it:
        write_blank_model(short_folder / "model", hidden=32, layers=1, vocab_size=VOCABULARY)
        write_random_weights(short_folder / "model", scale=0.15, seed=3)
        teacher = short_folder / "teacher"
        shutil.copytree(short_folder / "model", teacher)
        write_random_weights(teacher, scale=0.15, seed=4)
        del it.plans["learner"]
        it.start()
        report = learner.train(
            short_folder / "run.json.toml",
            *([f"algo.preset={preset}"] if preset in PRESETS else OTHERS[preset]),
            f"learner.minibatches={MINIBATCHES}",
            "learner.lr=1e-3",
            *(override.format(teacher=teacher) for override in OVERRIDES.get(preset, ())),
        )
        it.finish()
        account = it.account()

    assert (account.finished, account.version.step) == (True, STEPS)
    assert account.trained == STEPS * GROUPS
    assert account.issued == account.trained + sum(account.dropped.values())
    assert account.unaccounted == 0
    assert sum(account.in_flight.values()) == 0

    assert len(report.committed) == STEPS
    figures = {name: value for step in report.committed for name, value in step.items()}
    for step in report.committed:
        assert [name for name, value in step.items() if not math.isfinite(value)] == []
        assert step["reward/group_variance"] > 0
        assert 0 <= step["staleness/oldest"] <= BOUND
    assert max(step["staleness/oldest"] for step in report.committed) > 0, "no data was stale"
    assert figures.keys() >= {"staleness/mismatch_kl@lag1", "staleness/ess@lag1"}

    trained = [step for step in report.committed if "policy/loss" in step]
    assert report.committed[WARMUP.get(preset, 0) :] == trained
    assert min(step["policy/grad_norm"] for step in trained) > 0
    assert {step["policy/skipped_minibatches"] for step in trained} == {0.0}
    assert report.weights[0] != report.weights[1]

    assert any(name.startswith("critic/") for name in figures) == (preset in WITH_CRITIC)
    if preset in WITH_CRITIC:
        assert min(step["critic/grad_norm"] for step in report.committed) > 0
        assert {step["critic/skipped_minibatches"] for step in report.committed} == {0.0}
    assert ("policy/kl_reference" in figures) == (preset in WITH_REFERENCE)
    if preset in WITH_REFERENCE:
        assert trained[-1]["policy/kl_reference"] != 0.0, "the reference moved with the policy"
    assert ("policy/kl_behavior" in figures) == (preset == "dppo")
    assert ("policy/kl_teacher" in figures) == (preset == "distill")
    assert (max(step["staleness/masked"] for step in trained) > 0) == (preset in REJECTING)
    assert (min(step["policy/trained_share"] for step in trained) < 1) == (preset == "pf-ppo")

    newest = newest_checkpoint(it.run_folder)
    assert newest is not None
    info = read_checkpoint_info(newest)
    assert info.has_critic == (preset in WITH_CRITIC)
    assert info.has_reference == (preset == "renewed")
