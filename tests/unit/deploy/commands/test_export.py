import os
import shutil
from pathlib import Path

import pytest

from slipstream.deploy.commands.export import checkpoint_of, held_checkpoint, let_go, out_folder
from slipstream.wire.errors import ConfigError
from tests.support.checkpoint_infos import write_checkpoint


def test_run_means_its_newest_checkpoint_and_no_name_the_newest_run(tmp_path: Path):
    old, new = write_checkpoint(tmp_path / "a", 1, 40), write_checkpoint(tmp_path / "b", 1, 7)
    os.utime(old / "checkpoint.json", (1, 1))
    write_checkpoint(tmp_path / "a", 1, 20)
    os.utime(tmp_path / "a" / "checkpoints" / "step-000020" / "checkpoint.json", (1, 1))
    assert checkpoint_of(tmp_path / "a", best=False) == old
    assert checkpoint_of(new, best=False) == new
    assert checkpoint_of(None, best=False, runs=tmp_path) == new


def test_what_is_exported_outlives_the_checkpoint_that_a_live_run_removes(tmp_path: Path):
    run = tmp_path / "a b"
    checkpoint = write_checkpoint(run, 1, 40)
    (checkpoint / "weights").write_bytes(b"w" * 9)
    left = run / ".export-999999999"
    left.mkdir()
    held, of = held_checkpoint(run, best=False)
    assert of == checkpoint
    assert not left.exists(), "of an export that was killed"
    beside, _ = held_checkpoint(run, best=False)
    assert held.is_dir(), "that of another process, whose id nobody here may see, is locked"
    let_go(beside, of)
    shutil.rmtree(checkpoint)
    assert (held / "weights").read_bytes() == b"w" * 9
    let_go(held, of)
    assert not list(run.glob(".export-*"))


def test_a_checkpoint_that_goes_while_it_is_linked_makes_room_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    newest, older = write_checkpoint(tmp_path, 1, 40), write_checkpoint(tmp_path, 1, 20)
    link = os.link

    def removed_meanwhile(source: str, target: str) -> None:
        if newest.exists() and source.startswith(str(newest)):
            shutil.rmtree(newest)
        link(source, target)

    monkeypatch.setattr(os, "link", removed_meanwhile)
    assert held_checkpoint(tmp_path, best=False)[1] == older


def test_a_checkpoint_that_is_named_is_read_where_it_is(tmp_path: Path):
    checkpoint = write_checkpoint(tmp_path / "a", 1, 40)
    assert held_checkpoint(checkpoint, best=False) == (checkpoint, checkpoint)


def test_what_names_no_checkpoint_is_refused(tmp_path: Path):
    run = tmp_path / "a"
    checkpoint = write_checkpoint(run, 1, 40)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    for target, best, message in (
        (tmp_path, False, "neither a run with checkpoints nor a checkpoint"),
        (tmp_path / "empty", False, "has no complete checkpoint"),
        (run, True, "has no evaluated checkpoint"),
        (checkpoint, True, "--best chooses among those of a run"),
    ):
        with pytest.raises(ConfigError, match=message):
            checkpoint_of(target, best=best)
    with pytest.raises(ConfigError, match=r"no run in .* has a checkpoint\.json"):
        checkpoint_of(None, best=False, runs=tmp_path / "none")


def test_the_folder_to_write_is_the_runs_or_one_that_holds_nothing(tmp_path: Path):
    checkpoint = write_checkpoint(tmp_path / "a", 1, 40)
    assert out_folder(checkpoint, None) == tmp_path / "a" / "model"
    assert out_folder(checkpoint, tmp_path / "new") == tmp_path / "new"
    with pytest.raises(ConfigError, match="exists already"):
        out_folder(checkpoint, tmp_path)
    with pytest.raises(ConfigError, match="is not in a run folder"):
        out_folder(tmp_path, None)


@pytest.mark.parametrize("out", ["/proc/x", "/proc/x/y"])
def test_a_folder_that_cannot_be_made_is_refused_by_its_option(tmp_path: Path, out: str):
    checkpoint = write_checkpoint(tmp_path / "a", 1, 40)
    with pytest.raises(ConfigError, match=rf"{out} cannot be written: .* \(--out\)"):
        out_folder(checkpoint, Path(out))
    assert out_folder(checkpoint, tmp_path / "new" / "model") == tmp_path / "new" / "model"
    assert list((tmp_path / "new").iterdir()) == []
