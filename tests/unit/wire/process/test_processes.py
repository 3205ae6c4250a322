"""Limits that a process sets itself. Each is tried in a process of its own."""

import resource
import subprocess
import sys

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
