"""Python that a user names in a setting."""

import sys
from pathlib import Path

import pytest

from slipstream.wire.files.source_files import module_named


@pytest.fixture(autouse=True)
def _imports_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def write(path: Path, value: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"VALUE = {value}\n")
    return path


@pytest.mark.parametrize("name", ["this", "antigravity"])  # never imported here
def test_a_file_named_as_a_library_does_not_take_its_place(tmp_path: Path, name: str):
    sys.modules.pop(name, None)
    path = write(tmp_path / f"{name}.py", 1)
    module = module_named(str(path))
    assert module.VALUE == 1
    assert module_named(str(path)) is module
    assert name not in sys.modules


@pytest.mark.parametrize("name", ["my part", "my-part", "my.part", "class", "1st", "__main__"])
def test_any_name_will_do(tmp_path: Path, name: str):
    path = write(tmp_path / "a folder" / f"{name}.py", 2)
    module = module_named(str(path))
    assert module.VALUE == 2
    assert module_named(str(path)) is module


def test_files_of_one_name_are_two_modules(tmp_path: Path):
    paths = [write(tmp_path / folder / "part.py", i) for i, folder in enumerate("ab")]
    assert [module_named(str(path)).VALUE for path in paths] == [0, 1]


def test_what_a_link_leads_to_needs_no_name_of_python(tmp_path: Path):
    blob = write(tmp_path / "blobs" / "0815", 3)
    link, other = tmp_path / "snapshot" / "part.py", tmp_path / "neighbor" / "link.py"
    for one, to in ((link, blob), (other, write(tmp_path / "lib" / "whole.py", 4))):
        one.parent.mkdir()
        one.symlink_to(to)
    write(link.with_name("neighbor_of_link.py"), 5)
    assert module_named(str(link)).VALUE == 3
    assert module_named("neighbor_of_link").VALUE == 5
    assert module_named(str(other)) is module_named(str(tmp_path / "lib" / "whole.py"))
    (tmp_path / "to_nothing.py").symlink_to("gone")
    with pytest.raises(FileNotFoundError, match=r"No such file: .*to_nothing.py"):
        module_named(str(tmp_path / "to_nothing.py"))
