"""The supervised warm-up as a child process: bounds, kills, progress that is gone on from."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tests.support.blank_model import write_blank_model

ROOT = Path(__file__).parents[2]
BOUND = 15  # updates, fewer than the target takes, and no multiple of those evaluated

# No test waits for a while: a child ends, or prints where it is.
pytestmark = pytest.mark.integration  # most of it slow: it makes what ships again, no part of a run


class CutOff(NamedTuple):
    """A warm-up that reached its bound."""

    folder: Path
    errors: str


def write_rows(file: Path, answers: list[tuple[int, int]]) -> None:
    rows = [{"prompt": f"{digit}=", "ground_truth": str(answer)} for digit, answer in answers]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_inputs(folder: Path, *, wrong: bool = False) -> None:
    """Write a task that is learned in some dozen updates, or taught wrongly half of the time."""
    write_blank_model(folder / "blank", hidden=32, layers=1)
    right = [(digit, digit) for digit in range(10)]
    write_rows(folder / "data.jsonl", right)
    write_rows(folder / "demos.jsonl", right + [(d, 9 - d) for d in range(10)] * wrong)


def start(folder: Path, *options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "docs.generate.policy.warm_up", "--model", folder / "blank"]
    command += ["--demonstrations", folder / "demos.jsonl", "--data", folder / "data.jsonl"]
    command += ["--out", folder / "out", *options]
    return subprocess.Popen(list(map(str, command)), cwd=ROOT, stderr=subprocess.PIPE, text=True)


def warm_up(folder: Path, *options: object, code: int = 0) -> str:
    """Return what a warm-up wrote to standard error."""
    with start(folder, *options) as process:
        try:
            errors = process.communicate()[1]
        finally:
            process.kill()
    assert process.returncode == code, errors
    return errors


def progress(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "out.progress").glob("[!.]*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warm-up that nothing cut off."""
    folder = tmp_path_factory.mktemp("whole")
    write_inputs(folder)
    errors = warm_up(folder, "--target", 0.9, "--dtype", "float32")
    assert "resuming" not in errors
    return folder


@pytest.fixture(scope="module")
def first_call(tmp_path_factory: pytest.TempPathFactory) -> CutOff:
    folder = tmp_path_factory.mktemp("cut-off")
    write_inputs(folder)
    return CutOff(folder, warm_up(folder, "--target", 0.9, "--max-updates", BOUND, code=1))


@pytest.fixture
def cut_off(first_call: CutOff, tmp_path: Path) -> CutOff:
    """A copy of it that a test may change."""
    folder = shutil.copytree(first_call.folder, tmp_path / "copy")
    return CutOff(folder, first_call.errors)


def test_the_bound_fails_with_cause_and_remedy_and_keeps_the_progress(first_call: CutOff):
    folder, errors = first_call
    last = errors.splitlines()[-1]
    assert f"{BOUND} updates (--max-updates) make the policy right in 0." in last
    assert "--target is 0.9" in last
    assert f"The progress is in {folder / 'out.progress'}" in last
    assert "call again with more --max-updates or a lower --target" in last
    assert progress(folder) == ["inputs.json", f"step-{BOUND:06d}"]
    assert not (folder / "out").exists()


@pytest.mark.slow
def test_a_second_call_makes_the_policy_of_an_uninterrupted_one(whole: Path, cut_off: CutOff):
    errors = warm_up(cut_off.folder, "--target", 0.9, "--dtype", "float32")
    assert f"resuming from {BOUND} updates" in errors
    made, expected = cut_off.folder / "out", whole / "out"
    assert (made / "model.safetensors").read_bytes() == (
        expected / "model.safetensors"
    ).read_bytes()
    assert not (cut_off.folder / "out.progress").exists()


@pytest.mark.slow
def test_other_inputs_begin_anew(cut_off: CutOff):
    folder = cut_off.folder
    write_rows(folder / "demos.jsonl", [(digit, 9 - digit) for digit in range(10)])
    errors = warm_up(folder, "--target", 0.9, "--max-updates", 1, code=1)
    assert "was made with another --demonstrations: starting over" in errors
    assert "resuming" not in errors
    assert progress(folder) == ["inputs.json", "step-000001"]


@pytest.mark.slow
def test_damaged_progress_is_passed_over(whole: Path, cut_off: CutOff):
    folder = cut_off.folder
    for path in (folder / "out.progress").rglob("*.distcp"):
        path.write_bytes(path.read_bytes()[:1000])
    errors = warm_up(folder, "--target", 0.9)
    assert f"step-{BOUND:06d} is passed over: cannot read the checkpoint" in errors
    assert "resuming" not in errors
    made = load_file(folder / "out" / "model.safetensors")
    expected = load_file(whole / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in made.values()} == {torch.bfloat16}
    assert made.keys() == expected.keys()
    for name, tensor in made.items():
        assert tensor.equal(expected[name].bfloat16()), name


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_interrupted_warm_up_leaves_progress_to_resume_from(tmp_path: Path, signum: signal.Signals):
    write_inputs(tmp_path, wrong=True)
    with start(tmp_path, "--target", 1.0) as process:  # out of reach: it never ends by itself
        try:
            assert process.stderr is not None
            line_of_100 = next(line for line in process.stderr if " 100 updates, sampled" in line)
            assert "of 1.000" in line_of_100
            process.send_signal(signum)
            errors = process.communicate()[1]
        finally:
            process.kill()
    # SIGKILL may come between a new checkpoint and the removal of the one before.
    kept = int(progress(tmp_path)[-1].removeprefix("step-"))
    assert kept >= 50
    if signum == signal.SIGTERM:
        assert process.returncode == 130, errors
        assert f"the same call resumes from {kept} updates" in errors
    assert not (tmp_path / "out").exists()
    errors = warm_up(tmp_path, "--target", 0.2)
    assert f"resuming from {kept} updates" in errors
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert not (tmp_path / "out.progress").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--target", 1.5), "--target is a share above 0 and at most 1, got 1.5"),
        (("--max-updates", 0), "--max-updates must be at least 1, got 0"),
        (
            ("--held-out", "/nowhere"),
            "cannot read /nowhere: No such file or directory (--held-out)",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(
    tmp_path: Path, options: tuple[object, ...], message: str
):
    write_inputs(tmp_path)
    assert warm_up(tmp_path, *options, code=2).splitlines()[-1] == message
