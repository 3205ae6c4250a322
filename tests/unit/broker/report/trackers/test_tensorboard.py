from pathlib import Path

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
    second = TensorBoardTracker(tmp_path, resumed_at=2)
    second.log(3, {"reward/mean": 1.0})
    second.close()
    assert curve(tmp_path, "reward/mean") == [(0, 0.0), (1, 0.0), (2, 0.0), (3, 1.0)]
