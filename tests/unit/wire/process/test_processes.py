"""Limits that a process sets itself, and folders that it keeps; each in a process of its own."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from slipstream.wire.process.processes import keep_folder, remove_abandoned
from tests.support.waiting import until

TRIED = """
import resource, sys
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.processes import raise_descriptor_limit
hard = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
try:
    print(raise_descriptor_limit(256), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except ConfigError as error:
    print(error)
"""


def tried(hard: int) -> str:
    done = subprocess.run(
        [sys.executable, "-c", TRIED, str(hard)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_soft_limit_of_open_files_becomes_the_hard_one():
    hard = min(1_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    assert tried(hard) == f"{hard} {hard}"


def test_too_few_open_files_are_refused_with_what_to_change():
    assert "the limit of open files is 100" in tried(100)
    assert "at least 256 are needed (ulimit -Hn" in tried(100)


def test_a_folder_is_kept_until_its_process_ends_whatever_program_it_becomes(tmp_path: Path):
    kept, left = tmp_path / "kept", tmp_path / "left"
    kept.mkdir()
    left.mkdir()
    child = os.fork()
    if child == 0:
        keep_folder(kept)
        os.execv("/bin/sh", ["sh", "-c", f"touch '{kept}/locked'; exec sleep 1000"])  # noqa: S606 ours
    try:
        until((kept / "locked").exists)
        for folder in (kept, left):
            remove_abandoned(folder, shutil.rmtree)
        assert (kept.exists(), left.exists()) == (True, False)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    remove_abandoned(kept, shutil.rmtree)
    assert not kept.exists()
