"""Checkpoints that are written while training continues: their bits, their order, and crashes."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from slipstream.learner.checkpoints.digests import damage_of
from slipstream.wire.files.checkpoints import newest_checkpoint, read_checkpoint_info, read_ledger
from slipstream.wire.messages.versions import PolicyVersion
from tests.integration.recorded import LAYOUTS, Replays, rows, weights
from tests.support.ranks.run import start
from tests.support.waiting import HANG_S, output_of

pytestmark = pytest.mark.integration
STEPS = 6
NOT_COMPARED = ("time/", "checkpoint/")


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
    "layout", ["one", "critic-tp2", pytest.param("dp2", marks=pytest.mark.slow)]
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
