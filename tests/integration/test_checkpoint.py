"""Checkpoints: resuming computes the same bits, in the same layout; other layouts can read them."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch

from slipstream.wire.files.checkpoints import (
    best_checkpoint,
    checkpoints_in,
    newest_checkpoint,
    read_checkpoint_info,
)
from slipstream.wire.messages.versions import PolicyVersion
from tests.integration.recorded import LAYOUTS, Replays, finish, rows, weights
from tests.support.ranks.run import outputs, reports, start
from tests.support.tiny_models import write_tiny_model
from tests.support.waiting import until

pytestmark = pytest.mark.integration
SCHEDULE = (
    "learner.lr_schedule=cosine",
    "learner.lr_warmup_steps=2",
    "learner.lr_decay_steps=6",
    "learner.weight_decay=0.1",
    "learner.minibatches=2",
    "learner.adam_epsilon=1e-3",  # Adam amplifies rounding where the second moment is tiny
    "checkpoint.export_at_end=true",
)
EXPORT = "checkpoint.export_at_end=true"


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Replays, Path]]:
    """Six steps in a layout, with a checkpoint after three; each layout is trained once."""

    @cache
    def trained(layout: str) -> tuple[Replays, Path]:
        replays = Replays(tmp_path_factory.mktemp(layout))
        settings = (*LAYOUTS[layout], *SCHEDULE, "checkpoint.every_steps=3")
        return replays, replays.train("straight", *settings)

    return trained


@pytest.mark.slow  # test_saving_beside_training.py has a rank killed at each stage of a save
def test_a_learner_killed_at_random_steps_computes_the_same_bits(
    straight: Callable[[str], tuple[Replays, Path]],
):
    replays, run = straight("tp2-pp2")
    settings = (*LAYOUTS["tp2-pp2"], *SCHEDULE, "checkpoint.every_steps=1")
    saved = replays.folder / "runs" / "killed" / "checkpoints"
    random = Random(7)
    resume: tuple[str, ...] = ()
    for _ in range(2):
        process = replays.start("killed", *settings, *resume)
        wanted = len(checkpoints_in(saved)) + random.randint(0, 1)
        until(
            lambda: len(checkpoints_in(saved)) > wanted or process.poll() is not None,  # noqa: B023
            "a checkpoint",
        )
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "it ended before it was killed"
        resume = (f"run.resume_from={checkpoints_in(saved)[-1]}",)
    killed = replays.train("killed", *settings, *resume)
    assert all(tensor.equal(weights(run)[name]) for name, tensor in weights(killed).items())


@pytest.mark.parametrize(
    "layout",  # critic-tp2 has all that tp2 has; replicas that resume are tested below
    [
        pytest.param(
            layout, marks=[pytest.mark.slow] * (layout not in {"one", "bf16", "critic-tp2"})
        )
        for layout in LAYOUTS
    ],
)
def test_three_steps_and_three_after_a_resume_are_six_steps_bit_for_bit(
    straight: Callable[[str], tuple[Replays, Path]], layout: str
):
    replays, run = straight(layout)
    checkpoint = run / "checkpoints" / "step-000003"
    info = read_checkpoint_info(checkpoint)
    assert (info.step, info.version) == (3, PolicyVersion(1, 3))
    settings = (*LAYOUTS[layout], *SCHEDULE, f"run.resume_from={checkpoint}")
    resumed = replays.train("resumed", *settings)
    assert all(tensor.equal(weights(run)[name]) for name, tensor in weights(resumed).items())
    expected, figures = (
        [
            {
                k: v
                for k, v in row.items()
                if not k.startswith(("time/", "throughput/", "checkpoint/"))
            }
            for row in rows(folder)
        ]
        for folder in (run, resumed)
    )
    assert [row["step"] for row in figures] == [4, 5, 6]
    assert figures == expected[3:]
    assert min(row["policy/grad_norm"] for row in figures) > 1e-3, "nothing was trained"
    if layout == "critic-tp2":  # what it expects is among the figures compared above
        assert min(row["critic/grad_norm"] for row in figures) > 1e-3, "no critic was trained"
        assert len({row["critic/value"] for row in figures}) == 3
    newest = newest_checkpoint(resumed)
    assert newest is not None
    assert read_checkpoint_info(newest).version == PolicyVersion(2, 6)


def test_checkpoint_of_two_ranks_resumes_on_one(straight: Callable[[str], tuple[Replays, Path]]):
    replays, run = straight("tp2")
    resume = f"run.resume_from={run / 'checkpoints' / 'step-000003'}"
    alone = replays.train("alone", *SCHEDULE, resume)
    assert largest_difference(weights(alone), weights(run)) < 2e-5


def test_settings_of_the_new_start_win_over_those_of_the_checkpoint(
    straight: Callable[[str], tuple[Replays, Path]],
):
    replays, run = straight("one")
    resume = f"run.resume_from={run / 'checkpoints' / 'step-000003'}"
    resting = replays.train("resting", resume, "learner.lr=0.0", EXPORT)
    assert [row["policy/lr"] for row in rows(resting)] == [0.0, 0.0, 0.0]
    assert largest_difference(weights(resting), weights(run)) > 1e-4


def test_what_cannot_be_resumed_from_is_refused_with_its_reason(tmp_path: Path):
    replays = Replays(tmp_path)
    first = replays.train("first", "run.steps=1")
    checkpoint = newest_checkpoint(first)
    assert checkpoint is not None
    resume = f"run.resume_from={checkpoint}"

    def refused(*overrides: str) -> str:
        return finish(replays.start("second", *overrides), code=2)

    assert f"{first} is no checkpoint: checkpoint.json: No such file" in refused(
        f"run.resume_from={first}"
    )
    assert "its parameters are float32 there and bfloat16 here (learner.dtype)" in refused(
        resume, "learner.dtype=bfloat16"
    )
    assert f"{checkpoint} holds no critic, and algo.advantage needs one: resume with" in refused(
        resume, "algo.preset=ppo"
    )
    other = tmp_path / "other"
    shutil.copytree(replays.model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    assert "another model than run.model: intermediate_size is" in refused(
        resume, f"run.model={other}"
    )
    (checkpoint / "__0_0.distcp").write_bytes(b"")
    assert f"cannot read the checkpoint {checkpoint}" in refused(resume)


def test_the_newest_are_kept_and_what_a_crash_left_is_removed(tmp_path: Path):
    replays = Replays(tmp_path)
    folder = tmp_path / "runs" / "a" / "checkpoints"
    left = folder / ".step-000004.unfinished"
    left.mkdir(parents=True)
    (left / "checkpoint.json").write_text("{")
    saved = ("checkpoint.every_steps=2", "checkpoint.asynchronous=false")
    run = replays.train("a", *saved, "checkpoint.keep_last=2")
    assert [path.name for path in checkpoints_in(folder)] == ["step-000004", "step-000006"]
    assert sorted(path.name for path in folder.iterdir()) == ["step-000004", "step-000006"]
    assert best_checkpoint(run) is None
    seconds = [row["time/save_checkpoint"] for row in rows(run) if "time/save_checkpoint" in row]
    assert len(seconds) == 2


@pytest.mark.parametrize("layout", [pytest.param("one", marks=pytest.mark.slow), "tp2"])
def test_failed_save_keeps_the_one_before_and_training_continues(tmp_path: Path, layout: str):
    replays = Replays(tmp_path)
    run = replays.train("a", *LAYOUTS[layout], "run.steps=1")
    checkpoint = newest_checkpoint(run)
    resume = (f"run.resume_from={checkpoint}", "run.steps=3", "checkpoint.at_end=false")
    every = ("checkpoint.every_steps=1", "checkpoint.asynchronous=false")
    settings = (*LAYOUTS[layout], *resume, *every, "checkpoint.keep_last=1")
    output = finish(replays.start("a", *settings, max_file_bytes=400_000))
    folder = run / "checkpoints"
    who = "" if layout == "one" else "rank 0: "
    failed = f"cannot write the checkpoint {folder / 'step-000002'}: {who}File too large"
    assert failed in output
    assert "training continues" in output
    assert [path.name for path in folder.iterdir()] == ["step-000001"]
    assert [row["checkpoint/failed"] for row in rows(run)] == [0.0, 0.0, 1.0]


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path):
    replays = Replays(tmp_path)
    folder = tmp_path / "runs" / "a" / "checkpoints"
    folder.parent.mkdir(parents=True)
    folder.write_text("not a folder")
    output = finish(replays.start("a"), code=2)
    assert f"cannot write checkpoints to {folder}: File exists" in output


def test_checkpoint_with_a_missing_or_cut_file_is_damaged_and_names_it(tmp_path: Path):
    model, work = write_tiny_model(tmp_path / "model", "llama"), tmp_path / "work"
    work.mkdir()
    outputs([start(work, "support.ranks.damaged", model, work)])
    (refused,) = reports(work, 1)
    assert len(refused) == 25, "five files, and five ways to damage each"
    for name, reason in refused.items():
        assert f"cannot read the checkpoint {work / name}: " in reason, name
