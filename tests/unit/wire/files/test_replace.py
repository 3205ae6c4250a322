"""Files and folders that appear whole or not at all."""

import stat
from pathlib import Path

import pytest

from slipstream.wire.files.replace import replace_file, replacing_file, replacing_folder


@pytest.mark.parametrize("durable", [True, False])
def test_file_is_replaced_with_its_mode_and_nothing_is_left_beside_it(
    tmp_path: Path, durable: bool
):
    path = tmp_path / "key"
    path.write_text("old")
    (tmp_path / ".key.unfinished").write_text("of a writer that was killed")
    replace_file(path, b"new", durable=durable, mode=0o600)
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["key"]


def test_file_stays_as_it_was_if_writing_fails(tmp_path: Path):
    path = tmp_path / "rows"
    path.write_text("old")

    def fail() -> None:
        with replacing_file(path) as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["rows"]


@pytest.mark.parametrize("durable", [True, False])
def test_folder_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path, durable: bool):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "old").touch()
    for left in (".model.unfinished", ".model.replaced"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "half").touch()
    with replacing_folder(folder, durable=durable) as unfinished:
        (unfinished / "part").mkdir()
        (unfinished / "part" / "new").write_text("1")
        assert (folder / "old").exists()
    assert sorted(str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*")) == [
        "model",
        "model/part",
        "model/part/new",
    ]


def test_folder_stays_as_it_was_if_writing_fails(tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "old").touch()

    def fail() -> None:
        with replacing_folder(folder) as unfinished:
            (unfinished / "half").touch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["model", "old"]
