import os
import sys
from pathlib import Path

import pytest

from slipstream.wire.process.bytecode import is_private, write_bytecode
from slipstream.wire.process.environment import handed_on


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch):
    """The interpreter's own switches as they were, afterwards."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)


def inherited(name: str) -> str | None:
    """Return a variable of this process's children."""
    return os.environ.get(name)  # noqa: TID251 children inherit it


def library_in(folder: Path, monkeypatch: pytest.MonkeyPatch, *, is_writable: bool) -> None:
    """Let a library lie in a folder, without bytecode."""
    package = folder / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    access = os.access
    may = {package: is_writable}
    monkeypatch.setattr(os, "access", lambda path, mode: may.get(Path(path), access(path, mode)))
    monkeypatch.setattr("tempfile.tempdir", str(folder))


def test_variable_that_forbids_bytecode_ends_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    library_in(tmp_path, monkeypatch, is_writable=True)
    write_bytecode()
    assert not sys.dont_write_bytecode
    assert inherited("PYTHONDONTWRITEBYTECODE") is None
    assert sys.pycache_prefix is None
    assert inherited("PYTHONPYCACHEPREFIX") is None


def test_libraries_that_cannot_be_written_to_have_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    library_in(tmp_path, monkeypatch, is_writable=False)
    write_bytecode()
    folder = tmp_path / f"slipstream-bytecode-{os.getuid()}"
    assert sys.pycache_prefix == inherited("PYTHONPYCACHEPREFIX") == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    variables = handed_on(os.environ)  # noqa: TID251 as to a reward's process, or an environment's
    assert variables["PYTHONPYCACHEPREFIX"] == str(folder)
    assert "PYTHONDONTWRITEBYTECODE" not in variables


def test_folder_that_a_user_chose_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    library_in(tmp_path, monkeypatch, is_writable=False)
    monkeypatch.setattr(sys, "pycache_prefix", "/chosen")
    write_bytecode()
    assert sys.pycache_prefix == "/chosen"
    assert inherited("PYTHONPYCACHEPREFIX") is None


@pytest.mark.parametrize("made", ["writable by others", "a link", "a file"])
def test_folder_that_somebody_else_could_have_filled_is_not_used(tmp_path: Path, made: str):
    folder = tmp_path / "bytecode"
    match made:
        case "writable by others":
            folder.mkdir()
            folder.chmod(0o777)
        case "a link":
            (tmp_path / "theirs").mkdir(mode=0o700)
            folder.symlink_to(tmp_path / "theirs")
        case _:
            folder.touch(mode=0o700)
    assert not is_private(folder)
