"""A run whose model, data and checkpoints are in a bucket."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.wire.files.checkpoints import newest_checkpoint, read_checkpoint_info
from slipstream.wire.files.remote import RemoteFolder
from slipstream.wire.files.remote_checkpoints import RemoteCheckpoints
from slipstream.wire.process.command_line import EXIT_INTERRUPTED
from slipstream.wire.settings.load import load_table
from tests.support.stores import BUCKET, s3_server
from tests.support.tiny_run import TinyRun, tiny_inputs

pytestmark = pytest.mark.e2e
UPLOAD = f"{BUCKET}/runs/tiny"


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[None]:
    """A bucket with the inputs of a run."""
    tiny_inputs(tmp_path)
    with s3_server():
        for path in (tmp_path / "model").iterdir():
            RemoteFolder(f"{BUCKET}/model", "test").put(path, path.name)
        RemoteFolder(BUCKET, "test").put(tmp_path / "train.jsonl", "train.jsonl")
        yield


def remove_inputs(folder: Path) -> None:
    shutil.rmtree(folder / "model")
    (folder / "train.jsonl").unlink()


def started(folder: Path, steps: int, *options: str) -> TinyRun:
    settings = {
        "run.model": f"{BUCKET}/model",
        "data.file": f"{BUCKET}/train.jsonl",
        "run.cache_dir": folder / "cache",
        "run.steps": steps,
        "checkpoint.every_steps": 1,
        "checkpoint.upload": UPLOAD,
    }
    return TinyRun(folder, settings, options=options, before=remove_inputs)


def train(folder: Path, steps: int, *options: str) -> TinyRun:
    run = started(folder, steps, *options)
    assert run.wait() == 0, run.output
    assert run.summary()["outcome"] == "finished"
    return run


def uploaded() -> list[str]:
    return [one.version.label for one in RemoteCheckpoints(UPLOAD).known()]


@pytest.mark.usefixtures("bucket")
def test_ctrl_c_ends_when_the_last_checkpoint_is_in_the_bucket(tmp_path: Path):
    run = started(tmp_path, 1000)
    run.wait_until(lambda: run.steps() >= 2, "the second step")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == EXIT_INTERRUPTED, run.output
    newest = newest_checkpoint(run.folder)
    assert newest is not None
    assert uploaded()[-1] == read_checkpoint_info(newest).version.label
    assert "is not in" not in run.output
    run.assert_nothing_left()


@pytest.mark.usefixtures("bucket")
def test_run_resumes_from_the_bucket_where_its_checkpoints_or_all_of_it_are_lost(tmp_path: Path):
    first = train(tmp_path, 2)
    assert uploaded() == ["v1.1", "v1.2"]
    resolved = load_table(first.folder / "resolved.toml")
    assert set(resolved["run"]["contents"]) == {f"{BUCKET}/model", f"{BUCKET}/train.jsonl"}
    first.assert_nothing_left()

    shutil.rmtree(first.folder / "checkpoints")
    second = train(tmp_path, 3, "--resume", "auto")
    assert "resuming from" in second.output
    assert "step-000002" in second.output
    assert uploaded() == ["v1.2", "v2.3"]

    shutil.rmtree(tmp_path / "runs")
    shutil.rmtree(tmp_path / "cache")
    third = train(tmp_path, 4, "--resume", "auto")
    assert third.summary()["trained"] == 16
    assert third.summary()["equation"]["unaccounted"] == 0
    assert uploaded()[-1] == "v3.4"
    text = "".join(path.read_text(errors="replace") for path in third.folder.rglob("*.log"))
    assert "not-a-secret" not in text
    assert "not-a-secret" not in (third.folder / "resolved.toml").read_text()
