"""The policy's own path: alignment, temperatures, barred ends, and one step on several ranks."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.ranks import outputs, reports, start_ranks
from tests.integration.tiny_models import write_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_step_on_two_ranks_is_the_step_of_one(tmp_path: Path, family: str):
    model = write_tiny_model(tmp_path / "model", family)
    works = {"one": (1, 1), "dp2": (2, 1), "tp2": (2, 2)}
    processes = [
        process
        for name, (world_size, tensor_parallel) in works.items()
        for process in start_ranks(
            "policy_rank", model, tmp_path / name, world_size, tensor_parallel
        )
    ]
    outputs(processes)
    (alone,) = reports(tmp_path / "one", 1)
    assert alone["logprobs"] == pytest.approx(alone["plain"], abs=3e-5)
    assert min(alone["plain"]) < -1.0, "nothing was compared"
    weights = load_file(tmp_path / "one" / "trained" / "model.safetensors")
    before = load_file(model / "model.safetensors")
    assert any((weights[name] - before[name]).abs().max() > 1e-3 for name in before)

    for name in ("dp2", "tp2"):
        for report in reports(tmp_path / name, 2):
            assert report["figures"] == pytest.approx(alone["figures"], rel=2e-4, abs=2e-6)
            assert report["logprobs"] == pytest.approx(alone["logprobs"], abs=3e-5)
        trained = load_file(tmp_path / name / "trained" / "model.safetensors")
        for tensor, value in weights.items():
            if "k_proj.bias" not in tensor:  # its true gradient is 0: softmax does not see it
                assert (trained[tensor] - value).abs().max() < 2e-5, (name, tensor)
    uneven = [report["num_microbatches"] for report in reports(tmp_path / "dp2", 2)]
    assert sum(map(sum, uneven)) > 4, "several microbatches were wanted"
