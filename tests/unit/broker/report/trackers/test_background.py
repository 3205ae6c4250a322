import threading
from collections.abc import Mapping

from slipstream.broker.report.trackers.background import BackgroundTrackers
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
