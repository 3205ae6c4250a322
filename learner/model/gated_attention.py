"""Attention whose output passes a gate of each channel, computed with the queries.

Qiu et al. 2025, "Gated Attention for Large Language Models" (arXiv:2505.06708), the gate after
attention, as in Qwen3-Next. Rows of the projection are those of the Hugging Face tensors: for each
group its query heads, every one with its gate, then its key and its value.

Shapes: T tokens, T/t of them on a rank with sequence parallelism; h query heads and g groups of
this rank, d channels per head.
"""

from megatron.core.transformer.attention import SelfAttention
from torch import Tensor
from typing_extensions import override


class GatedAttention(SelfAttention):  # type: ignore[misc]  # megatron is untyped
    """Takes the place of Megatron's self-attention; Megatron applies the gate."""

    @override
    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *_args: object, **_options: object
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries [T, 1, h, d], keys and values [T, 1, g, d], and gates [T, 1, h d].

        Args:
            hidden_states: [T/t, 1, H].
        """
        projected, _ = self.linear_qkv(hidden_states)
        groups, size = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        by_group = projected.view(*projected.shape[:2], groups, -1)
        both, key, value = by_group.split([by_group.size(-1) - 2 * size, size, size], dim=-1)
        query, gate = both.unflatten(-1, (-1, 2, size)).unbind(-2)
        query, gate = query.flatten(2, 3), gate.flatten(2)
        return self.q_layernorm(query), self.k_layernorm(key), value, gate
