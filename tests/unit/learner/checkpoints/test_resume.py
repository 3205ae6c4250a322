from collections.abc import Iterable
from pathlib import Path

import pytest

from slipstream.learner.checkpoints.resume import fetch_newer, resume_order
from slipstream.wire.files.checkpoints import (
    INFO_FILE,
    CheckpointInfo,
    checkpoint_name,
    readable_checkpoints,
)
from slipstream.wire.files.remote_checkpoints import RemoteCheckpoints
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.checkpoint_infos import checkpoint_info, saved_checkpoint
from tests.support.learner_settings import learner_settings_of


def info(epoch: int, step: int) -> CheckpointInfo:
    return checkpoint_info(PolicyVersion(epoch, step))


def order(
    versions: Iterable[tuple[int, int]], named: int | None = None, begun_after: int | None = None
) -> list[int]:
    """Return the steps to try, of checkpoints of these versions."""
    infos = {Path(checkpoint_name(step)): info(epoch, step) for epoch, step in versions}
    path = Path(checkpoint_name(named)) if named is not None else None
    return [infos[found].step for found in resume_order(infos, path, begun_after=begun_after)]


def test_the_newest_comes_first_and_what_a_run_went_back_behind_never():
    for versions, steps in [
        ([], []),
        ([(1, 2), (1, 6), (1, 4)], [6, 4, 2]),
        ([(1, 9), (1, 10), (2, 12)], [12, 10, 9]),
        ([(1, 4), (1, 6), (2, 2)], [2]),  # the run went back to 2
        ([(1, 2), (1, 6), (2, 3), (2, 5)], [5, 3, 2]),
        ([(1, 2), (2, 8), (3, 4), (3, 6)], [6, 4, 2]),
    ]:
        assert order(versions) == steps


def test_what_the_run_began_with_has_abandoned_later_steps_of_its_own_epoch():
    assert order([(1, 2), (1, 4), (1, 6)], named=4) == [4, 2]
    assert order([(1, 2), (1, 4), (1, 6), (2, 5)], named=4) == [5, 4, 2]
    assert order([(1, 4), (2, 8)], named=4) == [8, 4]


def test_what_the_run_saved_since_is_not_abandoned_by_what_it_began_with():
    went_back = [(1, 2), (2, 4), (1, 6)]  # it saves at once over what it began with
    assert order(went_back, named=4, begun_after=1) == [4, 2]
    assert order([*went_back[:2], (2, 6)], named=4, begun_after=1) == [6, 4, 2]
    assert order([*went_back[:2], (2, 6), (3, 8)], named=4, begun_after=1) == [8, 6, 4, 2]


def test_what_the_run_began_with_has_abandoned_newer_epochs_that_were_there_by_then():
    assert order([(1, 4), (2, 6), (2, 8)], named=4, begun_after=2) == [4]
    assert order([(1, 4), (2, 6), (3, 8)], named=4, begun_after=2) == [8, 4]
    assert order([(2, 4), (2, 6)], named=4, begun_after=2) == [4], "named once more"


def test_a_checkpoint_to_begin_with_that_is_no_longer_there_changes_nothing():
    assert order([(2, 8), (2, 9)], named=4) == [9, 8]


def test_what_cannot_be_read_is_logged_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    for number, content in ((2, None), (4, b"{"), (6, b"")):
        folder = tmp_path / checkpoint_name(number)
        folder.mkdir()
        if content is not None:
            (folder / INFO_FILE).write_bytes(content)
    assert readable_checkpoints(tmp_path) == {}
    for number in (2, 4, 6):
        assert f"{tmp_path / checkpoint_name(number)} is passed over: " in caplog.text
    assert readable_checkpoints(tmp_path / "none") == {}


@pytest.mark.parametrize(("remote", "found"), [((1, 6), [4, 6]), ((1, 2), [4])])
def test_newer_remote_checkpoint_is_fetched_beside_the_others(
    tmp_path: Path, remote: tuple[int, int], found: list[int]
):
    url = f"file://{tmp_path}/bucket"
    path, of_it = saved_checkpoint(tmp_path / "lost", PolicyVersion(*remote))
    RemoteCheckpoints(url).upload(path, of_it, None)
    saved_checkpoint(tmp_path / "a", PolicyVersion(1, 4))
    settings = learner_settings_of(tmp_path, url)
    fetch_newer(settings)
    here = readable_checkpoints(settings.run.checkpoints)
    assert sorted(info.step for info in here.values()) == found


def test_storage_that_fails_leaves_the_learner_its_own_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "bucket").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    fetch_newer(learner_settings_of(tmp_path, f"file://{tmp_path}/bucket"))
    assert "no newer checkpoint is fetched" in caplog.text
    fetch_newer(learner_settings_of(tmp_path, ""))
