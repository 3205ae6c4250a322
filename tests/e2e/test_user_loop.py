"""What a user does in the first hour: evaluate, stop, resume, export, inspect, replay."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from slipstream.wire.files.trajectory_file import read_groups
from tests.support.tiny_run import ROOT, TinyRun, slipstream
from tests.support.waiting import HANG_S

pytestmark = [pytest.mark.e2e]
GREEDY = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, limit = sys.argv[1], int(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
answers = []
for prompt in json.load(sys.stdin):
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=True)["input_ids"]])
    with torch.no_grad():
        out = model.generate(ids, do_sample=False, max_new_tokens=limit)
    answers.append(tokenizer.decode(out[0, ids.shape[1]:], skip_special_tokens=True))
print(json.dumps(answers))
"""


def greedy_answers(folder: Path, prompts: Sequence[str], *, limit: int) -> list[str]:
    """What transformers answers."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", GREEDY, str(folder), str(limit)],
        cwd=ROOT,
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # noqa: TID251 handed on
    )
    assert done.returncode == 0, done.stderr
    answers: list[str] = json.loads(done.stdout.splitlines()[-1])
    return answers


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def curves(folder: Path, *names: str) -> dict[str, dict[int, float]]:
    """What TensorBoard shows, as float32, by step."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    return {
        name: {e.step: float(e.tensor_proto.float_val[0]) for e in events.Tensors(name)}
        for name in names
    }


def test_a_run_is_stopped_resumed_exported_shown_and_replayed(tmp_path: Path):
    settings: dict[str, object] = {
        "run.steps": 8,
        "run.max_staleness_steps": 1,
        "generators.count": 1,
        "sampling.max_response_tokens": 24,
        "eval.file": tmp_path / "held_out.jsonl",
        "eval.every_steps": 2,
        "checkpoint.keep_best": "true",
        "checkpoint.keep_last": 1,
        "broker.record_batches": "true",
        "learner.deterministic": "true",
    }
    first = TinyRun(tmp_path, settings)
    first.wait_until(lambda: first.steps() >= 3, "third learner step")
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait(HANG_S) == 130, first.output
    assert "resume from it with --resume auto" in first.output
    first.assert_nothing_left()
    stopped_at = int(first.summary()["steps"])
    before = {point["step"]: point for point in rows(first.folder / "eval/results.jsonl")}
    assert before
    assert 3 <= stopped_at < 8, "the run was over before Ctrl-C: make it longer"

    second = TinyRun(tmp_path, settings, options=["--resume", "auto"])
    assert second.wait() == 0, second.output
    assert second.folder == first.folder
    summary = second.summary()
    assert (summary["steps"], summary["trained"]) == (8, 32)
    assert summary["equation"]["unaccounted"] == 0
    points = {point["step"]: point for point in rows(second.folder / "eval/results.jsonl")}
    assert sorted(points) == [0, 2, 4, 6, 8]
    assert {step: points[step] for step in before} == before, "the curve was rewritten"
    assert points[8]["overall"]["num_answers"] == 64
    steps = [group.step for group in read_groups(second.folder / "rollouts/batches.trajectories")]
    assert steps == [step for step in range(8) for _ in range(4)]
    lines = rows(second.folder / "metrics.jsonl")
    trained = [row["step"] for row in lines if "eval/mean@1" not in row]
    assert trained == list(range(1, 9)), "a step is missing, or there twice"
    assert [row["step"] for row in lines if "eval/mean@1" in row] == [0, 2, 4, 6, 8]
    second.assert_nothing_left()

    best = json.loads((second.folder / "checkpoints/best.json").read_text())
    highest = max(point["overall"]["metrics"]["mean@1"] for point in points.values())
    assert best["value"] == pytest.approx(highest)
    kept = {path.name for path in (second.folder / "checkpoints").glob("step-*")}
    assert kept == {"step-000008", best["checkpoint"]}

    out = tmp_path / "exported"
    slipstream("export", second.folder, "--out", out)
    answered = rows(second.folder / "eval/step-000008.jsonl")
    assert len(answered) == 64
    assert {version for row in answered for version in row["versions"]} == {"v2.8"}
    ours = [row["answer"] for row in answered]
    theirs = greedy_answers(out, [row["prompt"] for row in answered], limit=24)
    assert ours == theirs
    assert len(set(ours)) > 5, "the policy gives the same answer to everything"

    shown = slipstream("show", second.folder, "--last", 2)
    assert "chosen by" in shown
    assert "2 of" in shown
    assert answered[-1]["answer"] in slipstream("show", second.folder, "--eval", "--last", 1)

    assert_replayed_to_the_bit(second, tmp_path)


def assert_replayed_to_the_bit(run: TinyRun, folder: Path) -> None:
    """Replay a run from the model that it started from: the same figures, the same weights."""
    slipstream("replay", run.folder, "--config", run.folder / "resolved.toml")
    replay = folder / "runs/tiny-replay"
    replayed = {row["step"]: row for row in rows(replay / "replay/metrics.jsonl")}
    trained = curves(run.folder / "tensorboard", "policy/loss", "policy/grad_norm", "reward/mean")
    for name, curve in trained.items():
        assert sorted(curve) == list(range(1, 9))
        again = {step: float(np.float32(row[name])) for step, row in replayed.items()}
        assert again == curve, f"{name} of the replay is not that of the run"
    assert min(trained["policy/grad_norm"].values()) > 1e-4, "nothing was trained"
    exact = run.summary()["last_step_metrics"]
    assert all(exact[name] == replayed[8][name] for name in trained)
    paths = (folder, run.folder, replay)
    first, last, copy = (load_file(path / "model/model.safetensors") for path in paths)
    assert copy.keys() == last.keys()
    assert all(copy[name].equal(last[name]) for name in last)
    assert any(not first[name].equal(last[name]) for name in last)


def test_several_sets_are_sampled_scored_and_end_the_run_at_the_target(
    start_run: Callable[..., TinyRun], inputs: Path
):
    (inputs / "other.jsonl").write_text('{"prompt": "11+11=", "data_source": "other"}\n' * 3)
    run = start_run(
        run__steps=50,
        generators__count=1,
        sampling__max_response_tokens=16,
        eval__sets__ours__file=inputs / "held_out.jsonl",
        eval__sets__ours__max_rows=8,
        eval__sets__more__file=inputs / "other.jsonl",
        eval__samples=4,
        eval__temperature=1.0,
        eval__every_steps=2,
        eval__metric="other:mean",
        eval__target=0.01,
    )
    assert run.wait() == 0, run.output
    summary = run.summary()
    assert "eval.target" in summary["stop_reason"]
    assert summary["steps"] < 50
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
    run.assert_nothing_left()


def test_sync_mode_trains_on_nothing_stale_and_the_data_may_end(start_run: Callable[..., TinyRun]):
    run = start_run(
        run__mode="sync",
        run__steps=100,
        run__epochs=0.5,
        generators__count=1,
        sampling__max_response_tokens=16,
    )
    assert run.wait() == 0, run.output
    summary = run.summary()
    assert set(summary["staleness_histogram"]) == {"0"}
    assert "run.epochs" in summary["stop_reason"]
    assert (summary["issued"], summary["trained"], summary["steps"]) == (20, 20, 5)
    run.assert_nothing_left()
