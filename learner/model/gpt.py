"""A policy as a Megatron-Core model, and its forward pass over packed sequences.

The output layer keeps its weights, its place in checkpoints and its gradients, but hands its input
on: log-probabilities are computed a part of the vocabulary at a time (algos/linear_logprobs.py).

Shapes: T tokens of B sequences laid end to end, H hidden size, V the vocabulary padded to a
multiple of tp.
"""

import copy
import dataclasses
import difflib
import inspect
import types
from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor

from slipstream.learner.model import device
from slipstream.learner.model.attention import VarlenCoreAttention, packed_layout
from slipstream.learner.model.hf_config import HfConfig
from slipstream.learner.model.rotary import Rotary
from slipstream.wire.errors import ConfigError

# Fusions that need Transformer Engine, Apex or a GPU; [learner.megatron] can switch them on.
_NO_FUSIONS: dict[str, object] = {
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "cross_entropy_loss_fusion": False,
}


class TorchRMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm that marks its gradient to be summed over tensor parallelism.

    Megatron's own wrapper refuses sequence parallelism; the mark on the weight
    has its gradients summed there.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_kwargs: object
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # a mark


def build_model(hf: HfConfig, *, dtype: torch.dtype, extra: Mapping[str, object]) -> GPTModel:
    """Return this rank's part of the model, with random weights; the topology must be up.

    The model keeps ``hf`` as its attribute ``hf_config``. The table [learner.megatron], ``extra``,
    reaches Megatron's TransformerConfig as it is.

    Raises:
        ConfigError: an unknown key in ``extra``, or a model that the ranks cannot split.
    """
    config = _transformer_config(hf, dtype, extra)
    config.rotary = Rotary.of(hf, device.device())
    model = GPTModel(
        config,
        _layer_spec(config),
        vocab_size=padded_vocab_size(hf.vocab_size),
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="none",  # attention turns queries and keys by position id
    )
    model.hf_config = hf
    if model.post_process:
        model.output_layer.forward = types.MethodType(_handed_on, model.output_layer)
    model.to(device.device())
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return model


def packed_forward(
    model: torch.nn.Module,
    token_ids: Tensor,
    position_ids: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
) -> Tensor:
    """Return the output of the model's last layer for each token: hidden states [T, H].

    Sequence parallelism divides tokens evenly over ranks: where they do not divide, a sequence of
    padding follows the others, and its outputs are left out.

    Args:
        model: from ``build_model``, or a wrapper around one.
        token_ids: [T] int64.
        position_ids: [T] int64, from 0 in each sequence.
        cu_seqlens: [B + 1] int32; sequence i holds tokens cu_seqlens[i] to cu_seqlens[i + 1].
        max_seqlen: the length of the longest sequence, exactly.
    """
    config: TransformerConfig = model.config
    count = len(token_ids)
    missing = -count % config.tensor_model_parallel_size if config.sequence_parallel else 0
    if missing:
        token_ids = F.pad(token_ids, (0, missing))
        position_ids = torch.cat([position_ids, torch.arange(missing, device=position_ids.device)])
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:] + missing])
        max_seqlen = max(max_seqlen, missing)
    layout = packed_layout(cu_seqlens, max_seqlen, config.rotary.at(position_ids))
    outputs: Tensor = model(
        token_ids.unsqueeze(0), position_ids.unsqueeze(0), None, packed_seq_params=layout
    )
    return outputs.squeeze(0)[:count]


def output_weight(model: GPTModel) -> Tensor:
    """Return this rank's rows [V/tp, H] of the output layer, tied to the embedding or not."""
    weight: Tensor = (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else model.output_layer.weight
    )
    return weight


def _handed_on(
    layer: ColumnParallelLinear,
    hidden: Tensor,
    weight: Tensor | None = None,  # noqa: ARG001 Megatron passes it on
    runtime_gather_output: bool | None = None,  # noqa: ARG001
) -> tuple[Tensor, None]:
    """Replace the layer's forward: return its input, whole on every rank.

    In the backward pass the ranks' shares of the gradient are summed, as the layer would.
    """
    if layer.sequence_parallel:
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True), None
    return copy_to_tensor_model_parallel_region(hidden), None


def padded_vocab_size(vocab_size: int) -> int:
    """Return the rows of the embedding over all ranks: a multiple of tensor parallelism."""
    ranks: int = parallel_state.get_tensor_model_parallel_world_size()
    return -(-vocab_size // ranks) * ranks


def _transformer_config(
    hf: HfConfig, dtype: torch.dtype, extra: Mapping[str, object]
) -> TransformerConfig:
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    sizes = {
        "num_attention_heads": hf.num_attention_heads,
        "num_key_value_heads": hf.num_query_groups,
        "intermediate_size": hf.intermediate_size,
    }
    for name, size in sizes.items():
        if size % ranks:
            raise ConfigError(
                f"{name} of run.model must be a multiple of learner.tensor_parallel, "
                f"got {size} and {ranks}"
            )
    fixed: dict[str, object] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_query_groups,
        "kv_channels": hf.kv_channels,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf.family.has_qkv_bias,
        "qk_layernorm": hf.family.has_qk_norm,
        **hf.family.megatron,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "tensor_model_parallel_size": ranks,
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # asked for with lengths that vary, experts or not
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    _refuse_unknown(extra, fixed)
    defaults = {**_NO_FUSIONS, "use_cpu_initialization": device.device().type == "cpu"}
    try:
        return TransformerConfig(**fixed, **{**defaults, **extra})
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"Megatron refuses [learner.megatron] {dict(extra)}: {error}") from error


def _refuse_unknown(extra: Mapping[str, object], fixed: Mapping[str, object]) -> None:
    known = [field.name for field in dataclasses.fields(TransformerConfig) if field.init]
    for name in extra:
        if name in fixed:
            raise ConfigError(
                f"learner.megatron.{name} follows from the model and the learner's settings "
                f"({fixed[name]!r}) and cannot be set"
            )
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ConfigError(
                f"unknown setting learner.megatron.{name}; did you mean {', '.join(close)}?"
            )


def _layer_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Return Megatron's own layers with this project's attention and norms in them."""
    wanted = {"qk_layernorm": config.qk_layernorm, "normalization": "RMSNorm"}
    accepted = inspect.signature(get_gpt_layer_local_spec).parameters
    spec = copy.deepcopy(
        get_gpt_layer_local_spec(**{name: wanted[name] for name in wanted if name in accepted})
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = TorchRMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = VarlenCoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = TorchRMSNorm
    num_layers = get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=TorchRMSNorm)
