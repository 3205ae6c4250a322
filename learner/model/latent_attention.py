"""Latent attention (MLA) over packed sequences, around Megatron's own output projection.

DeepSeek-AI 2024, "DeepSeek-V2" (arXiv:2405.04434), section 2.1: keys and values are expanded from a
compressed vector. Megatron's own class turns channels by place in the sequence, splits the
compressing projections over ranks, and gathers their outputs again. Here channels turn by position
id, as in all models here, and every rank compresses for itself: the projections are small.

Shapes: T tokens, T/t of them on a rank with sequence parallelism; h heads of this rank; n channels
of a key that do not turn, r that do, v of a value.
"""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttentionSubmodules,
    MultiLatentAttention,
)
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor
from typing_extensions import override

from slipstream.learner.model.attention import PackedLayout
from slipstream.wire.models.hf_config import HfConfig


def latent_config(hf: HfConfig) -> dict[str, object]:
    """Return the part of Megatron's configuration for latent attention."""
    if not hf.family.is_latent:
        return {}
    return {
        "q_lora_rank": hf.q_lora_rank,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
        "rope_type": "rope",  # selects tables that stay unused
    }


_NORM_EPSILON = 1e-6  # fixed in the models' own code for compressed vectors, not rms_norm_eps


class WholeLinear(torch.nn.Linear):
    """A projection that every tensor-parallel rank holds whole, and computes for its tokens."""

    def __init__(self, size_in: int, size_out: int, config: MLATransformerConfig) -> None:
        super().__init__(size_in, size_out, bias=False, dtype=config.params_dtype)
        config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # a mark


class LatentAttention(MultiLatentAttention):  # type: ignore[misc]  # megatron is untyped
    """Takes the place of Megatron's self-attention of latent models."""

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_options: object,
    ) -> None:
        super().__init__(
            config=config,
            submodules=submodules,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection or ProcessGroupCollection.use_mpu_process_groups(),
        )
        heads, hidden = config.num_attention_heads, config.hidden_size
        queries = heads * self.q_head_dim
        if config.q_lora_rank:
            self.linear_q_down_proj = WholeLinear(hidden, config.q_lora_rank, config)
            self.q_layernorm = self._norm(submodules.q_layernorm, config.q_lora_rank)
            self.linear_q_up_proj = self._expanding(
                submodules.linear_q_up_proj, config.q_lora_rank, queries, "q_up_proj"
            )
        else:
            self.linear_q_proj = self._expanding(
                submodules.linear_q_proj, hidden, queries, "q_proj"
            )
        self.linear_kv_down_proj = WholeLinear(
            hidden, config.kv_lora_rank + config.qk_pos_emb_head_dim, config
        )
        self.kv_layernorm = self._norm(submodules.kv_layernorm, config.kv_lora_rank)
        self.linear_kv_up_proj = self._expanding(
            submodules.linear_kv_up_proj,
            config.kv_lora_rank,
            heads * (config.qk_head_dim + config.v_head_dim),
            "kv_up_proj",
        )
        self.core_attention.scale = config.attention_scale

    def _norm(self, module: type, size: int) -> torch.nn.Module:
        built: torch.nn.Module = build_module(
            module, hidden_size=size, config=self.config, eps=_NORM_EPSILON
        )
        return built

    def _expanding(self, module: type, size_in: int, size_out: int, name: str) -> torch.nn.Module:
        built: torch.nn.Module = build_module(
            module,
            size_in,
            size_out,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name=name,
            tp_group=self.pg_collection.tp,
        )
        return built

    @override
    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedLayout | None = None,
        inference_context: object = None,
        **_options: object,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return queries [T, h, n + r], keys [T, h, n + r] and values [T, h, v].

        Turning channels have their positions. After these three come, for Megatron, the vectors
        that queries, and keys and values, were expanded from.

        Args:
            hidden_states: [T/t, 1, H].
            key_value_states: none.
            position_ids: not read.
            packed_seq_params: layout of the microbatch.
            inference_context: none.
        """
        if packed_seq_params is None:
            raise ValueError("attention takes packed sequences only")
        config, rotation = self.config, packed_seq_params.rotation
        heads, still = self.num_attention_heads_per_partition, config.qk_head_dim
        source = hidden_states
        if config.q_lora_rank:
            source = self.q_layernorm(self.linear_q_down_proj(hidden_states))
            query, _ = self.linear_q_up_proj(source)
        else:
            query, _ = self.linear_q_proj(hidden_states)
        query = rotation.turned(query.view(-1, heads, self.q_head_dim), first=still)

        compressed, shared = self.linear_kv_down_proj(hidden_states).split(
            [config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1
        )
        compressed = self.kv_layernorm(compressed)
        expanded, _ = self.linear_kv_up_proj(compressed)
        expanded = expanded.view(-1, heads, still + config.v_head_dim)
        shared = rotation.turned(self._of_all_tokens(shared).reshape(-1, 1, shared.size(-1)))
        key = torch.cat([expanded[..., :still], shared.expand(-1, heads, -1)], dim=-1)
        return query, key, expanded[..., still:], source, compressed

    def _of_all_tokens(self, shared: Tensor) -> Tensor:
        """Return the key that all heads share, for all tokens; each rank adds to its gradient.

        [T/t, 1, r] -> [T, 1, r].
        """
        tensor: Tensor
        if self.config.sequence_parallel:
            tensor = gather_from_sequence_parallel_region(shared, tensor_parallel_output_grad=True)
        else:
            tensor = copy_to_tensor_model_parallel_region(shared)
        return tensor
