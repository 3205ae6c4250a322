"""Guides of docs/, followed to the letter: the tiny policy, an empty home, no download.

tests/e2e/test_two_nodes.py, test_remote_roles.py and others follow those for several hosts.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from slipstream.wire.files.run_folder import ACCOUNT
from tests.support.guide import Step, before_command, blocks, follow, steps
from tests.support.tiny_run import ROOT, rows_of

pytestmark = [pytest.mark.e2e]
DOCS = ROOT / "docs"
STARTED = steps(blocks(DOCS / "getting_started.md", "A task of your own"))
BEFORE_THE_RUN = before_command("--dry-run", STARTED)
LEAST_GAIN = 0.2  # in the share of right answers, six deviations of 256 of them


def files(all_steps: list[Step]) -> list[str]:
    return [step.file for step in all_steps if step.file]


def printed_by(words: str, all_steps: list[Step], printed: list[str]) -> str:
    """Return what the one block with a command printed."""
    (found,) = [text for step, text in zip(all_steps, printed, strict=True) if words in step.text]
    return found


def assert_complete(run: Path, num_steps: int) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"]) == ("finished", num_steps)
    assert json.loads((run / ACCOUNT).read_text())["unaccounted"] == 0


@pytest.mark.slow  # the next one goes most of that way
def test_getting_started_leads_from_prompts_to_an_exported_policy(inputs: Path):
    assert files(STARTED) == ["sums.py", "my_reward.py", "run.toml"]
    printed = follow(STARTED, inputs)
    sums = inputs / "sums"

    assert "no bad rows" in printed_by("data check", STARTED, printed)
    assert "6 answers, mean 0.500, 0 unavailable" in printed_by("reward test", STARTED, printed)
    assert "0 fail" in printed_by("--dry-run", STARTED, printed)
    assert {path.name for path in (sums / "runs").iterdir()} == {"sums", "keys"}  # one run
    assert_complete(sums / "runs" / "sums", 20)
    results = rows_of(sums / "runs" / "sums" / "eval" / "results.jsonl")
    rights = {one["step"]: one["overall"]["metrics"]["mean@1"] for one in results}
    assert sorted(rights) == [0, 10, 20]
    assert rights[20] - rights[0] >= LEAST_GAIN, rights

    looked = printed_by("slipstream show", STARTED, printed)
    newest = rows_of(sums / "runs" / "sums" / "eval" / "step-000020.jsonl")
    assert all(row["prompt"] in looked for row in newest[-3:])
    assert "eval/mean@1" in looked
    assert "reward/mean" in looked

    before, after = (load_file(sums / name / "model.safetensors") for name in ("model", "my-model"))
    assert before.keys() == after.keys()
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])
    tokenizer = Tokenizer.from_file(str(sums / "my-model" / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("12+34=").ids) == "12+34="
    assert json.loads((sums / "my-model" / "config.json").read_text())["model_type"] == "llama"


def test_a_reward_of_ones_own_is_tried_and_trained_with(inputs: Path):
    own = steps(blocks(DOCS / "rewards.md", "A reward of your own"))
    assert files(own) == ["near.py", "answers.jsonl"]
    printed = follow([*BEFORE_THE_RUN, *own], inputs)[len(BEFORE_THE_RUN) :]
    assert "3 answers, mean 0.444, 0 unavailable" in printed_by("reward test", own, printed)
    looked = printed_by("slipstream show", own, printed)
    assert "off_by" in looked
    assert "reward/part/off_by" in looked

    run = inputs / "sums" / "runs" / "near"
    assert_complete(run, 10)
    recorded = rows_of(run / "rollouts" / "trained.jsonl")
    assert recorded
    for row in recorded:
        left, right = row["prompt"].rstrip("=").split("+")
        answer = row["answer"].removesuffix("<eos>")
        if not answer.isdigit():
            assert row["reward"] == 0.0
            continue
        off_by = abs(int(answer) - int(left) - int(right))
        assert row["parts"]["off_by"] == off_by
        assert row["reward"] == pytest.approx(1 / (1 + off_by))


@pytest.mark.slow  # tests/unit/algos/test_evidence.py computes with this loss
def test_a_loss_of_ones_own_is_tested_and_trained_with(inputs: Path):
    page = DOCS / "algorithms.md"
    written = steps(blocks(page, "Writing your own part"))
    assert files(written) == ["my_losses.py", "run.toml"]
    own = [*written, *steps(blocks(page, "A run with your own part"))]
    printed = follow([*BEFORE_THE_RUN, *own], inputs)[len(BEFORE_THE_RUN) :]
    looked = printed_by("pytest", own, printed)
    assert "1 passed" in looked
    assert "0 fail" in looked
    assert "own/softness" in looked

    run = inputs / "sums" / "runs" / "soft"
    assert_complete(run, 10)
    trained = [row for row in rows_of(run / "metrics.jsonl") if "policy/loss" in row]
    assert [row["step"] for row in trained] == list(range(1, 11))
    assert all(row["own/softness"] >= 0 for row in trained)
    assert any(row["own/softness"] > 0 for row in trained)
