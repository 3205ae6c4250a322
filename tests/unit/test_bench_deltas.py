"""What the benchmark of deltas computes without running anything."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.bench_deltas import measured
from benchmarks.weightbus.real_run import tensors_in


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
