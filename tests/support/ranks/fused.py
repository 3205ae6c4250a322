"""Layers with fused operators beside Megatron's own.

Usage: fused WORK_FOLDER
Writes WORK_FOLDER/0.json: by model and setting, the largest difference of outputs and gradients
from those of Megatron's own operators; what an MLP and an expert keep for the backward pass, in
numbers of a token; whether clamped activations are fused; why a setting of Megatron's experts is
refused; and the operators of a norm.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.library import _scoped_library
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.learner.config import LearnerSection
from slipstream.wire.errors import ConfigError
from tests.support.family_models import MODELS, SHAPE
from tests.support.ranks.program import finish, join_ranks, run
from tests.support.single_experts import compute_one_by_one

LENGTHS = [5, 1, 9, 5]
SETTINGS: dict[str, dict[str, object]] = {
    "kept": {},
    "recomputed": {"recompute": "selective", "recompute_modules": ("mlp", "moe")},
}


def main(work: Path) -> None:
    join_ranks(work, 0, 1, LearnerSection())
    report: dict[str, object] = {}
    for family in ("qwen3", "qwen2_moe", "deepseek_v2"):
        own = model_of(work / family, family, bias_activation_fusion=False)
        for layer in own.chunks[0].decoder.layers:
            if hasattr(layer.mlp, "experts"):
                compute_one_by_one(layer.mlp)
        expected = results(own)
        for name, setting in SETTINGS.items():
            model = model_of(work / family, family, LearnerSection(**setting))  # type: ignore[arg-type]
            for chunk, other in zip(model.chunks, own.chunks, strict=True):
                chunk.load_state_dict(other.state_dict())
            report[f"{family} {name}"] = max(
                (mine - other).abs().max().item() / (1e-6 + other.abs().max().item())
                for mine, other in zip(results(model), expected, strict=True)
            )
    report["kept"] = {
        "mlp": kept_of(mlp_of(model_of(work / "qwen3", "qwen3"))),
        "Megatron's": kept_of(
            mlp_of(model_of(work / "qwen3", "qwen3", bias_activation_fusion=False))
        ),
        "experts": kept_of(
            mlp_of(model_of(work / "qwen2_moe", "qwen2_moe")).experts,
            torch.rand(4, 2, requires_grad=True),
            torch.tensor([[0, 1], [2, 5], [1, 0], [7, 3]]),
        ),
    }
    clamped = model_of(work / "qwen3", "qwen3", activation_func_clamp_value=7.0)
    report["clamped is fused"] = clamped.config.bias_activation_fusion
    try:
        model_of(work / "qwen2_moe", "qwen2_moe", moe_permute_fusion=True)
    except ConfigError as error:
        report["refused"] = str(error)
    report["norm"] = norm_operators()
    finish(work / "0.json", report)


def model_of(folder: Path, family: str, learner: LearnerSection | None = None, **megatron: object):
    from slipstream.learner.model.gpt import build_model
    from slipstream.wire.models.hf_config import load_hf_config

    folder.mkdir(exist_ok=True)
    config = {"hidden_act": "silu", **SHAPE, **MODELS[family]}
    (folder / "config.json").write_text(json.dumps(config))
    return build_model(load_hf_config(folder), dtype=torch.float32, extra=megatron, learner=learner)


def mlp_of(model):  # noqa: ANN001 - known only after prepare()
    """Return the MLP of the first layer."""
    return model.chunks[0].decoder.layers[0].mlp


def results(model) -> list[torch.Tensor]:  # noqa: ANN001 - known only after prepare()
    """Return hidden states and all gradients."""
    from tests.support.logits import packed_forward

    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    token_ids = torch.arange(sum(LENGTHS)) % 100
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    hidden = packed_forward(model, token_ids, positions, bounds, LENGTHS)
    hidden.backward(torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [hidden.detach(), *gradients]


def kept_of(mlp, *weights: torch.Tensor) -> list[float]:  # noqa: ANN001
    """Return the numbers of a token in each tensor that is kept, but for the input and weights."""
    tokens = torch.randn(4, mlp.config.hidden_size, requires_grad=True)
    known = {tensor.untyped_storage().data_ptr() for tensor in (tokens, *mlp.parameters())}
    kept: dict[int, float] = {}

    def keep(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes() / saved.element_size() / len(tokens)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        made = mlp(tokens, *weights)
    output = made[0] if isinstance(made, tuple) else made
    assert output.requires_grad
    return sorted(kept.values())


class Called(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> object:  # noqa: ANN001
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@contextmanager
def device_with_fused_norm() -> Iterator[None]:
    """Have torch believe that this device has its fused norm, which CUDA has since torch 2.9."""

    def forward(rows: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(rows), rows.new_empty((len(rows), 1), dtype=torch.float32)

    def backward(
        _of: torch.Tensor,
        rows: torch.Tensor,
        _size: object,
        _rms: object,
        weight: torch.Tensor,
        *_: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(rows), torch.empty_like(weight)

    with _scoped_library("aten", "IMPL") as library:
        library.impl("_fused_rms_norm", forward, "CPU")
        library.impl("_fused_rms_norm_backward", backward, "CPU")
        yield


def norm_operators() -> list[str]:
    from megatron.core.transformer import TransformerConfig

    from slipstream.learner.model.layers import TorchRMSNorm

    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, params_dtype=torch.bfloat16
    )
    rows = torch.ones(3, 8, dtype=torch.bfloat16, requires_grad=True)
    norm = TorchRMSNorm(config, 8)
    with device_with_fused_norm(), Called() as called:
        norm(rows).backward(torch.ones_like(rows))
    return called.names


if __name__ == "__main__":
    run(main)
