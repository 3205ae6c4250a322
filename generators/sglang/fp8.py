"""Corrections of SGLang 0.5.23's layers in fp8.

It computes them on a GPU, or with AMX. On another CPU, what its Triton kernels compute is computed
in torch: rows are rounded to e4m3 in groups of 128 channels (``per_token_group_quant_fp8``),
weights are taken times the scales of their blocks, and products are summed in float32. Slow: for
tests and trials of the loop. Remove when SGLang has a way for any CPU.
"""

import importlib
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from slipstream.generators.sglang.replacing import replace
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.fp8 import BLOCK, LARGEST

_RESULT = "sglang.srt.layers.moe.token_dispatcher"
_LEAST = 1e-10  # the kernels' smallest maximum of a group


def correct(module: ModuleType) -> None:
    """Correct the module of layers in fp8, once it is imported."""
    _quantize_layers_alone(module)
    if module._is_cpu:
        _compute_in_torch(module)
    else:
        _refuse_marlin(module)


def _quantize_layers_alone(module: ModuleType) -> None:
    """Give attention no scales of a cache in fp8: no version has any.

    An engine that begins with random weights would take random scales, too.
    """
    config = module.Fp8Config
    method_of = config.get_quant_method

    def get_quant_method(self: Any, layer: Any, prefix: str) -> Any:  # noqa: ANN401
        is_attention = type(layer).__name__ == "RadixAttention"
        return None if is_attention else method_of(self, layer, prefix)

    replace(config, "get_quant_method", get_quant_method)


def _refuse_marlin(module: ModuleType) -> None:
    """Refuse a GPU without fp8, where Marlin's kernels would lay out weights anew after a load."""
    linear = module.Fp8LinearMethod
    make = linear.__init__

    def checked(self: Any, quant_config: Any) -> None:  # noqa: ANN401
        make(self, quant_config)
        if self.use_marlin:
            major, minor = torch.cuda.get_device_capability()
            raise ConfigError(
                'weightbus.precision = "fp8" needs GPUs that compute in fp8, of capability 8.9 or '
                f"more, without SGLANG_FORCE_FP8_MARLIN; this one has {major}.{minor}"
            )

    replace(linear, "__init__", checked)


def _compute_in_torch(module: ModuleType) -> None:
    """Replace what layers in fp8 do after loading and in a forward pass."""
    linear, experts = module.Fp8LinearMethod, module.Fp8MoEMethod

    def loaded(self: Any, layer: Any) -> None:  # noqa: ANN401
        """Leave the weights as they were loaded."""

    def linear_apply(_self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: ANN401
        output = product(x, layer.weight, layer.weight_scale_inv)
        return output if bias is None else output + bias

    def experts_apply(_self: Any, layer: Any, dispatch_output: Any) -> Any:  # noqa: ANN401
        result = importlib.import_module(_RESULT).StandardCombineInput
        config = layer.moe_runner_config
        if config.activation != "silu" or config.apply_router_weight_on_input:
            raise NotImplementedError("experts in fp8 on a CPU are SwiGLU, weighed at their end")
        x, (weights, chosen, _) = dispatch_output.hidden_states, dispatch_output.topk_output
        total = torch.zeros_like(x, dtype=torch.float32)
        for number in range(len(layer.w13_weight)):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            if not len(rows):
                continue
            gate, up = product(
                x[rows], layer.w13_weight[number], layer.w13_weight_scale_inv[number]
            ).chunk(2, dim=-1)
            down = product(
                F.silu(gate) * up, layer.w2_weight[number], layer.w2_weight_scale_inv[number]
            )
            total.index_add_(0, rows, down.float() * weights[rows, place, None].float())
        return result(hidden_states=total.to(x.dtype))

    def types(_cls: Any) -> list[torch.dtype]:  # noqa: ANN401
        return [torch.bfloat16, torch.half, torch.float32]

    for method, apply in ((linear, linear_apply), (experts, experts_apply)):
        replace(method, "process_weights_after_loading", loaded)
        replace(method, "apply", apply)
    replace(module.Fp8Config, "get_supported_act_dtypes", classmethod(types))


def product(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Return ``x @ weight.T`` [..., R] in the type of x, [..., C].

    Args:
        x: rows in any type; they are rounded to e4m3.
        weight: matrix in e4m3, [R, C].
        scales: scales of its blocks, [R/128, C/128] rounded up.
    """
    rows, columns = weight.shape
    widened = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (rounded(x) @ (weight.float() * widened).T).to(x.dtype)


def rounded(x: Tensor) -> Tensor:
    """Return rows [..., C] as e4m3 has them, in float32; groups of 128 channels have a scale.

    Like the kernel, it takes whole groups only.
    """
    groups = x.float().view(*x.shape[:-1], -1, BLOCK)
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=_LEAST) / LARGEST
    numbers = (groups / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return (numbers.float() * scales).flatten(-2)
