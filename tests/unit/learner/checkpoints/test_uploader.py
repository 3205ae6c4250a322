"""Uploads beside training: what fails is counted and tried again, nothing waits for it."""

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import msgspec
import pytest

from slipstream.learner.checkpoints.digests import damage_of
from slipstream.learner.checkpoints.retention import Resumption
from slipstream.learner.checkpoints.uploader import Uploader
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import CheckpointInfo, read_upload_state
from slipstream.wire.files.remote_checkpoints import Manifest, RemoteCheckpoints, RemoteObject
from slipstream.wire.messages.status import EvalFigures, EvalPoint
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.checkpoint_infos import saved_checkpoint
from tests.support.faulty_store import FaultyStore, faulty_folder
from tests.support.learner_settings import learner_settings_of
from tests.support.waiting import until

RUN_ID = "1f"
FIGURES = EvalFigures(num_problems=1, num_answers=1, num_dropped=0, metrics={"mean@1": 0.5})
EVALUATION = EvalPoint(step=1, overall=FIGURES, by_source={}, versions=())


@pytest.fixture
def url() -> Iterator[str]:
    with faulty_folder() as folder:
        yield folder


def uploader(folder: Path, url: str, *, keep_last: int = 2, run_id: str = RUN_ID) -> Uploader:
    settings = learner_settings_of(folder, url, keep_last=keep_last)
    return Uploader(settings, run_id, pause_s=0.001)


def save(folder: Path, *steps: int, epoch: int = 1) -> dict[Path, CheckpointInfo]:
    run = folder / "a"
    return dict(saved_checkpoint(run, PolicyVersion(epoch, step), run_id=RUN_ID) for step in steps)


def there(url: str) -> list[str]:
    return [one.version.label for one in RemoteCheckpoints(url).known()]


def does(action: Callable[[str], object]) -> None:
    FaultyStore.before_put = staticmethod(action)


def test_checkpoints_are_uploaded_and_removed_by_the_rule_of_the_run_folder(
    tmp_path: Path, url: str
):
    work = uploader(tmp_path, url)
    infos = save(tmp_path, 1)
    work.offer(infos, None)
    until(lambda: there(url) == ["v1.1"])
    infos |= save(tmp_path, 2, 3)
    work.offer(infos, None)
    work.close()
    assert there(url) == ["v1.2", "v1.3"]
    assert work.figures() == {"checkpoint/upload_failed": 0, "checkpoint/uploaded_step": 3}


def test_objects_of_others_are_never_removed(tmp_path: Path, url: str):
    store = fsspec.filesystem("faulty")
    path = url.removeprefix("faulty://")
    others = [f"/{path}/step-000001-epoch-1/notes.txt", f"/{path}/step-000001/common.pt"]
    for name in others:
        store.pipe_file(name, b"not ours")
    work = uploader(tmp_path, url, keep_last=1)
    infos = save(tmp_path, 1)
    work.offer(infos, None)
    until(lambda: there(url) == ["v1.1"])
    work.offer(infos | save(tmp_path, 2), None)
    work.close()
    assert there(url) == ["v1.2"]
    assert all(store.exists(name) for name in others)
    assert not store.exists(f"/{path}/step-000001-epoch-1/common.pt")


def test_remote_checkpoints_that_the_host_has_lost_count_for_the_rule(tmp_path: Path, url: str):
    first = uploader(tmp_path / "lost", url)
    first.offer(save(tmp_path / "lost", 1, 2), None)
    first.close()
    resumption = Resumption(PolicyVersion(1, 2), 2)
    work = uploader(tmp_path, url)
    work.offer(save(tmp_path, 2), resumption)
    work.close()
    assert there(url) == ["v1.1", "v1.2"]
    again = uploader(tmp_path, url)
    again.offer(save(tmp_path, 3, epoch=2), resumption)
    again.close()
    assert there(url) == ["v1.2", "v2.3"]


def test_evaluation_that_came_later_reaches_the_manifest_without_another_upload(
    tmp_path: Path, url: str
):
    puts: list[str] = []
    does(puts.append)
    work = uploader(tmp_path, url)
    ((path, info),) = save(tmp_path, 1).items()
    work.offer({path: info}, None)
    until(lambda: there(url) == ["v1.1"])
    sent = len(puts)
    changed = msgspec.structs.replace(info, evaluation=EVALUATION)
    work.offer({path: changed}, None)
    work.close()
    assert len(puts) == sent
    (manifest,) = RemoteCheckpoints(url).known()
    assert manifest.info == changed


def test_failures_are_tried_again_counted_and_do_not_hold_up_the_caller(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
):
    failures = [PermissionError("Forbidden"), TimeoutError("away")]
    allowed = threading.Event()

    def fail(_path: str) -> None:
        allowed.wait()
        if failures:
            raise failures.pop()

    does(fail)
    work = uploader(tmp_path, url)
    with caplog.at_level(logging.INFO):
        work.offer(save(tmp_path, 1), None)  # returns while nothing is allowed
        assert there(url) == []
        allowed.set()
        work.close()
    assert there(url) == ["v1.1"]
    assert work.figures() == {"checkpoint/upload_failed": 2, "checkpoint/uploaded_step": 1}
    assert "PermissionError: Forbidden" in caplog.text
    state = read_upload_state(tmp_path / "a" / "checkpoints")
    assert state is not None
    assert (state.step, state.num_failed, state.error) == (1, 2, "")


def test_upload_that_keeps_failing_ends_with_its_reason_and_the_next_one_tries_all(
    tmp_path: Path, url: str
):
    is_away = True

    def fail(_path: str) -> None:
        if is_away:
            raise TimeoutError("away")

    does(fail)
    work = uploader(tmp_path, url)
    infos = save(tmp_path, 1)
    work.offer(infos, None)
    folder = tmp_path / "a" / "checkpoints"
    until(lambda: (state := read_upload_state(folder)) is not None and state.num_failed == 3)
    assert there(url) == []
    is_away = False
    work.offer(infos | save(tmp_path, 2), None)
    work.close()
    assert there(url) == ["v1.1", "v1.2"]


def test_checkpoint_that_is_removed_while_it_is_uploaded_is_uploaded_whole(
    tmp_path: Path, url: str
):
    infos = save(tmp_path, 1)
    ((path, info),) = infos.items()

    def remove(_path: str) -> None:
        for file in path.glob("*"):
            file.unlink()

    does(remove)
    work = uploader(tmp_path, url)
    work.offer(infos, None)
    work.close()
    (manifest,) = RemoteCheckpoints(url).known()
    fetched = RemoteCheckpoints(url).fetch(manifest, tmp_path / "b" / "checkpoints")
    assert (fetched / "__0_0.distcp").read_bytes() == b"tensors of v1.1"
    assert manifest.info == info
    assert [one.name for one in path.parent.iterdir() if one.is_dir()] == [path.name]


def test_a_ledger_that_is_being_written_is_no_part_of_the_checkpoint(tmp_path: Path, url: str):
    ((path, info),) = save(tmp_path, 1).items()
    (path / ".ledger.bin.unfinished").write_bytes(b"half")
    assert damage_of(path) == ""
    work = uploader(tmp_path, url)
    work.offer({path: info}, None)
    work.close()
    (manifest,) = RemoteCheckpoints(url).known()
    assert ".ledger.bin.unfinished" not in {one.name for one in manifest.objects}
    fetched = RemoteCheckpoints(url).fetch(manifest, tmp_path / "b" / "checkpoints")
    assert damage_of(fetched) == ""


def test_place_of_another_run_is_left_alone(tmp_path: Path, url: str):
    first = uploader(tmp_path / "first", url)
    first.offer(save(tmp_path / "first", 1), None)
    first.close()
    other = uploader(tmp_path, url, run_id="2e")
    other.offer(save(tmp_path, 5), None)
    other.close()
    assert there(url) == ["v1.1"]
    state = read_upload_state(tmp_path / "a" / "checkpoints")
    assert state is not None
    assert "holds checkpoints of another run" in state.error


def test_manifest_that_names_files_elsewhere_is_refused(tmp_path: Path):
    info = next(iter(save(tmp_path, 1).values()))
    for name in ("../evil", "a/b", "..", "", "checkpoint.json", "/etc/passwd"):
        with pytest.raises(ValueError, match="no file of a checkpoint"):
            Manifest(info=info, objects=(RemoteObject(name=name, size=1, sha256=""),))


def test_url_with_a_secret_is_refused_at_the_start(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"checkpoint\.upload = s3://\.\.\. must not hold"):
        uploader(tmp_path, "s3://key:secret@bucket/runs")
