"""Megatron's own layers with this project's attention, norms, router, experts and SwiGLU."""

import copy
import inspect
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer import mlp as megatron_mlp
from megatron.core.transformer.moe import shared_experts
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from typing_extensions import override

from slipstream.learner.model.attention import VarlenCoreAttention
from slipstream.learner.model.computed_again import computed_again
from slipstream.learner.model.experts.grouped_experts import GroupedExperts
from slipstream.learner.model.experts.router import PolicyRouter
from slipstream.learner.model.gated_attention import GatedAttention
from slipstream.learner.model.kernels.swiglu import swiglu
from slipstream.learner.model.latent_attention import LatentAttention
from slipstream.learner.model.linear_attention.delta_network import DeltaNetwork
from slipstream.wire.models.hf_config import HfConfig

_Output = tuple[Tensor, Tensor | None]  # output of attention or an MLP, and its bias


class TorchRMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm that marks its gradient to be summed over tensor parallelism.

    Megatron's own wrapper refuses sequence parallelism; the mark on the weight has its gradients
    summed there.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_kwargs: object
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # a mark


class CentredRMSNorm(TorchRMSNorm):
    """Root-mean-square norm that multiplies by 1 + weight, in float32."""

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normalized tensor, in its own type."""
        return computed_again(self._normed, hidden, self.weight)

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        scale = 1.0 + weight.float()
        return F.rms_norm(hidden.float(), self.normalized_shape, scale, self.eps).to(hidden.dtype)


class NormedResidual(torch.nn.Module):
    """Replaces Megatron's bias-dropout-add: the output is normalized, then added.

    Used in families with a norm after attention and MLP as well as before them.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = TorchRMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    @override
    def forward(
        self, _training: bool, _is_fused: bool
    ) -> Callable[[_Output, Tensor, float], Tensor]:
        """Return the function that Megatron calls with output, residual and dropout."""

        def add(output: _Output, residual: Tensor, _dropout: float) -> Tensor:
            normed: Tensor = self.norm(output[0])
            return residual + normed

        return add


def install_swiglu() -> None:
    """Have Megatron's MLPs and shared experts compute SwiGLU by this project's operator.

    They do with ``bias_activation_fusion``; a second call changes nothing.
    """
    for module in (megatron_mlp, shared_experts):
        vars(module)["bias_swiglu_impl"] = _swiglu


def _swiglu(gate_up: Tensor, bias: Tensor | None, *options: bool) -> Tensor:
    """Replace the function of this place: options store the input in 8 bits, or offload it."""
    if bias is None and not any(options):
        return swiglu(gate_up)
    by_megatron: Tensor = fused_bias_swiglu.bias_swiglu_impl(gate_up, bias, *options)
    return by_megatron


def layer_specs(
    hf: HfConfig, config: TransformerConfig, stage: int | None
) -> TransformerBlockSubmodules:
    """Return the layers of a chunk, with and without experts."""
    first: int = get_transformer_layer_offset(config, vp_stage=stage)
    count: int = get_num_layers_to_build(config, vp_stage=stage)
    kinds: dict[tuple[str, bool], ModuleSpec] = {}
    specs = []
    for number in range(first, first + count):
        kind = hf.kind_of(number), hf.is_sparse(number)
        if kind not in kinds:
            kinds[kind] = _layer_spec(hf, config, number)
        specs.append(kinds[kind])
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=_norm_of(hf))


def _norm_of(hf: HfConfig) -> type[TorchRMSNorm]:
    return CentredRMSNorm if hf.family.centres_norms else TorchRMSNorm


def _layer_spec(hf: HfConfig, config: TransformerConfig, number: int) -> ModuleSpec:
    """Return a layer like the one of this number."""
    is_sparse, norm = hf.is_sparse(number), _norm_of(hf)
    wanted = {
        "num_experts": config.num_moe_experts if is_sparse else None,
        "moe_grouped_gemm": False,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": hf.family.is_latent,
        "normalization": "RMSNorm",
    }
    accepted = inspect.signature(get_gpt_layer_local_spec).parameters
    spec = copy.deepcopy(
        get_gpt_layer_local_spec(**{name: wanted[name] for name in wanted if name in accepted})
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    attention = layer.self_attention.submodules
    attention.core_attention = ModuleSpec(module=VarlenCoreAttention, params={"hf": hf})
    if hf.layer_kind(number).is_linear:
        layer.self_attention = ModuleSpec(module=DeltaNetwork, params={"hf": hf})
    elif hf.family.is_latent:
        layer.self_attention.module = LatentAttention
        attention.q_layernorm = attention.kv_layernorm = norm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    if hf.family.gates_attention and not hf.layer_kind(number).is_linear:
        layer.self_attention.module = GatedAttention
    if is_sparse:
        # A specification, or since megatron-core 0.19 a function with it.
        mlp = (
            layer.mlp.submodules
            if hasattr(layer.mlp, "submodules")
            else layer.mlp.keywords["submodules"]
        )
        mlp.router, mlp.experts = partial(PolicyRouter, hf), GroupedExperts
    if "mlp_bda.norm.weight" in hf.family.layer:
        normed = ModuleSpec(module=NormedResidual, params={"config": config})
        layer.self_attn_bda = layer.mlp_bda = normed
    return spec
