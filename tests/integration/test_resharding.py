"""A checkpoint of any layout continues in any other: weights, optimizer, schedule and critic."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.ranks.run import outputs, start_ranks
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.integration
PROGRAM = "support.ranks.reshard"
DENSE: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2-pp2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
}
MORE_DENSE: dict[str, tuple[int, dict[str, Any]]] = {
    "one-offload": (1, {"offload": ["weights", "gradients", "optimizer"]}),
    "narrow": (1, {"moments_dtype": "bfloat16"}),
    "tp2": (2, {"tensor_parallel": 2}),
    "cp2": (2, {"context_parallel": 2}),
    "pp2-chunks2": (2, {"pipeline_parallel": 2, "interleaved_chunks": 2}),
    "pp2-uneven": (2, {"pipeline_parallel": 2, "layers_per_stage": [3, 1]}),
    "pp4": (4, {"pipeline_parallel": 4}),
    "dp2-offload": (2, {"offload": ["weights", "gradients", "optimizer"]}),
    "pp2-cp2": (4, {"pipeline_parallel": 2, "context_parallel": 2}),
    "dp4": (4, {}),
    "tp2-dp2": (4, {"tensor_parallel": 2}),
}
EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ep2": (2, {"expert_parallel": 2}),
    "pp2-ep2": (4, {"pipeline_parallel": 2, "expert_parallel": 2}),
    "tp2-etp2": (2, {"tensor_parallel": 2, "expert_tensor_parallel": 2}),
    "tp2-ep2": (2, {"tensor_parallel": 2, "expert_parallel": 2}),
    "cp2-ep2": (2, {"context_parallel": 2, "expert_parallel": 2}),
    "tp2-ep2-dp2": (4, {"tensor_parallel": 2, "expert_parallel": 2}),
}


BFLOAT16: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"dtype": "bfloat16"}),
    "dp2-hybrid": (2, {"optimizer_offload_fraction": 0.5, "dtype": "bfloat16"}),
    "dp2-narrow": (2, {"moments_dtype": "bfloat16", "dtype": "bfloat16"}),
}


@pytest.mark.parametrize(
    ("family", "layers", "layouts"),
    [
        pytest.param("qwen3", 4, DENSE, id="dense"),
        # Weights in float32 on the host or on the device.
        pytest.param("qwen3", 2, BFLOAT16, id="bfloat16", marks=pytest.mark.slow),
        # The same, over every pair of more layouts and with experts.
        pytest.param("qwen3", 4, DENSE | MORE_DENSE, id="more", marks=pytest.mark.slow),
        pytest.param("qwen2", 4, DENSE | MORE_DENSE, id="tied", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 2, EXPERTS, id="experts", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_any_layout_continues_in_any_other(
    tmp_path: Path, family: str, layers: int, layouts: dict[str, tuple[int, dict[str, Any]]]
):
    model = write_tiny_model(tmp_path / "model", family, num_hidden_layers=layers)
    for name, (ranks, learner) in layouts.items():
        outputs(start_ranks(PROGRAM, model, tmp_path / name, ranks, **learner))
    for name, (ranks, learner) in layouts.items():
        others = list(layouts)
        work = tmp_path / f"in-{name}"
        folders = [tmp_path / other for other in others]
        outputs(start_ranks(PROGRAM, model, work, ranks, folders, **learner))
        for other in others:
            saved = load_file(tmp_path / other / "saved" / "model.safetensors")
            read = load_file(work / f"from-{other}" / "model.safetensors")
            assert read.keys() == saved.keys()
            unlike = [tensor for tensor in saved if not read[tensor].equal(saved[tensor])]
            assert not unlike, f"{other} read in {name}"
            after = load_file(tmp_path / other / "next" / "model.safetensors")
            again = load_file(work / f"from-{other}-next" / "model.safetensors")
            for tensor, value in after.items():
                if "k_proj.bias" not in tensor:  # its true gradient is 0
                    difference = (again[tensor].float() - value.float()).abs().max()
                    most = 2e-5
                    if value.dtype == torch.bfloat16 or "narrow" in f"{name} {other}":
                        most = 5e-3  # weights or moments have 8 bits
                    assert difference < most, (other, name, tensor)
            moved = max((after[one].float() - saved[one].float()).abs().max() for one in saved)
            assert moved > 1e-3, "the step after the checkpoint trains"
