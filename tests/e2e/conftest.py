from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.hosts import Host, two_hosts
from tests.support.tiny_run import TinyRun
from tests.support.waiting import HANG_S


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Return the folder in which runs are started; paths of users are like that."""
    folder = tmp_path / "a b/ü"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path) as both:
        yield both


@pytest.fixture
def start_run(inputs: Path) -> Iterator[Callable[..., TinyRun]]:
    runs: list[TinyRun] = []

    def start(before: Callable[[Path], None] = lambda _folder: None, **settings: object) -> TinyRun:
        named = {key.replace("__", "."): v for key, v in settings.items()}
        run = TinyRun(inputs, named, before=before)
        runs.append(run)
        return run

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.terminate()
            run.process.wait(HANG_S)
