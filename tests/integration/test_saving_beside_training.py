"""Checkpoints that are written while training continues: their bits, their order, and crashes."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from slipstream.learner.checkpoints.digests import damage_of
from slipstream.wire.files.checkpoints import (
    newest_checkpoint,
    read_best,
    read_checkpoint_info,
    read_ledger,
)
from slipstream.wire.messages.versions import PolicyVersion
from tests.integration.recorded import LAYOUTS, Replays, rows, weights
from tests.support.ranks.run import start
from tests.support.waiting import HANG_S, output_of

pytestmark = pytest.mark.integration
STEPS = 6
NOT_COMPARED = ("time/", "throughput/", "checkpoint/")


class Runs(Replays):
    """Learners whose saves do what a script says."""

    def begin(
        self, name: str, *overrides: str, acts: Sequence[dict[str, object]] = (), **script: object
    ) -> list[subprocess.Popen[str]]:
        """Start the ranks of a learner."""
        for path in [self.folder / "store", *self.folder.glob("committed-*")]:
            path.unlink(missing_ok=True)
        ends = {"last_step": STEPS, "ends_at": STEPS, "means": [], **script}
        work = (self.config, self.file, json.dumps({**ends, "acts": list(acts)}))
        ranks = 2 if "learner.ranks=2" in overrides else 1
        settings = (f"run.name={name}", *overrides)
        return [
            start(self.folder, "support.ranks.loop", *work, rank, *settings)
            for rank in range(ranks)
        ]

    def trained(
        self, name: str, *overrides: str, acts: Sequence[dict[str, object]] = (), **script: object
    ) -> tuple[Path, str]:
        """Train to the end; return the run's folder and what its ranks logged."""
        processes = self.begin(name, *overrides, acts=acts, **script)
        logs = [(process, *output_of(process)) for process in processes]
        for process, _, log in logs:
            assert process.returncode == 0, log
        return self.folder / "runs" / name, "".join(log for *_, log in logs)

    def killed(self, name: str, *overrides: str, act: dict[str, object]) -> Path:
        """Train until a rank kills itself; return the run's folder."""
        processes = self.begin(name, *overrides, acts=[{"do": "kill", **act}])
        victim = processes[int(str(act.get("rank", 0)))]
        try:
            assert victim.wait(HANG_S) == -9, victim.communicate()
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        return self.folder / "runs" / name

    @property
    def seals(self) -> list[list[object]]:
        """Return [version, step, oldest kept, newest checkpoint] of each seal so far."""
        path = self.folder / "seals"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def figures(run: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith(NOT_COMPARED)} for row in rows(run)]


EXPORT = "checkpoint.export_at_end=true"
SAVES = ("checkpoint.every_steps=2", "checkpoint.keep_last=9")
NO_END = "checkpoint.at_end=false"


@pytest.mark.parametrize(
    "layout",  # critic-tp2 has all that the others have
    ["critic-tp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("one", "dp2"))],
)
def test_a_checkpoint_holds_its_step_to_the_bit_though_training_went_on_while_it_was_written(
    tmp_path: Path, layout: str
):
    runs = Runs(tmp_path)
    schedule = ("learner.lr_schedule=cosine", "learner.lr_decay_steps=6", EXPORT)
    settings = (*LAYOUTS[layout], *schedule)
    straight, _ = runs.trained("straight", *settings, NO_END)
    slow = [
        {"stage": "writing", "do": "hold", "nth": 2, "rank": rank, "until": "committed-5"}
        for rank in range(2)
    ]
    run, _ = runs.trained("slow", *settings, "checkpoint.every_steps=3", acts=slow)
    assert figures(run) == figures(straight), "saving has changed training"
    assert runs.seals[1:] == [["v1.6", 6, 3, "step-000006"]]
    assert runs.seals[0][1:] == [3, 3, "step-000003"]
    assert runs.seals[0][0] in {"v1.5", "v1.6"}, "the broker wants the learner's own version"
    checkpoint = run / "checkpoints" / "step-000003"
    assert read_checkpoint_info(checkpoint).version == PolicyVersion(1, 3)
    assert read_ledger(checkpoint) == b"v1.3, asked 3 times", "as of its step"
    resumed, _ = runs.trained("resumed", *settings, NO_END, f"run.resume_from={checkpoint}")
    assert figures(resumed) == figures(straight)[3:]
    assert all(tensor.equal(weights(straight)[name]) for name, tensor in weights(resumed).items())
    staged = [row["checkpoint/staged_bytes"] for row in rows(run)]
    assert staged[:3] == [0, 0, 0]
    assert len(set(staged[3:])) == 1
    assert staged[3] > 2 * (run / "model" / "model.safetensors").stat().st_size, "and Adam's state"


@pytest.mark.parametrize(
    ("stage", "nth", "rank", "layout"),
    [
        ("staged", 1, 0, "one"),
        ("writing", 3, 0, "one"),
        ("complete", 1, 0, "one"),
        ("renamed", 1, 0, "one"),
        ("writing", 3, 1, "tp2"),
        pytest.param("staged", 1, 1, "tp2", marks=pytest.mark.slow),
        pytest.param("written", 1, 0, "tp2", marks=pytest.mark.slow),
        pytest.param("written", 1, 1, "tp2", marks=pytest.mark.slow),
        pytest.param("complete", 1, 0, "tp2", marks=pytest.mark.slow),
        pytest.param("renamed", 1, 0, "tp2", marks=pytest.mark.slow),
    ],
)
def test_a_rank_killed_at_any_stage_leaves_a_whole_checkpoint_and_seals_no_other(
    tmp_path: Path, stage: str, nth: int, rank: int, layout: str
):
    runs = Runs(tmp_path)
    settings = (*LAYOUTS[layout], *SAVES)
    kill = {"stage": stage, "save": 2, "nth": nth, "rank": rank}
    run = runs.killed("a", *settings, act=kill)
    newest = newest_checkpoint(run)
    assert newest is not None
    assert newest.name == ("step-000004" if stage == "renamed" else "step-000002")
    assert damage_of(newest) == ""
    assert [step for _, step, *_ in runs.seals] == [2], "of the second one nothing was reported"

    again, _ = runs.trained("a", *settings, f"run.resume_from={newest}")
    folder = run / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [
        *("step-000002", "step-000004", "step-000006")
    ], "what was left of it is gone"
    first = read_checkpoint_info(newest).step
    assert [step for _, step, *_ in runs.seals[1:]] == [s for s in (2, 4, 6) if s >= first]
    assert again == run


@pytest.mark.parametrize(("layout", "rank"), [("one", 0), ("tp2", 1)])
def test_a_save_that_is_due_waits_for_the_one_before_in_a_poll_that_probes_see(
    tmp_path: Path, layout: str, rank: int
):
    runs = Runs(tmp_path)
    slow = {"stage": "writing", "do": "hold", "rank": rank, "until": "waited"}
    settings = (*LAYOUTS[layout], "checkpoint.every_steps=1", "checkpoint.keep_last=9")
    run, _ = runs.trained("a", *settings, last_step=3, ends_at=3, acts=[slow])
    assert [(step, newest) for _, step, _, newest in runs.seals] == [
        *((1, "step-000001"), (2, "step-000002"), (3, "step-000003"))
    ]
    assert runs.seals[0][0] == "v1.2", "sealed when the second one was due"
    first, second, third = rows(run)
    assert "time/stage_checkpoint" not in first
    assert second["time/stage_checkpoint"] > 0
    assert "time/save_checkpoint_stall" not in second
    assert third["time/save_checkpoint_stall"] > 0
    assert third["time/save_checkpoint"] >= third["time/save_checkpoint_stall"]


@pytest.mark.parametrize(
    ("layout", "rank", "stage", "who"),
    [
        ("tp2", 1, "writing", "rank 1: "),
        pytest.param("one", 0, "complete", "", marks=pytest.mark.slow),
        pytest.param("tp2", 0, "complete", "", marks=pytest.mark.slow),
    ],
)
def test_a_failure_beside_training_is_counted_leaves_nothing_and_the_next_save_succeeds(
    tmp_path: Path, layout: str, rank: int, stage: str, who: str
):
    runs = Runs(tmp_path)
    full = {"stage": stage, "do": "fail", "rank": rank}
    settings = (*LAYOUTS[layout], *SAVES)
    run, log = runs.trained("a", *settings, acts=[full])
    folder = run / "checkpoints"
    failed = f"cannot write the checkpoint {folder / 'step-000002'}: {who}No space left on device"
    assert f"{failed}; training continues" in log
    assert sorted(path.name for path in folder.iterdir()) == ["step-000004", "step-000006"]
    assert [step for _, step, *_ in runs.seals] == [4, 6]
    counts = [row["checkpoint/failed"] for row in rows(run)]
    assert counts[:2] == [0, 0]
    assert counts[4:] == [1, 1], "known when the next one was due"


def test_a_stop_waits_for_the_save_in_flight_and_saves_then(tmp_path: Path):
    runs = Runs(tmp_path)
    slow = {"stage": "writing", "do": "hold", "until": "stopped"}
    run, _ = runs.trained("a", *SAVES, acts=[slow], stops_at=3)
    assert [row["step"] for row in rows(run)] == [1, 2, 3]
    assert [seal[:2] for seal in runs.seals] == [["v1.3", 2], ["v1.3", 3]]
    newest = newest_checkpoint(run)
    assert newest == run / "checkpoints" / "step-000003"
    assert damage_of(newest) == ""


def test_a_disk_that_hangs_costs_the_saves_that_wait_for_it_and_the_end_is_an_error(tmp_path: Path):
    runs = Runs(tmp_path)
    hangs = {"stage": "writing", "do": "hold", "until": "never"}
    (process,) = runs.begin("a", *SAVES, "learner.timeout_s=1", acts=[hangs])
    _, log = output_of(process)
    assert process.returncode == 1, log
    stuck = (
        "step-000002 is still being written, a learner rank has made no progress with it for 1 s "
        "(learner.timeout_s)"
    )
    warned = log.count(f"{stuck}; training continues")
    assert warned == 3, "saves of steps 4 and 6 were due, that of 6 again in the wait for its end"
    assert log.rstrip().endswith(f"CheckpointStuckError: {stuck}")
    run = tmp_path / "runs" / "a"
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4, 5, 6]
    assert rows(run)[4]["checkpoint/failed"] == 1
    assert newest_checkpoint(run) is None
    assert runs.seals == []


def test_an_evaluation_that_comes_during_the_save_is_written_to_it(tmp_path: Path):
    runs = Runs(tmp_path)
    slow = {"stage": "writing", "do": "hold", "until": "committed-4"}
    evaluates = ("eval.file=held_out.jsonl", "eval.every_steps=2", "checkpoint.keep_best=true")
    run, _ = runs.trained(
        *("a", *SAVES, *evaluates, "checkpoint.keep_last=1"),
        acts=[slow],
        means=[(3, 2, (1, 2), 0.9), (99, 6, (1, 6), 0.1)],
        stops_at=5,
    )
    folder = run / "checkpoints"
    info = read_checkpoint_info(folder / "step-000002")
    assert info.evaluation is not None
    assert info.evaluation.mean == 0.9
    marked = read_best(folder)
    assert marked is not None
    assert (marked.checkpoint, marked.value) == ("step-000002", 0.9)


def test_what_is_being_replaced_stays_until_the_new_one_is_complete(tmp_path: Path):
    runs = Runs(tmp_path)
    run, _ = runs.trained("a", *SAVES)
    folder = run / "checkpoints"
    back_to = f"run.resume_from={folder / 'step-000002'}"
    # The going back is the first save of its learner; the second one replaces step 4.
    runs.killed("a", *SAVES, back_to, act={"stage": "complete", "save": 2})
    versions = {path.name: read_checkpoint_info(path).version for path in folder.glob("step-*")}
    assert versions == {
        "step-000002": PolicyVersion(2, 2),
        "step-000004": PolicyVersion(1, 4),
        "step-000006": PolicyVersion(1, 6),
    }
    assert damage_of(folder / "step-000004") == ""
    assert newest_checkpoint(run) == folder / "step-000002"

    full = {"stage": "complete", "do": "fail", "save": 1}
    _, log = runs.trained("a", *SAVES, back_to, acts=[full])
    assert "training continues" in log
    versions = {path.name: read_checkpoint_info(path).version for path in folder.glob("step-*")}
    assert versions == {
        "step-000002": PolicyVersion(2, 2),
        "step-000004": PolicyVersion(1, 4),
        "step-000006": PolicyVersion(3, 6),
    }


ENDS_AT_ONCE = """
import threading
import torch
from slipstream.learner.main import run_and_leave
from slipstream.weightbus.net.threads import submit

class Disk:
    def __init__(self):
        self.reached = threading.Event()
    def write(self, data):
        self.reached.set()
        threading.Event().wait()
    def flush(self):
        pass

def body():
    disk = Disk()
    submit(lambda: torch.save(torch.zeros(8), disk))
    disk.reached.wait()
    raise SystemExit(0)

raise SystemExit(run_and_leave(body))
"""


def test_a_second_signal_ends_the_learner_with_its_code_around_a_thread_that_writes():
    done = subprocess.run(
        [sys.executable, "-c", ENDS_AT_ONCE],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_save_that_hangs_and_is_not_beside_training_ends_it(tmp_path: Path):
    # Its thread reads the policy itself, which the next step would change under it.
    runs = Runs(tmp_path)
    hangs = {"stage": "writing", "do": "hold", "until": "never"}
    settings = (*SAVES, "checkpoint.asynchronous=false", "learner.timeout_s=1")
    (process,) = runs.begin("a", *settings, acts=[hangs])
    _, log = output_of(process)
    assert process.returncode == 1, log
    assert "CheckpointStuckError: step-000002 is still being written" in log.splitlines()[-1]
    assert "training continues" not in log
    run = tmp_path / "runs" / "a"
    assert [row["step"] for row in rows(run)] == [1, 2]
    assert newest_checkpoint(run) is None
