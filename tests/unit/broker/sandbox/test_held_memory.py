import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from slipstream.broker.sandbox.held_memory import held_bytes

MIB = 1 << 20
OPEN = f"import mmap, os, sys\nfd = os.memfd_create('x')\nos.write(fd, bytes(8 * {MIB}))\n"
TWICE = "other = os.dup(fd)\n"
MAP = f"it = mmap.mmap(fd, 8 * {MIB})\nsum(it[::4096])\n"
REMOVED = f"""import os, sys, tempfile
file = tempfile.TemporaryFile(dir='/dev/shm')
file.write(bytes(8 * {MIB}))
file.flush()
"""


@contextmanager
def process(code: str) -> Iterator[int]:
    command = [sys.executable, "-I", "-S", "-c", f"{code}print(flush=True)\nsys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()
        yield started.pid
        started.communicate()


@pytest.mark.parametrize(
    ("code", "expected"),
    [("import sys\n", 0), (OPEN, 8), (OPEN + TWICE, 8), (REMOVED, 8), (OPEN + MAP, 0)],
)
def test_files_in_memory_count_where_no_process_has_them_mapped(code: str, expected: int):
    with process(code) as pid:
        assert held_bytes([pid]) == expected * MIB


def test_a_process_that_has_ended_holds_nothing():
    with process(OPEN) as pid:
        pass
    assert held_bytes([pid]) == 0
