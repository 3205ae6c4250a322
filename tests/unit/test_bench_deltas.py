"""What the benchmark of deltas computes without running anything."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.bench_deltas import measured, steps_per_s
from benchmarks.weightbus.real_run import pairs, tensors_in, versions_of


def test_bytes_and_changes_are_shares_of_a_version(tmp_path: Path):
    tensors = {
        "a": torch.arange(40_000).to(torch.bfloat16),
        "b": torch.ones(4, dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "before.safetensors")
    tensors["a"][::100] += 1000.0
    save_file(tensors, tmp_path / "after.safetensors")
    share, changed, seconds = measured(
        tmp_path / "before.safetensors", tmp_path / "after.safetensors"
    )
    assert 0 < share < 0.02
    assert changed == pytest.approx(400 / 40_004)
    assert seconds >= 0
    places, data = tensors_in(tmp_path / "after.safetensors")
    assert sorted(name for name, _, _ in places) == ["a", "b"]
    (start, end) = next((a, b) for name, a, b in places if name == "b")
    assert np.frombuffer(data[start:end], np.uint16).tolist() == [0x3F80] * 4


def test_versions_are_compared_with_the_step_before_if_it_is_there(tmp_path: Path):
    (tmp_path / "versions").mkdir()
    for step in (9, 10, 12, 13):
        (tmp_path / "versions" / f"v1.{step}-1.safetensors").touch()
    assert list(versions_of(tmp_path)) == [9, 10, 12, 13]
    assert [step for step, _, _ in pairs(tmp_path)] == [10, 13]


def test_the_rate_leaves_the_first_steps_out_and_passes_midnight():
    log = "".join(
        f"{when} I learner step {step} reward 0.5 in 1.00 s\n"
        for step, when in (
            (1, "2026-03-01T23:58:00.000+01:00"),
            (10, "2026-03-01T23:59:50.000+01:00"),
            (30, "2026-03-02T00:00:30.000+01:00"),
        )
    )
    assert steps_per_s(log) == pytest.approx(20 / 40)
