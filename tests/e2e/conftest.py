from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.tiny_run import TinyRun
from tests.waiting import HANG_S


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Callable[..., TinyRun]]:
    runs: list[TinyRun] = []
    folder = tmp_path / "a b/ü"  # paths of users are like that
    folder.mkdir(parents=True)

    def start(**settings: object) -> TinyRun:
        run = TinyRun(folder, {key.replace("__", "."): v for key, v in settings.items()})
        runs.append(run)
        return run

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.terminate()
            run.process.wait(HANG_S)
