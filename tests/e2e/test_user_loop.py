"""What a user does in the first hour: evaluate, stop, resume, export, inspect, replay.

Model, prompts and checkpoints are in a bucket.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from slipstream.wire.files.checkpoints import newest_checkpoint, read_checkpoint_info
from slipstream.wire.files.remote import RemoteFolder
from slipstream.wire.files.remote_checkpoints import RemoteCheckpoints
from slipstream.wire.files.trajectory_file import read_groups
from slipstream.wire.process.command_line import EXIT_INTERRUPTED
from slipstream.wire.settings.load import load_table
from tests.support.stores import BUCKET, s3_server
from tests.support.tiny_run import ROOT, TinyRun, rows_of, slipstream, tiny_inputs

pytestmark = [pytest.mark.e2e]
UPLOAD = f"{BUCKET}/runs/tiny"
GREEDY = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, limit = sys.argv[1], int(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
answers = []
silent = {tokenizer.eos_token_id, tokenizer.pad_token_id}
for prompt in json.load(sys.stdin):
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=True)["input_ids"]])
    with torch.no_grad():
        out = model.generate(ids, do_sample=False, max_new_tokens=limit)
    said = [one for one in out[0, ids.shape[1]:].tolist() if one not in silent]
    answers.append(tokenizer.decode(said))
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


def curves(folder: Path, *names: str) -> dict[str, dict[int, float]]:
    """What TensorBoard shows, as float32, by step."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    return {
        name: {e.step: float(e.tensor_proto.float_val[0]) for e in events.Tensors(name)}
        for name in names
    }


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[None]:
    """A bucket with the model and the prompts of a run."""
    tiny_inputs(tmp_path)
    with s3_server():
        for path in (tmp_path / "model").iterdir():
            RemoteFolder(f"{BUCKET}/model", "test").put(path, path.name)
        RemoteFolder(BUCKET, "test").put(tmp_path / "train.jsonl", "train.jsonl")
        yield


def move_inputs(folder: Path) -> None:
    """Leave the model and the prompts to the bucket alone."""
    shutil.rmtree(folder / "before", ignore_errors=True)
    (folder / "model").rename(folder / "before")
    (folder / "train.jsonl").unlink()


def uploaded() -> list[str]:
    return [one.version.label for one in RemoteCheckpoints(UPLOAD).known()]


def newest_of(run: TinyRun) -> str:
    newest = newest_checkpoint(run.folder)
    assert newest is not None
    return read_checkpoint_info(newest).version.label


def settings_in(folder: Path) -> dict[str, object]:
    """Return settings of a run of eight steps with everything in the bucket."""
    return {
        "run.model": f"{BUCKET}/model",
        "data.file": f"{BUCKET}/train.jsonl",
        "run.cache_dir": folder / "cache",
        "run.steps": 8,
        "run.max_staleness_steps": 1,
        "sampling.max_response_tokens": 24,
        "eval.file": folder / "held_out.jsonl",
        "eval.every_steps": 2,
        "checkpoint.every_steps": 1,
        "checkpoint.upload": UPLOAD,
        "checkpoint.keep_best": "true",
        "checkpoint.keep_last": 1,
        "broker.record_batches": "true",
        "learner.deterministic": "true",
    }


def stopped_by_ctrl_c(run: TinyRun) -> int:
    """Press Ctrl-C after three steps; return the step of the checkpoint that it ended with."""
    run.wait_until(lambda: run.steps() >= 3, "third learner step")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == EXIT_INTERRUPTED == 130, run.output
    assert "stopped: SIGINT" in run.output
    assert "resume from it with --resume auto" in run.output
    assert uploaded()[-1] == newest_of(run), "it ended before the last checkpoint was there"
    assert "is not in" not in run.output
    run.assert_nothing_left()
    return int(run.summary()["steps"])


def assert_no_secret(run: TinyRun) -> None:
    text = "".join(path.read_text(errors="replace") for path in run.folder.rglob("*.log"))
    assert "not-a-secret" not in text + (run.folder / "resolved.toml").read_text()


@pytest.mark.usefixtures("bucket")
def test_a_run_is_stopped_resumed_from_a_bucket_exported_shown_and_replayed(tmp_path: Path):
    settings = settings_in(tmp_path)
    first = TinyRun(tmp_path, settings, before=move_inputs)
    stopped_at = stopped_by_ctrl_c(first)
    assert 3 <= stopped_at < 8, "the run was over before Ctrl-C: make it longer"
    before = {point["step"]: point for point in rows_of(first.folder / "eval/results.jsonl")}
    assert before

    lost = newest_checkpoint(first.folder)
    assert lost is not None
    shutil.rmtree(lost)
    shutil.rmtree(tmp_path / "cache")
    second = TinyRun(tmp_path, settings, options=["--resume", "auto"], before=move_inputs)
    assert second.wait() == 0, second.output
    assert second.folder == first.folder
    assert "resuming from" in second.output
    assert f"step-{stopped_at:06d}" in second.output
    summary = second.summary()
    assert (summary["outcome"], summary["steps"], summary["trained"]) == ("finished", 8, 32)
    assert summary["equation"]["unaccounted"] == 0
    assert uploaded()[-1] == newest_of(second) == "v2.8"
    contents = load_table(second.folder / "resolved.toml")["run"]["contents"]
    assert set(contents) == {f"{BUCKET}/model", f"{BUCKET}/train.jsonl"}
    assert_continued(second, before)
    assert_no_secret(second)
    out = tmp_path / "exported"
    slipstream("export", second.folder, "--out", out)
    assert_answers_are_those_of_transformers(second, out)
    assert_replayed_to_the_bit(second, tmp_path)


@pytest.mark.slow  # the run above lost its newest checkpoint; all of them: test_resume.py of deploy
@pytest.mark.usefixtures("bucket")
def test_a_run_whose_folder_is_lost_resumes_from_a_bucket_and_ends_with_its_learner(tmp_path: Path):
    settings = settings_in(tmp_path) | {"run.steps": 1000}
    first = TinyRun(tmp_path, settings, before=move_inputs)
    stopped_at = stopped_by_ctrl_c(first)

    shutil.rmtree(tmp_path / "runs")
    shutil.rmtree(tmp_path / "cache")
    second = TinyRun(tmp_path, settings, options=["--resume", "auto"], before=move_inputs)
    second.wait_until(lambda: second.steps() > stopped_at, "a step from what the bucket has")
    learner = second.process_with("slipstream.learner.main")
    assert learner is not None
    learner.terminate()
    assert second.wait() == 1
    assert "learner ended before the run was complete" in second.output
    assert "resuming from" in second.output
    assert f"step-{stopped_at:06d}" in second.output
    assert second.summary()["equation"]["unaccounted"] == 0
    assert uploaded()[-1] == newest_of(second)
    assert newest_of(second).startswith("v2.")
    assert_no_secret(second)
    second.assert_nothing_left()


def assert_continued(second: TinyRun, before: dict[int, dict[str, Any]]) -> None:
    """Both parts of a run are in its curves, its batches and its checkpoints, each step once."""
    points = {point["step"]: point for point in rows_of(second.folder / "eval/results.jsonl")}
    assert sorted(points) == [0, 2, 4, 6, 8]
    assert {step: points[step] for step in before} == before, "the curve was rewritten"
    assert points[8]["overall"]["num_answers"] == 64
    steps = [group.step for group in read_groups(second.folder / "rollouts/batches.trajectories")]
    assert steps == [step for step in range(8) for _ in range(4)]
    lines = rows_of(second.folder / "metrics.jsonl")
    trained = [row["step"] for row in lines if "eval/mean@1" not in row]
    assert trained == list(range(1, 9)), "a step is missing, or there twice"
    assert [row["step"] for row in lines if "eval/mean@1" in row] == [0, 2, 4, 6, 8]
    second.assert_nothing_left()

    best = json.loads((second.folder / "checkpoints/best.json").read_text())
    highest = max(point["overall"]["metrics"]["mean@1"] for point in points.values())
    assert best["value"] == pytest.approx(highest)
    kept = {path.name for path in (second.folder / "checkpoints").glob("step-*")}
    assert kept == {"step-000008", best["checkpoint"]}


def assert_answers_are_those_of_transformers(second: TinyRun, out: Path) -> None:
    """The exported policy, and what `slipstream show` prints, have the run's last answers."""
    answered = rows_of(second.folder / "eval/step-000008.jsonl")
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


def assert_replayed_to_the_bit(run: TinyRun, folder: Path) -> None:
    """Replay a run from the model that it started from: the same figures, the same weights."""
    slipstream("replay", run.folder, "--config", run.folder / "resolved.toml")
    replay = folder / "runs/tiny-replay"
    replayed = {row["step"]: row for row in rows_of(replay / "replay/metrics.jsonl")}
    trained = curves(run.folder / "tensorboard", "policy/loss", "policy/grad_norm", "reward/mean")
    for name, curve in trained.items():
        assert sorted(curve) == list(range(1, 9))
        again = {step: float(np.float32(row[name])) for step, row in replayed.items()}
        assert again == curve, f"{name} of the replay is not that of the run"
    assert min(trained["policy/grad_norm"].values()) > 1e-4, "nothing was trained"
    exact = run.summary()["last_step_metrics"]
    assert all(exact[name] == replayed[8][name] for name in trained)
    paths = (folder / "before", run.folder / "model", replay / "model")
    first, last, copy = (load_file(path / "model.safetensors") for path in paths)
    assert copy.keys() == last.keys()
    assert all(copy[name].equal(last[name]) for name in last)
    assert any(not first[name].equal(last[name]) for name in last)
