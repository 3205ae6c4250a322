"""Corrections of single models of SGLang 0.5.23 on a CPU.

Each function corrects one module right after its import (``patches.install``).
"""

from types import ModuleType
from typing import Any

from slipstream.generators.sglang.replacing import replace

LATENT_BACKENDS = "sglang.srt.models.deepseek_common.attention_backend_handler"
ROTARY = "sglang.srt.layers.rotary_embedding.factory"
QWEN2_MOE = "sglang.srt.models.qwen2_moe"
EXPERTS = "sglang.srt.layers.moe.fused_moe_native"
GATED_NORM = "sglang.kernels.ops.attention.fla.layernorm_gated"
FUSED_GATED_NORM = "sglang.kernels.ops.attention.fla.fused_norm_gate"


def attend_to_latents(module: ModuleType) -> None:
    """Make ``torch_native`` attention read the compressed keys and values in the cache.

    For an unknown attention backend SGLang uses Triton's rule: a prompt is expanded to keys and
    values of every head. forward_mha.py passes these on, but torch_native
    (torch_native_backend.py:160) reads the cache, where they are compressed. Remove when SGLang
    registers a rule for torch_native.
    """
    method = module.AttnForwardMethod.MLA

    def compressed(_attention: object, _batch: object) -> Any:  # noqa: ANN401
        return method

    module.AttentionBackendRegistry.register("torch_native", compressed)


def turn_without_scaling(module: ModuleType) -> None:
    """Give latent models on a CPU rotary embeddings without scaling.

    On a CPU SGLang knows only DeepSeek's YaRN (rotary_embedding/factory.py:478); Moonlight has no
    scaling. Remove when ``get_rope_cpu`` takes other embeddings.
    """
    scaled, any_rule = module.get_rope_cpu, module.get_rope

    def get_rope_cpu(
        head_size: int,
        rotary_dim: int,
        max_position: int,
        base: int,
        is_neox_style: bool = True,
        rope_scaling: dict[str, Any] | None = None,
        dtype: Any = None,  # noqa: ANN401
        partial_rotary_factor: float = 1.0,
        device: str | None = None,
    ) -> Any:  # noqa: ANN401
        usual = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype)
        if rope_scaling is None or rope_scaling.get("rope_type") == "default":
            return any_rule(*usual, partial_rotary_factor)
        return scaled(*usual, partial_rotary_factor, device)

    replace(module, "get_rope_cpu", get_rope_cpu)


def leave_out_far_experts(module: ModuleType) -> None:
    """Compute only those of a token's experts that this rank has.

    The others have the number -1 (token_dispatcher/standard.py:378), and ``moe_forward_native``
    (fused_moe_native.py:80) counts by number: it fails. Here each pair of a token and one of its
    experts here is a row of its own. Remove when it leaves out -1.
    """
    import torch  # in the process that computes, not in the agent's

    of_one_rank = module.moe_forward_native

    def moe_forward_native(
        layer: Any,  # noqa: ANN401
        x: torch.Tensor,  # [T, H]
        topk_output: Any,  # noqa: ANN401
        moe_runner_config: Any,  # noqa: ANN401
    ) -> torch.Tensor:
        weights, numbers, _ = topk_output  # [T, K] each
        is_here = numbers >= 0
        if is_here.all():
            alone: torch.Tensor = of_one_rank(layer, x, topk_output, moe_runner_config)
            return alone
        if not is_here.any():
            return torch.zeros_like(x)
        tokens, _ = is_here.nonzero(as_tuple=True)
        pairs = topk_output._replace(
            topk_weights=weights[is_here].unsqueeze(1), topk_ids=numbers[is_here].unsqueeze(1)
        )
        shares = of_one_rank(layer, x[tokens], pairs, moe_runner_config)
        return torch.zeros_like(x).index_add_(0, tokens, shares)

    replace(module, "moe_forward_native", moe_forward_native)


def gate_shared_experts(module: ModuleType) -> None:
    """Compute the gate of Qwen2-MoE's shared expert in torch if Triton cannot run.

    ``fused_gate_sigmoid_mul_add`` (qwen2_moe.py:877) is only a Triton kernel. Remove when it has a
    form for a CPU.
    """
    kernel = module.fused_gate_sigmoid_mul_add

    def fused_gate_sigmoid_mul_add(
        hidden_states: Any,  # noqa: ANN401
        gate_weight: Any,  # noqa: ANN401
        shared_output: Any,  # noqa: ANN401
        final_hidden_states: Any,  # noqa: ANN401
    ) -> None:
        if hidden_states.is_cuda:
            kernel(hidden_states, gate_weight, shared_output, final_hidden_states)
        else:
            gate = (hidden_states @ gate_weight).sigmoid().unsqueeze(-1)
            final_hidden_states.add_(gate * shared_output)

    replace(module, "fused_gate_sigmoid_mul_add", fused_gate_sigmoid_mul_add)


def norm_with_gate(module: ModuleType) -> None:
    """Compute the gated norm of Qwen3.5's linear attention in torch if Triton cannot run.

    Without Intel's extension a CPU is given the Triton kernel (fla/layernorm_gated.py:529). Remove
    when it has another form.
    """
    from slipstream.generators.sglang.cpu_linear_attention import gated_norm  # torch, as above

    kernel = module.layernorm_fn

    def layernorm_fn(
        x: Any,  # noqa: ANN401
        weight: Any,  # noqa: ANN401
        bias: Any,  # noqa: ANN401
        z: Any = None,  # noqa: ANN401
        eps: float = 1e-6,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        is_rms_norm: bool = False,
        activation: str = "swish",
    ) -> Any:  # noqa: ANN401
        if x.is_cuda:
            place = eps, group_size, norm_before_gate, is_rms_norm, activation
            return kernel(x, weight, bias, z, *place)
        return gated_norm(x, weight, z, eps, activation)

    replace(module, "layernorm_fn", layernorm_fn)


def norm_with_fused_gate(module: ModuleType) -> None:
    """Compute the gated norm of Qwen3-Next in torch if Triton cannot run.

    Without Intel's extension a CPU is given the Triton kernel (fla/fused_norm_gate.py:451). Remove
    when it has another form.
    """
    from slipstream.generators.sglang.cpu_linear_attention import gated_norm  # torch, as above

    kernel = module.rms_norm_gated

    def rms_norm_gated(
        x: Any,  # noqa: ANN401
        g: Any,  # noqa: ANN401
        weight: Any,  # noqa: ANN401
        bias: Any,  # noqa: ANN401
        activation: str = "swish",
        residual: Any = None,  # noqa: ANN401
        prenorm: bool = False,
        residual_in_fp32: bool = False,
        eps: float = 1e-6,
    ) -> Any:  # noqa: ANN401
        if x.is_cuda:
            return kernel(x, g, weight, bias, activation, residual, prenorm, residual_in_fp32, eps)
        return gated_norm(x, weight, g, eps, activation)

    replace(module, "rms_norm_gated", rms_norm_gated)
