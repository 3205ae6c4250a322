from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slipstream.broker.report.trackers.loading import load_trackers
from slipstream.broker.report.trackers.verl_names import verl_figures
from slipstream.wire.settings.sections import LoggingSection, RunSection

FIGURES = {
    "time/phase/wait": 1.0,
    "time/phase/proximal": 2.0,
    "time/phase/train": 4.0,
    "time/phase/export": 0.5,
    "time/phase/fetch": 0.5,
    "throughput/tokens_per_s": 100.0,
    "throughput/mfu": 0.4,
    "policy/loss": 0.1,
}


def test_times_and_rates_have_verl_s_names():
    assert verl_figures(FIGURES) == {
        "timing_s/old_log_prob": 2.0,
        "timing_s/update_actor": 4.0,
        "timing_s/update_weights": 0.5,
        "timing_s/step": 8.0,
        "perf/time_per_step": 8.0,
        "perf/total_num_tokens": 800.0,
        "perf/mfu/actor": 0.4,
    }
    assert verl_figures({"eval/pass@1": 0.5}) == {}


@pytest.mark.parametrize("wanted", [False, True])
def test_they_are_logged_where_they_are_asked_for(tmp_path: Path, wanted: bool):
    run = RunSection(model="m", dir=str(tmp_path), name="a")
    tracker = load_trackers(LoggingSection(verl_names=wanted), run, {})
    tracker.log(1, FIGURES)
    tracker.close()
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    names = set(events.Tags()["scalars"])
    assert names >= FIGURES.keys()
    assert ("timing_s/step" in names) is wanted
    if wanted:
        assert events.Scalars("timing_s/step")[0].value == 8.0


def test_the_document_has_every_name():
    text = (Path(__file__).parents[5] / "docs" / "coming_from_verl.md").read_text("utf-8")
    every = {f"time/phase/{name}": 1.0 for name in ("proximal", "train", "critic", "checkpoint")}
    for name in verl_figures(FIGURES | every):
        assert f"`{name}`" in text, name
