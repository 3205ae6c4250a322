"""When the loop saves, what an evaluation is written to, and what is newest after going back."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.wire.files.checkpoints import (
    best_checkpoint,
    checkpoints_in,
    newest_checkpoint,
    read_best,
    read_checkpoint_info,
    read_ledger,
)
from slipstream.wire.files.remote_checkpoints import RemoteCheckpoints
from slipstream.wire.messages.versions import PolicyVersion
from tests.integration.recorded import LAYOUTS, Replays, rows
from tests.support.ranks.run import outputs, start

pytestmark = pytest.mark.integration
AT_ONCE = "checkpoint.asynchronous=false"  # for an order without it: saved, then asked for a batch
EVERY_2 = ("checkpoint.every_steps=2", "eval.file=held_out.jsonl", "eval.every_steps=2", AT_ONCE)


def train(
    replays: Replays, *overrides: str, last_step: int, ends_at: int, means: Sequence[object] = ()
) -> list[dict[str, Any]]:
    """Train run "a" with a scripted broker; return what rank 0 saw when it asked for batches."""
    script = json.dumps({"last_step": last_step, "ends_at": ends_at, "means": list(means)})
    ranks = 2 if "learner.ranks=2" in overrides else 1
    (replays.folder / "store").unlink(missing_ok=True)
    work = [replays.config, replays.file, script]
    processes = [
        start(replays.folder, "support.ranks.loop", *work, rank, "run.name=a", *overrides)
        for rank in range(ranks)
    ]
    seen: list[dict[str, Any]] = json.loads(outputs(processes)[0].splitlines()[-1])
    return seen


@pytest.mark.parametrize(("layout", "planned"), [("one", "before"), ("tp2", "while waiting")])
def test_the_last_step_is_saved_before_its_evaluations_are_waited_for(
    tmp_path: Path, layout: str, planned: str
):
    replays = Replays(tmp_path)
    last_step = 2 if planned == "before" else 6
    seen = train(replays, *LAYOUTS[layout], last_step=last_step, ends_at=2)
    assert [row["step"] for row in seen] == [0, 1, 2, 2]
    while_training, first, second = seen[1], seen[2], seen[3]
    assert while_training["newest"] is None
    assert first["newest"] == ("step-000002" if planned == "before" else None)
    assert second["newest"] == "step-000002"
    (folder,) = checkpoints_in(tmp_path / "runs" / "a" / "checkpoints")
    assert read_ledger(folder) == b"v1.2, asked 4 times", "without the last evaluations"


def test_the_best_is_one_that_is_there(tmp_path: Path):
    replays = Replays(tmp_path)
    means = [(3, 2, (1, 3), 0.9), (99, 6, (1, 6), 0.1)]
    settings = (*EVERY_2, "checkpoint.keep_last=1")
    seen = train(replays, *settings, last_step=6, ends_at=6, means=means)
    best = [(row["step"], row["best"]) for row in seen]
    assert best == [
        *((0, None), (1, None), (2, None)),
        (3, "step-000002"),
        *((4, None), (5, None), (6, None), (6, None)),
    ]
    run = tmp_path / "runs" / "a"
    marked = read_best(run / "checkpoints")
    assert marked is not None
    assert (marked.checkpoint, marked.value) == ("step-000006", 0.1)
    assert (marked.oldest_version, marked.newest_version) == ("v1.6", "v1.6")
    assert best_checkpoint(run) == newest_checkpoint(run)


def test_two_ranks_upload_what_they_saved_by_the_end(tmp_path: Path):
    replays = Replays(tmp_path)
    url = f"file://{tmp_path}/bucket"
    settings = ("checkpoint.every_steps=2", "checkpoint.keep_last=2", f"checkpoint.upload={url}")
    run = replays.train("a", *settings, *LAYOUTS["tp2"])
    local = [read_checkpoint_info(path) for path in checkpoints_in(run / "checkpoints")]
    remote = RemoteCheckpoints(url).known()
    assert [one.info for one in remote] == local
    assert len(local) == 2
    assert {"__0_0.distcp", "__1_0.distcp"} <= {one.name for one in remote[-1].objects}


def test_round_open_at_the_stop_is_written_to_the_checkpoint_resumed_from(tmp_path: Path):
    replays = Replays(tmp_path)
    keep = (*EVERY_2, "checkpoint.keep_best=true", "checkpoint.keep_last=1")
    train(replays, *keep, last_step=2, ends_at=2)
    run = tmp_path / "runs" / "a"
    stopped_at = run / "checkpoints" / "step-000002"
    train(
        replays,
        *keep,
        f"run.resume_from={stopped_at}",
        last_step=6,
        ends_at=4,
        means=[(3, 2, (2, 2), 0.9), (4, 4, (2, 4), 0.1)],
    )
    info = read_checkpoint_info(stopped_at)
    assert info.version == PolicyVersion(1, 2)
    assert info.evaluation is not None
    assert info.evaluation.mean == 0.9
    assert best_checkpoint(run) == stopped_at
    marked = read_best(run / "checkpoints")
    assert marked is not None
    assert marked.newest_version == "v2.2"


def test_after_going_back_the_abandoned_life_is_never_the_newest_again(tmp_path: Path):
    replays = Replays(tmp_path)
    many = ("checkpoint.every_steps=2", "checkpoint.keep_last=9")
    run = replays.train("a", *many)
    folder = run / "checkpoints"
    back_to = folder / "step-000002"

    # Ends before it has trained anything, as by Ctrl-C.
    two_ranks = LAYOUTS["dp2"]
    replays.train("a", *many, *two_ranks, f"run.resume_from={back_to}", "run.steps=2")
    assert newest_checkpoint(run) == back_to
    assert read_checkpoint_info(back_to).version == PolicyVersion(2, 2)
    assert len(rows(run)) == 6, "something was trained"

    replays.train("a", *many, f"run.resume_from={back_to}", "run.steps=3")
    versions = [read_checkpoint_info(path).version for path in checkpoints_in(folder)]
    assert versions == [PolicyVersion(*v) for v in ((1, 4), (1, 6), (2, 2), (3, 3))]

    few = (*many, "checkpoint.keep_last=1", "run.steps=4")
    replays.train("a", *few, f"run.resume_from={folder / 'step-000004'}")
    (left,) = checkpoints_in(folder)
    assert read_checkpoint_info(left).version == PolicyVersion(4, 4)
