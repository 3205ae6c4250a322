"""How fast a layer computes its experts in groups, against Megatron's, one after another."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.learner.model import device
from slipstream.wire.models.hf_config import load_hf_config
from tests.support.family_models import SHAPE
from tests.support.single_experts import compute_one_by_one

_TIMES = 5  # after two that warm up


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of a layer with experts."""

    hidden: int
    inner: int
    experts: int
    experts_of_token: int


OF_30B_A3B = Layer(hidden=2048, inner=768, experts=128, experts_of_token=8)
TINY = Layer(hidden=64, inner=32, experts=16, experts_of_token=4)


def compared(layer: Layer, tokens: int, folder: Path) -> dict[str, float]:
    """Return the ms of the fastest of a few passes, forward and backward, in each form; and "off".

    That is how far outputs, gradients of the input and the norm of the weights' gradients are from
    each other, relative to the largest number. One expert gets no token.

    Weights are bfloat16, and their gradients are added to float32, as in a run; the topology must
    be up.
    """
    from slipstream.learner.model.gpt import build_model

    config = SHAPE | {
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "hidden_size": layer.hidden,
        "head_dim": 32,
        "num_experts": layer.experts,
        "num_experts_per_tok": layer.experts_of_token,
        "moe_intermediate_size": layer.inner,
        "norm_topk_prob": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = build_model(load_hf_config(folder), dtype=torch.bfloat16, extra={})
    mlp = model.chunks[0].decoder.layers[0].mlp
    numbers = torch.Generator(device.device()).manual_seed(1)
    with torch.no_grad():
        for weight in mlp.parameters():
            weight.normal_(std=0.02, generator=numbers)
    hidden = torch.randn(
        tokens, 1, layer.hidden, dtype=torch.bfloat16, device=device.device(), generator=numbers
    )
    with torch.no_grad():
        hidden[..., 0] = 4.0
        mlp.router.weight[0] = 0.0
        mlp.router.weight[0, 0] = -100.0  # the expert without a token
    grouped, ours = _fastest(mlp, mlp, hidden)
    single, theirs = _fastest(mlp, compute_one_by_one(mlp, copied=True), hidden)
    off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))
    return {"in groups": grouped, "one after another": single, "off": off}


def _fastest(
    mlp: Any,  # noqa: ANN401
    weights: torch.nn.Module,
    hidden: Tensor,
) -> tuple[float, list[Tensor]]:
    for weight in weights.parameters():
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]  # Megatron's marks
    found = []
    for _ in range(2 + _TIMES):
        given = hidden.clone().requires_grad_()
        began_s = _now_s()
        output, _ = mlp(given)
        output.backward(hidden)
        found.append(1e3 * (_now_s() - began_s))
        for weight in mlp.parameters():
            weight.grad = None
    norm = torch.stack([weight.main_grad.norm() for weight in weights.parameters()]).norm()  # type: ignore[union-attr]
    for weight in weights.parameters():
        del weight.main_grad
    of_input = hidden if given.grad is None else given.grad
    return min(found[2:]), [output.detach().float(), of_input.float(), norm]


def _now_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic()
