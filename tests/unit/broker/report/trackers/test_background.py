import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from slipstream.broker.report.trackers.background import BackgroundTrackers
from slipstream.broker.report.trackers.loading import IDS_FILE, LOGGED_FILE, load_trackers
from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.sections import LoggingSection, RunSection
from tests.support.waiting import HANG_S


class Recording:
    def __init__(self, failures: int = 0) -> None:
        self.steps: list[int] = []
        self.figures: list[Mapping[str, float]] = []
        self.failures = failures
        self.closed = False

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no network")
        self.steps.append(step)
        self.figures.append(figures)

    def close(self) -> None:
        self.closed = True


class Stuck(Recording):
    def __init__(self) -> None:
        super().__init__()
        self.proceed = threading.Event()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self.proceed.wait(HANG_S)
        super().log(step, figures)


@pytest.mark.parametrize(
    "text", [b"", b'{"wandb": ', bytes(9), b"\xef\xbb\xbf{}", b'"\xff"', b"[]"]
)
@pytest.mark.parametrize("name", [IDS_FILE, LOGGED_FILE])
def test_a_file_of_earlier_lives_that_holds_something_else_is_named(
    tmp_path: Path, name: str, text: bytes
):
    run = RunSection(name="r", model="m", dir=str(tmp_path))
    run.folder.mkdir()
    (run.folder / name).write_bytes(text)
    with pytest.raises(ConfigError, match=rf"cannot read .*{name}: .*; put it back, or remove it"):
        load_trackers(LoggingSection(), run, {})


@pytest.mark.parametrize("text", ['{"step": -2}', '{"step": 1e30}', '{"evaluated": [-1]}'])
def test_a_step_that_is_none_is_not_taken_for_the_newest(tmp_path: Path, text: str):
    (tmp_path / LOGGED_FILE).write_text(text)
    with pytest.raises(ConfigError, match=LOGGED_FILE):
        load_trackers(
            LoggingSection(), RunSection(name=tmp_path.name, dir=str(tmp_path.parent)), {}
        )


def test_every_tracker_gets_every_point_in_order_and_is_closed():
    first, second = Recording(), Recording()
    trackers = BackgroundTrackers([first, second])
    for step in range(5):
        trackers.log(step, {"loss": 0.0})
    trackers.close()
    assert first.steps == second.steps == [0, 1, 2, 3, 4]
    assert first.closed
    assert second.closed


def test_failing_tracker_is_counted_and_delays_no_other():
    failing, other = Recording(failures=2), Recording()
    trackers = BackgroundTrackers([failing, other])
    for step in range(4):
        trackers.log(step, {})
    trackers.close()
    assert trackers.lost == {"Recording": 2}
    assert failing.steps == [2, 3]
    assert other.steps == [0, 1, 2, 3]


def test_stuck_tracker_does_not_block_logging():
    stuck = Stuck()
    trackers = BackgroundTrackers([stuck])
    for step in range(100):
        trackers.log(step, {})
    assert stuck.steps == []
    stuck.proceed.set()
    trackers.close()
    assert len(stuck.steps) == 100
