"""Traces of learner steps: what a setting adds to the file."""

import json
from pathlib import Path

import pytest
import torch

from slipstream.learner.config import ProfileSection
from slipstream.learner.record.profiling import StepProfiler


def traced(folder: Path, **settings: bool) -> str:
    """Return the trace of a step, as text."""
    profiler = StepProfiler(ProfileSection(steps=(2, 2), **settings), folder, rank=0)
    for step in (1, 2, 3):
        profiler.before(step)
        torch.ones(3, 5) @ torch.ones(5, 7)
        profiler.after(step)
    text = (folder / "rank-0.json").read_text()
    assert sum(one.get("name") == "aten::mm" for one in json.loads(text)["traceEvents"]) == 1
    return text


@pytest.mark.parametrize(
    ("setting", "written"),
    [
        ("record_shapes", "[[3, 5], [5, 7]"),
        ("with_stack", "test_profiling.py"),
        ("profile_memory", '"[memory]"'),
    ],
)
def test_a_trace_has_what_its_settings_ask_for(tmp_path: Path, setting: str, written: str):
    assert written in traced(tmp_path / "with", **{setting: True})
    assert written not in traced(tmp_path / "without")
