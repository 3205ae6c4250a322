from pathlib import Path

import pytest
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from slipstream.broker.report.trackers.tensorboard import TensorBoardTracker


def curve(folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    return [(e.step, float(e.tensor_proto.float_val[0])) for e in events.Tensors(name)]


def test_usual_scripts_find_the_points_as_scalars(tmp_path: Path):
    tracker = TensorBoardTracker(tmp_path)
    tracker.log(3, {"reward/mean": 0.5})
    tracker.close()
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(3, 0.5)]


def test_a_resumed_run_hides_the_points_of_the_life_that_was_abandoned(tmp_path: Path):
    first = TensorBoardTracker(tmp_path)
    for step in range(5):
        first.log(step, {"reward/mean": 0.0})
    first.close()
    (file,) = tmp_path.iterdir()
    file.rename(tmp_path / "events.out.tfevents.1")  # lives begin in different seconds
    second = TensorBoardTracker(tmp_path, resumed_at=2)
    second.log(3, {"reward/mean": 1.0})
    second.close()
    assert curve(tmp_path, "reward/mean") == [(0, 0.0), (1, 0.0), (2, 0.0), (3, 1.0)]


def test_an_evaluation_that_ends_late_hides_no_step(tmp_path: Path):
    tracker = TensorBoardTracker(tmp_path)
    for step in (1, 2, 3):
        tracker.log(step, {"reward/mean": step / 10})
    tracker.log(1, {"eval/mean@1": 0.5})
    tracker.log(2, {"reward/mean": 1.0})  # the learner went back to step 1
    tracker.log(1, {"eval/mean@1": 0.75})
    tracker.close()
    assert curve(tmp_path, "reward/mean") == [(1, pytest.approx(0.1)), (2, 1.0)]
    assert curve(tmp_path, "eval/mean@1") == [(1, 0.5)]
