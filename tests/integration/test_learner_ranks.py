"""Learners of one and two ranks over the real wire: their requests, and what is not trained."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from slipstream.learner.batches.orders import num_flops
from slipstream.wire.files.checkpoints import checkpoints_in
from slipstream.wire.files.trajectory_file import RecordedGroup, TrajectoryFileWriter, read_groups
from slipstream.wire.messages.broker import (
    FetchPayloads,
    Hello,
    RejectBatch,
    RequestBatch,
    SealSteps,
    StepCommit,
    TakeOver,
)
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.models.flops import SequenceCost
from slipstream.wire.models.hf_config import load_hf_config
from slipstream.wire.process.phases import PHASE_TIME
from tests.integration.recorded import (
    GROUPS,
    LAYOUTS,
    SIBLINGS,
    Replays,
    finish,
    start_tool,
    weights,
)
from tests.integration.scripted_broker import Batch, Script, ScriptedBroker, keys_of

pytestmark = pytest.mark.integration
EXPORT = "checkpoint.export_at_end=true"
TWO_MINIBATCHES = "learner.minibatches=2"
TOO_LARGE = 1.7e308  # of a reward: it and its opposite are too far apart
SPARE = 100  # added to the ids of groups that take others' place


class Learning:
    """Recorded steps, a scripted broker's socket, and learners that connect to it."""

    def __init__(self, folder: Path, sockets: Path) -> None:
        self.replays = Replays(folder)
        self.sockets = sockets
        self.endpoint = f"ipc://{sockets / 'broker.sock'}"
        self.run = folder / "runs" / "a"
        self.processes: list[subprocess.Popen[str]] = []
        groups = list(read_groups(self.replays.file))
        self.batches = [groups[i : i + GROUPS] for i in range(0, len(groups), GROUPS)]

    def start(
        self, *overrides: str, resumes: bool = False, anew: bool = False
    ) -> subprocess.Popen[str]:
        own = f"run.socket_dir={self.sockets}"
        command = self.replays.command("a", own, *overrides, replays=False)
        options = ["--resume", "auto"] if resumes else []
        process = start_tool([*command, *options], anew=anew)
        self.processes.append(process)
        return process

    def script(self, *batches: Batch) -> dict[int, list[Batch]]:
        return {step: [batch] for step, batch in enumerate(batches)}

    def weights_of(self, batches: list[Batch], *overrides: str) -> dict[str, torch.Tensor]:
        """Return what training on these batches comes to, without a broker."""
        self.replays.file = self.replays.folder / "expected.trajectories"
        writer = TrajectoryFileWriter(self.replays.file)
        for step, batch in enumerate(batches):
            writer.append([msgspec.structs.replace(group, step=step) for group in batch])
        writer.close()
        settings = (*overrides, EXPORT, f"run.steps={len(batches)}")
        return weights(self.replays.train("expected", *settings))


@pytest.fixture
def learning(tmp_path: Path) -> Iterator[Learning]:
    with tempfile.TemporaryDirectory(prefix="learner-") as sockets:
        learning = Learning(tmp_path, Path(sockets))
        yield learning
        for process in learning.processes:
            if process.poll() is None:  # the test has failed
                process.kill()
                process.communicate()


def with_reward(batch: Batch, group: int, reward: float) -> list[RecordedGroup]:
    """Return a batch in which siblings of a group have this reward and its opposite by turns."""
    siblings = enumerate(batch[group].group.trajectories)
    spoiled = tuple(
        msgspec.structs.replace(one, reward=-reward if i % 2 else reward) for i, one in siblings
    )
    delivered = msgspec.structs.replace(batch[group].group, trajectories=spoiled)
    replaced = msgspec.structs.replace(batch[group], group=delivered)
    return [replaced if i == group else other for i, other in enumerate(batch)]


def renamed(batch: Batch) -> list[RecordedGroup]:
    """Return the same groups under other ids."""
    result = []
    for recorded in batch:
        number = recorded.group.group_id + SPARE
        trajectories = tuple(
            msgspec.structs.replace(t, header=msgspec.structs.replace(t.header, group_id=number))
            for t in recorded.group.trajectories
        )
        group = msgspec.structs.replace(recorded.group, group_id=number, trajectories=trajectories)
        result.append(msgspec.structs.replace(recorded, group=group))
    return result


def cut_off(batch: Batch, group: int) -> list[RecordedGroup]:
    """Return a batch in which the last payload of a group does not decode."""
    *others, last = batch[group].payloads
    spoiled = msgspec.structs.replace(batch[group], payloads=(*others, last[: len(last) // 2]))
    return [spoiled if i == group else other for i, other in enumerate(batch)]


def group_ids(batch: Batch) -> tuple[int, ...]:
    return tuple(recorded.group.group_id for recorded in batch)


@pytest.mark.parametrize(
    "layout", ["dp2", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("one", "tp2"))]
)
def test_what_cannot_be_trained_changes_nothing_and_is_replaced(learning: Learning, layout: str):
    zero, one, two, three = learning.batches[:4]
    last = three[:1]
    nonfinite, invalid = with_reward(renamed(one), 1, TOO_LARGE), cut_off(renamed(two), 2)
    batches: dict[int, list[Batch]] = {0: [zero], 1: [nonfinite, one], 2: [invalid, two], 3: [last]}
    settings = (*LAYOUTS[layout], "run.steps=4", TWO_MINIBATCHES)
    script = Script(batches=batches, steps=4, awaits_prefetch=True)
    with ScriptedBroker(learning.endpoint, script) as broker:
        output = finish(learning.start(*settings, EXPORT))

    assert [(r.version, r.step, r.reason, r.groups) for r in broker.of(RejectBatch)] == [
        (PolicyVersion(1, 1), 1, "nonfinite", group_ids(nonfinite)),
        (PolicyVersion(1, 2), 2, "invalid", (invalid[2].group.group_id,)),
    ]
    assert f"trajectory {invalid[2].group.group_id}/{SIBLINGS - 1} is invalid" in output
    commits = broker.of(StepCommit)
    assert [commit.version.step for commit in commits] == [1, 2, 3, 4]
    assert {commit.metrics["policy/skipped_minibatches"] for commit in commits} == {0.0}
    expected = learning.weights_of([zero, one, two, last], *LAYOUTS[layout], TWO_MINIBATCHES)
    trained = weights(learning.run)
    assert all(trained[name].equal(tensor) for name, tensor in expected.items())
    assert broker.of(SealSteps) == [SealSteps(version=PolicyVersion(1, 4), step=4, oldest_kept=4)]


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_one_rank_of_a_replica_fetches_its_payloads_while_the_step_before_is_trained(
    learning: Learning, layout: str
):
    batches = learning.batches[:3]
    # A commit is answered only when all of the next batch has been asked for.
    script = Script(batches=learning.script(*batches), steps=3, awaits_prefetch=True)
    with ScriptedBroker(learning.endpoint, script) as broker:
        finish(learning.start(*LAYOUTS[layout], "run.steps=3", "checkpoint.at_end=false"))

    fetching = {"learner", "learner-rank-1"} if layout == "dp2" else {"learner"}
    others = [(name, asked) for name, asked in broker.requests if name not in {"learner", "relay"}]
    assert {name for name, _ in others} == fetching - {"learner"}
    assert all(isinstance(asked, Hello | FetchPayloads) for _, asked in others)
    keys = [key for name in fetching for key in broker.keys_asked(name)]
    assert sorted(keys) == sorted(key for batch in batches for key in keys_of(batch)), (
        "every payload is asked for once, by one rank"
    )
    assert len(broker.of(FetchPayloads)) == 3 * len(fetching)
    early = [r for r in broker.of(RequestBatch) if r.step == r.version.step + 1]
    assert {r.step for r in early} == {1, 2}, "nothing is asked for after the last step"


def test_a_commit_says_how_fast_its_step_was_and_what_it_waited_for(learning: Learning):
    batches = learning.batches[:2]
    script = Script(batches=learning.script(*batches), steps=2)
    stages = ("learner.ranks=2", "learner.pipeline_parallel=2", "learner.peak_tflops=2.0")
    with ScriptedBroker(learning.endpoint, script) as broker:
        finish(learning.start(*stages, "run.steps=2", "checkpoint.at_end=false"))

    hf = load_hf_config(learning.replays.model)
    for commit, batch in zip(broker.of(StepCommit), batches, strict=True):
        figures = commit.metrics
        headers = [t.header for recorded in batch for t in recorded.group.trajectories]
        phase_s = {
            name.removeprefix(PHASE_TIME): seconds
            for name, seconds in figures.items()
            if name.startswith(PHASE_TIME)
        }
        step_s = sum(phase_s.values())
        flops = num_flops(headers, SequenceCost.of(hf), shares_prompts=True)  # one microbatch
        expected = {
            "tokens_per_s": sum(h.num_tokens for h in headers) / step_s,
            "trained_tokens_per_s": sum(h.num_response_tokens for h in headers) / step_s,
            "tflops_per_rank": flops / 2e12 / phase_s["train"],
            "mfu": figures["throughput/tflops_per_rank"] / 2.0,
            "stall_data": (phase_s["wait"] + phase_s["fetch"]) / step_s,
            "stall_publish": phase_s.get("export", 0.0) / step_s,
            "bubble": figures["throughput/bubble"],
            "replaced_kernels": 0.0,  # on a CPU operators are the rule
        }
        named = {k: v for k, v in figures.items() if k.startswith("throughput/")}
        assert named == pytest.approx({f"throughput/{k}": v for k, v in expected.items()})
        assert 0.0 < figures["throughput/bubble"] < 1.0


def test_without_prefetch_a_batch_is_asked_for_when_its_step_begins(learning: Learning):
    script = Script(batches=learning.script(*learning.batches[:2]), steps=2)
    with ScriptedBroker(learning.endpoint, script) as broker:
        finish(learning.start("learner.prefetch=false", "run.steps=2"))
    assert all(request.step == request.version.step for request in broker.of(RequestBatch))
    kinds = [type(r) for _, r in broker.requests if isinstance(r, FetchPayloads | StepCommit)]
    assert kinds == [FetchPayloads, StepCommit] * 2


def test_a_rank_that_cannot_fetch_makes_all_abandon_the_step(learning: Learning):
    script = Script(
        batches=learning.script(*learning.batches[:2]),
        steps=2,
        refuses_payloads_to="learner-rank-1",
    )
    with ScriptedBroker(learning.endpoint, script) as broker:
        output = finish(learning.start(*LAYOUTS["dp2"]), code=1)
    assert "step 0 is abandoned: its payloads cannot be fetched" in output
    assert "the broker refused FetchPayloads: as scripted" in output
    assert "step 0 is abandoned: another learner rank could not fetch its payloads" in output
    assert broker.of(StepCommit) == []


def test_a_minibatch_that_is_not_finite_is_skipped_and_the_others_are_trained(learning: Learning):
    zero = learning.batches[0]
    spoiled = with_reward(zero, 0, TOO_LARGE)
    script = Script(batches=learning.script(spoiled), steps=1)
    with ScriptedBroker(learning.endpoint, script) as broker:
        settings = ("run.steps=1", "learner.minibatches=3", "learner.rollouts_per_step=100")
        output = finish(learning.start(*settings, EXPORT))
    (commit,) = broker.of(StepCommit)
    assert commit.metrics["policy/skipped_minibatches"] == 1.0
    assert commit.metrics["policy/grad_norm"] > 1e-3
    assert "the policy skips minibatch 0 of 3: the loss is nan" in output
    lines = (learning.run / "rollouts" / "trained.jsonl").read_text().splitlines()
    assert {json.loads(line)["group_id"] for line in lines} == set(group_ids(zero[1:]))
    expected = learning.weights_of([zero[1:]], "learner.minibatches=2")
    trained = weights(learning.run)
    assert all(trained[name].equal(tensor) for name, tensor in expected.items())


def test_batch_after_batch_that_cannot_be_trained_ends_the_learner(learning: Learning):
    bad: list[Batch] = [with_reward(batch, 0, TOO_LARGE) for batch in learning.batches]
    script = Script(batches={0: list(bad)}, steps=2)
    with ScriptedBroker(learning.endpoint, script) as broker:
        output = finish(learning.start("learner.max_rejected_batches=2"), code=1)
    assert [r.groups for r in broker.of(RejectBatch)] == [group_ids(batch) for batch in bad[:2]]
    assert (
        "step 0: 2 batches in a row could not be trained (learner.max_rejected_batches)" in output
    )
    assert "check learner.lr, the advantages (rewards), and the behavior logprobs" in output
    assert broker.of(StepCommit) == []


def test_a_learner_that_is_asked_to_end_does_not_wait_for_what_it_prefetches(learning: Learning):
    script = Script(batches=learning.script(learning.batches[0]), steps=9)
    with ScriptedBroker(learning.endpoint, script) as broker:
        process = learning.start("run.steps=9")
        broker.wait_for(lambda: any(r.version.step == 1 for r in broker.of(RequestBatch)))
        process.send_signal(signal.SIGTERM)
        output = finish(process)
    assert "stopping; a second signal" in output
    assert [path.name for path in checkpoints_in(learning.run / "checkpoints")] == ["step-000001"]


@pytest.mark.parametrize("layout", [pytest.param("one", marks=pytest.mark.slow), "tp2"])
def test_killed_learner_resumes_from_the_newest_readable_checkpoint(
    learning: Learning, layout: str
):
    batches = learning.batches[:5]
    settings = (
        *LAYOUTS[layout],
        "run.steps=5",
        "checkpoint.every_steps=1",
        "checkpoint.keep_last=3",
        "learner.rollouts_per_step=100",
        EXPORT,
    )
    script = Script(batches=learning.script(*batches[:4]), steps=5)
    with ScriptedBroker(learning.endpoint, script) as broker:
        process = learning.start(*settings, resumes=True, anew=True)  # there is nothing to resume
        broker.wait_for(lambda: any(seal.step == 4 for seal in broker.of(SealSteps)))
        started = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)
        for one in started:  # the relay is in a group of its own, outlives it and has its output
            with suppress(psutil.NoSuchProcess):
                one.kill()
        finish(process, code=-signal.SIGKILL)
    assert broker.of(TakeOver) == [TakeOver(step=0)]
    assert [(seal.step, seal.oldest_kept) for seal in broker.of(SealSteps)] == [
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 2),
    ]
    newest = learning.run / "checkpoints" / "step-000004"
    (newest / "common.pt").write_bytes((newest / "common.pt").read_bytes()[:100])
    (learning.run / "checkpoints" / "step-000003" / "checkpoint.json").write_text("{")

    script = Script(batches=learning.script(*batches), steps=5, epoch=1)
    with ScriptedBroker(learning.endpoint, script) as broker:
        output = finish(learning.start(*settings, resumes=True))
    assert f"cannot read the checkpoint {newest.resolve()}" in output
    assert "step-000003 is passed over" in output
    held = PolicyVersion(1, 2)
    assert broker.of(TakeOver) == [TakeOver(step=2, checkpoint="step-000002", held=held)]
    seals = broker.of(SealSteps)
    assert [seal.step for seal in seals] == [2, 3, 4, 5]
    for seal in seals:  # once it has its name: with its version, or the one after the next step
        assert seal.version.epoch == 2
        assert seal.version.step - seal.step in {0, 1}
    lines = (learning.run / "rollouts" / "trained.jsonl").read_text().splitlines()
    rows = [(row["step"], row["group_id"], row["sibling"]) for row in map(json.loads, lines)]
    assert len(rows) == len(set(rows)), "a step is recorded twice"
    assert {step for step, _, _ in rows} == {0, 1, 2, 3, 4}
    expected = learning.weights_of(batches, *LAYOUTS[layout])
    trained = weights(learning.run)
    assert all(trained[name].equal(tensor) for name, tensor in expected.items())
