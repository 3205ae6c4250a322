"""`slipstream export`, `slipstream replay`, what a learner leaves behind, and how it is stopped."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from slipstream.wire.files.checkpoints import newest_checkpoint
from slipstream.wire.files.fetched import content_hash
from slipstream.wire.files.trajectory_file import read_groups
from slipstream.wire.messages.codec import decode_payload
from tests.integration.recorded import GROUPS, LAYOUTS, Replays, finish, rows, start_tool, weights
from tests.support.ranks.run import outputs, start
from tests.support.waiting import until

pytestmark = pytest.mark.integration


def slipstream(*arguments: object, code: int = 0) -> str:
    """Return what a command prints, in a fork; tests/e2e has processes that become others."""
    command = [sys.executable, "-m", "tests.support.ranks.executed", *map(str, arguments)]
    return finish(start_tool(command), code=code)


def rollouts(run: Path) -> list[dict[str, Any]]:
    lines = (run / "rollouts" / "trained.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def behavior_logprobs(file: Path, group_id: int, sibling: int) -> list[float]:
    for recorded in read_groups(file):
        if recorded.group.group_id == group_id:
            payload = decode_payload(memoryview(recorded.payloads[sibling]))
            return memoryview(payload.behavior_logprobs.data).cast("B").cast("f").tolist()
    raise AssertionError(f"no group {group_id} in {file}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Replays, Path]:
    """Four steps with records of all rollouts and a trace of two steps."""
    replays = Replays(tmp_path_factory.mktemp("trained"))
    settings = ("run.steps=4", "learner.rollouts_per_step=100", "profile.steps=[2,3]")
    return replays, replays.train("a", *settings)


def test_an_export_is_the_policy_that_the_learner_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    replays = Replays(tmp_path)
    model = f"file://{replays.model}"
    content = content_hash(model, "run.model", is_model=True)
    run = replays.train(
        "a",
        *LAYOUTS["tp2"],
        f"run.model={model}",
        f'run.contents={{ "{model}" = "{content}" }}',
        "run.steps=3",
        "checkpoint.every_steps=2",
        "checkpoint.export_at_end=true",
        "learner.rollouts_per_step=100",
    )
    newest, before = newest_checkpoint(run), run / "checkpoints" / "step-000002"
    (replays.model / "of_a_newer_commit.json").write_text("{}")
    printed = slipstream("export", run, "--out", tmp_path / "out")
    assert printed == f"wrote {tmp_path / 'out'}: {newest}, step 3\n"
    exported, trained = load_file(tmp_path / "out" / "model.safetensors"), weights(run)
    assert exported.keys() == trained.keys()
    assert all(exported[name].equal(trained[name]) for name in trained)

    assert not (tmp_path / "out" / "of_a_newer_commit.json").exists()

    slipstream("export", before, "--out", tmp_path / "two")
    third = [row for row in rollouts(run) if row["step"] == 2]  # trained by what it exported
    assert third
    sequences = tmp_path / "sequences.json"
    sequences.write_text(json.dumps([row["token_ids"] for row in third]))
    (printed,) = outputs(
        [start(tmp_path, "integration.transformers_logprobs", tmp_path / "two", sequences)]
    )
    for row, logprobs in zip(third, json.loads(printed), strict=True):
        first = row["num_prompt_tokens"]
        behavior = behavior_logprobs(replays.file, row["group_id"], row["sibling"])[first:]
        expected = [a + b for a, b in zip(behavior, row["logprob_diffs"], strict=True)]
        assert logprobs[first - 1 :] == pytest.approx(expected, abs=5e-5)


def test_refused_export_gives_the_reason(tmp_path: Path, trained: tuple[Replays, Path]):
    replays, run = trained
    refused = {
        (run, "--best"): f"{run} has no evaluated checkpoint",
        (tmp_path,): f"{tmp_path} is neither a run with checkpoints nor a checkpoint",
        (run, "--out", run): f"{run} exists already (--out)",
    }
    for arguments, message in refused.items():
        assert message in slipstream("export", *arguments, code=2)
    replays.model.rename(tmp_path / "moved")
    gone = slipstream("export", run, code=2)
    (tmp_path / "moved").rename(replays.model)
    assert f"was trained from {replays.model}, which is gone" in gone


def test_a_replay_trains_on_what_a_run_recorded(tmp_path: Path):
    replays = Replays(tmp_path)
    recorded = tmp_path / "runs" / "a" / "rollouts" / "batches.trajectories"
    recorded.parent.mkdir(parents=True)
    recorded.write_bytes(replays.file.read_bytes())
    config = replays.config
    printed = slipstream("replay", tmp_path / "runs" / "a", "--config", config, "run.name=a")
    run = tmp_path / "runs" / "a-replay"
    assert "step 6 reward" in printed
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4, 5, 6]
    rewards = [
        trajectory.reward
        for group in list(read_groups(recorded))[:GROUPS]
        for trajectory in group.group.trajectories
    ]
    assert rows(run)[0]["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
    assert rows(run)[5]["staleness/mean"] > 0
    again = slipstream("replay", replays.file, "--config", replays.config, "run.name=a")
    assert "step 6 reward" in again
    assert (tmp_path / "runs" / "a-replay-2").is_dir()


def test_what_was_trained_can_be_read(trained: tuple[Replays, Path]):
    rows_ = rollouts(trained[1])
    assert {row["step"] for row in rows_} == {0, 1, 2, 3}
    for row in rows_:
        assert row["parts"] == {"half": row["reward"] / 2}
        assert row["finish_reason"] == "stop"
        assert row["prompt"]
        first, count = row["num_prompt_tokens"], len(row["token_ids"])
        differences = row["logprob_diffs"]
        assert len(differences) == count - first
        starts = [r["first_token"] for r in row["version_runs"]] + [count]
        for i, mean in enumerate(row["logprob_abs_diff_by_run"]):
            part = differences[starts[i] - first : starts[i + 1] - first]
            assert mean == pytest.approx(sum(map(abs, part)) / len(part), abs=2e-5)
    assert any(len(row["version_runs"]) == 2 for row in rows_)


def test_a_trace_is_written_for_the_steps_asked_for(trained: tuple[Replays, Path]):
    trace = json.loads((trained[1] / "profile" / "rank-0.json").read_text())
    names = [str(event.get("name")) for event in trace["traceEvents"]]
    updates = [n for n in names if n.startswith("Optimizer.step#")]
    assert len(updates) == 2


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    path = run / "replay" / "metrics.jsonl"

    def is_there() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return path.exists() and len(path.read_text().splitlines()) >= step

    until(is_there, f"step {step} is not trained")


LONG = 400


def close_terminal(process: subprocess.Popen[str]) -> None:
    for _ in range(2):  # as the shell and the kernel do
        os.killpg(process.pid, signal.SIGHUP)


@pytest.mark.parametrize(
    ("layout", "ask"),
    [("one", lambda process: os.killpg(process.pid, signal.SIGINT)), ("tp2", close_terminal)],
    ids=["ctrl-c", "closed terminal"],
)
def test_learner_asked_to_end_saves_and_its_successor_resumes(
    tmp_path: Path, layout: str, ask: Callable[[subprocess.Popen[str]], None]
):
    replays = Replays(tmp_path, steps=LONG)
    process = replays.start("a", *LAYOUTS[layout])
    run = tmp_path / "runs" / "a"
    wait_for_step(process, run, 3)
    ask(process)
    output = finish(process)
    assert "stopping; a second signal ends at once" in output
    trained = len(rows(run))
    assert 3 <= trained < LONG
    checkpoint = newest_checkpoint(run)
    assert checkpoint == run / "checkpoints" / f"step-{trained:06d}"
    more = (f"run.resume_from={checkpoint}", f"run.steps={trained + 1}")
    replays.train("a", *LAYOUTS[layout], *more)
    assert [row["step"] for row in rows(run)] == list(range(1, trained + 2))


def test_without_on_stop_a_signal_ends_the_learner_at_once_and_nothing_is_saved(tmp_path: Path):
    replays = Replays(tmp_path, steps=LONG)
    process = replays.start("a", "checkpoint.on_stop=false")
    run = tmp_path / "runs" / "a"
    wait_for_step(process, run, 3)
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert len(rows(run)) < LONG
    assert newest_checkpoint(run) is None
