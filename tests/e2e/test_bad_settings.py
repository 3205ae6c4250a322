"""Whatever is wrong with a run's inputs: one clear line, exit code 2, nothing left running."""

import json
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from slipstream.wire.files.checkpoints import INFO_FILE, LEDGER_FILE
from tests.support.blank_model import write_blank_model
from tests.support.tiny_run import TinyRun
from tests.support.waiting import HANG_S

pytestmark = [pytest.mark.e2e]
Spoil = Callable[[Path], None]


def nothing(_folder: Path) -> None:
    """Leave the inputs as they are."""


def remove_weights(folder: Path) -> None:
    (folder / "model" / "model.safetensors").unlink()


def shrink_vocabulary(folder: Path) -> None:
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 5}))


def rename_column(folder: Path) -> None:
    path = folder / "train.jsonl"
    path.write_text(path.read_text().replace('"prompt"', '"question"'))


def empty_data(folder: Path) -> None:
    (folder / "train.jsonl").write_text("")


def spoil_row(folder: Path) -> None:
    path = folder / "train.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], "{", *lines[3:]]))


# One case for each process that refuses (the engine's start is long: slow); the others do the same
# of other settings.
IN_MAKE_TEST = {"unknown setting", "empty data", "vocabulary", "no reward"}
CASES: dict[str, tuple[dict[str, object], Spoil, str]] = {
    "unknown setting": (
        {"run.stepz": 3},
        nothing,
        r"unknown setting run\.stepz; did you mean steps\?",
    ),
    "out of range": (
        {"sampling.temperature": -1},
        nothing,
        r"sampling\.temperature must be a number above 0, got -1",
    ),
    "no model folder": ({"run.model": "/nowhere"}, nothing, r"/nowhere.*\(run\.model\)"),
    "incomplete model": ({}, remove_weights, r"safetensors.*\(run\.model\)"),
    "vocabulary": (  # learner and generator look at once: either is the first
        {},
        shrink_vocabulary,
        r"vocab.*run\.model|run\.model.*vocab|must have shape \[5, 64\].*\(run\.model\)",
    ),
    "no Redis": ({"broker.redis.url": "redis://127.0.0.1:1"}, nothing, r"broker\.redis\.url"),
    "no reward": ({"reward.function": "no_such:f"}, nothing, r"reward\.function 'no_such:f'"),
    "algorithm": ({"algo.surrogate": "ppo"}, nothing, r"algo\.surrogate = 'ppo' is not known"),
    "turns": (
        {"algo.advantage.over": "turns"},
        nothing,
        r"over = .turns. needs environment\.function",
    ),
    "engine": ({"generators.sglang.nonsense": 1}, nothing, r"generators\.sglang\.nonsense"),
    "no column": ({}, rename_column, r"data\.prompt_column.*train\.jsonl"),
    "empty data": ({}, empty_data, r"data\.file.*train\.jsonl"),
    "bad row": ({}, spoil_row, r"data\.file: row 2 \(line 3\) of .*train\.jsonl"),
    "long prompt": ({"sampling.max_prompt_tokens": 3}, nothing, r"sampling\.max_prompt_tokens"),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in IN_MAKE_TEST else pytest.mark.slow) for case in CASES],
)
def test_bad_input_is_refused_in_one_line(case: str, tmp_path: Path):
    settings, spoil, message = CASES[case]
    run = TinyRun(tmp_path, settings, before=spoil)
    assert_refused(run, message)
    assert not run.folder.exists(), "the name is free for the next try"


def assert_refused(run: TinyRun, message: str) -> None:
    assert run.wait() == 2, run.output
    printed = run.output.splitlines()
    refusals = {line for line in printed if line.startswith("refused: ")} or set(printed)
    assert len(refusals) == 1, f"one line, though it may come again at the end:\n{run.output}"
    assert re.search(message, *refusals), f"the line does not match {message}:\n{run.output}"
    assert printed[-1] in refusals
    assert "Traceback" not in run.output
    if (run.folder / "resolved.toml").exists():
        run.assert_nothing_left()
    else:
        _, alive = psutil.wait_procs(list(run.descendants), timeout=HANG_S)
        assert not alive


def test_a_port_in_use_is_named(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = TinyRun(tmp_path, {"broker.dashboard.port": port})
        settings = r"\(broker\.dashboard\.host, broker\.dashboard\.port\)"
        assert_refused(run, rf":{port} {settings}: .*in use")


@pytest.mark.slow  # two runs; tests/integration/test_checkpoint.py has the refusal itself
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path):
    """Made by a first run, then offered to a policy of another width."""
    first = TinyRun(tmp_path, {"run.steps": 1})
    assert first.wait() == 0, first.output
    checkpoint = first.folder / "checkpoints" / "step-000001"
    assert {INFO_FILE, LEDGER_FILE} <= {path.name for path in checkpoint.iterdir()}

    def widen(folder: Path) -> None:
        write_blank_model(folder / "model", hidden=32, layers=2)

    run = TinyRun(tmp_path, {"run.steps": 2}, options=["--resume", str(first.folder)], before=widen)
    assert_refused(run, r"hidden_size.*64.*32|hidden_size.*32.*64")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount file systems for the test; needs root."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        if subprocess.run(command, check=False, capture_output=True).returncode != 0:
            pytest.skip("this machine does not allow mounts")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], check=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("size=4k", r"No space left on device.*\(run\.dir\)"),
        pytest.param(
            "ro",
            r"\(run\.dir\).*Read-only file system|Read-only file system.*\(run\.dir\)",
            marks=pytest.mark.slow,  # the other disk does the same for another error
        ),
    ],
)
def test_a_disk_that_cannot_be_written_is_named(
    small_disk: Callable[[str], Path], tmp_path: Path, options: str, message: str
):
    run = TinyRun(
        tmp_path, {"run.dir": small_disk(options), "run.outage_s": 5, "deploy.stop_timeout_s": 5}
    )
    assert_refused(run, message)


# tests/integration/test_redis_server.py has a store whose disk stays full, and what it says.
@pytest.mark.slow
def test_a_disk_that_fills_up_later_ends_the_run_in_order(
    small_disk: Callable[[str], Path], tmp_path: Path
):
    run = TinyRun(
        tmp_path,
        {
            "run.dir": small_disk("size=300k"),
            "run.steps": 500,
            "run.outage_s": 8,
            "deploy.stop_timeout_s": 8,
        },
    )
    assert_refused(run, r"disk is full|No space left on device")
