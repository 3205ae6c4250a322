import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.nursery import nursery
from tests.support.waiting import until

# Python's own, which a process that shares memory keeps to its end.
_KEPT = "multiprocessing.resource_tracker"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder with a path short enough for Unix sockets, wherever pytest has its own."""
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture(scope="module", autouse=True)
def _no_process_of_a_file_is_left() -> Iterator[None]:
    """Name what a file has left to the next one of this worker, which may count processes."""
    before = set(psutil.Process().children(recursive=True))
    yield
    until(lambda: not left_since(before), lambda: f"processes are left: {left_since(before)}")


def left_since(before: set[psutil.Process]) -> list[str]:
    """Return the command lines of living processes of this one that were not there before."""
    left = []
    for one in set(psutil.Process().children(recursive=True)) - before:
        with suppress(psutil.NoSuchProcess):
            words = " ".join(one.cmdline())
            is_nursery = nursery.cache_info().currsize and one.pid == nursery()[1].pid
            if not is_nursery and _KEPT not in words:
                left.append(f"{one.pid} {one.name()}: {words}")
    return left
