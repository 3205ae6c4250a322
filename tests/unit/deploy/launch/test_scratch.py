"""Folders for temporary files, and who removes them."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from slipstream.deploy.launch.scratch import own_folder, remove_folders_of_the_dead


def test_the_folder_of_a_killed_process_is_removed_and_that_of_a_living_one_is_not(tmp_path: Path):
    child = os.fork()
    if child == 0:
        (tmp_path / "killed").write_text(str(own_folder()))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    killed, living = Path((tmp_path / "killed").read_text()), own_folder()
    assert killed.is_dir()
    try:
        remove_folders_of_the_dead()
        assert not killed.exists()
        assert living.is_dir()
    finally:
        shutil.rmtree(living)


def test_a_folder_whose_owner_cannot_be_seen_is_left_while_it_is_locked(tmp_path: Path):
    """As that of a container with process ids of its own, and of a release that locked none."""
    living = own_folder()
    (earlier := living.parent / f"slipstream-{tmp_path.name}").mkdir()
    (earlier / "owner").write_text("role host 4194304 1.0")
    try:
        remove_folders_of_the_dead()
        assert living.is_dir()
        assert earlier.is_dir()
    finally:
        shutil.rmtree(living)
        shutil.rmtree(earlier)


def test_a_folder_of_another_boot_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its process may live on another host, whose locks are not seen here."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / "slipstream-there"
    folder.mkdir()
    (folder / "owner").write_text("locked while it is used, on boot 5ca1ab1e")
    remove_folders_of_the_dead()
    assert folder.is_dir()
