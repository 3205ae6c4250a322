"""Causal attention over sequences of different lengths, laid end to end without padding.

Shapes: T tokens of B sequences; h query heads and g key and value heads of this rank, d channels
per head. A GPU has kernels for this, in narrow types; a CPU computes sequences of one length
together (grouped_attention.py). Under context parallelism (context.py) ranks exchange heads for
tokens before and after attention.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from typing_extensions import override

from slipstream.learner.model.context import TokenSplit
from slipstream.learner.model.cuda_attention import AttentionBounds, cuda_attention, has_kernel
from slipstream.learner.model.experts.expert_choices import ExpertChoices
from slipstream.learner.model.grouped_attention import (
    LengthGroups,
    group_by_length,
    grouped_attention,
)
from slipstream.learner.model.ring_attention import Ring, ring_attention
from slipstream.learner.model.rotary import Rotation
from slipstream.learner.model.sequence_chunks import Chunks
from slipstream.learner.model.shared_prompts import SharedPrompts
from slipstream.learner.model.vision.images import ImagesHere
from slipstream.learner.model.windowed_attention import windowed_attention
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.hf_config import HfConfig


@dataclass
class PackedLayout(PackedSeqParams):  # type: ignore[misc]  # megatron is untyped
    """Megatron's description of a packed microbatch, with data shared by its layers."""

    rotation: Rotation = field(kw_only=True)  # rotation of this rank's tokens
    split: TokenSplit = field(kw_only=True)  # split of all tokens
    lengths: tuple[int, ...] = field(kw_only=True)  # tokens of each sequence, padding among them
    choices: ExpertChoices | None = field(kw_only=True, default=None)  # choices of routers
    shared: SharedPrompts | None = field(kw_only=True, default=None)  # prompts computed once
    images: ImagesHere | None = field(kw_only=True, default=None)  # images of this rank's tokens
    features: list[Tensor] = field(kw_only=True, default_factory=list)
    """What each of the first layers adds to the tokens of images, [M, 1, H]."""

    @cached_property
    def groups(self) -> LengthGroups:
        """Sequences grouped by length, computed by the first layer that needs them."""
        return group_by_length(self.cu_seqlens_kv)

    @cached_property
    def chunks(self) -> Chunks:
        """Chunks of the sequences, for linear attention."""
        return Chunks.of(self.lengths, self.cu_seqlens_kv.device)

    @cached_property
    def wide_bounds(self) -> Tensor:
        """Bounds of the sequences, [B + 1] int64; kernels keep what they derive of this object."""
        bounds: Tensor = self.cu_seqlens_kv.long()
        return bounds

    @cached_property
    def positions(self) -> Tensor:
        """Place of each token in its own sequence, [T'] int64."""
        bounds = self.wide_bounds
        count = sum(self.lengths)
        starts = bounds[:-1].repeat_interleave(bounds.diff(), output_size=count)
        return torch.arange(count, device=bounds.device) - starts

    @cached_property
    def ring(self) -> Ring:
        """Blocks of this rank's ring, where context parallelism has several."""
        return Ring.of(self.split, self.lengths, self.cu_seqlens_kv.device)

    @property
    def bounds(self) -> AttentionBounds:
        """Bounds of the sequences of queries and keys.

        A prompt that another sequence computes has no queries.
        """
        return AttentionBounds(
            self.cu_seqlens_q, self.cu_seqlens_kv, self.max_seqlen_q, self.max_seqlen_kv
        )


class VarlenCoreAttention(torch.nn.Module):
    """Takes the place of Megatron's core attention; packed sequences only."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        *_args: object,
        hf: HfConfig | None = None,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_kwargs: object,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ConfigError(f"learner.megatron.attention_dropout must be 0, got {dropout}")
        self.config = config
        default_scale = 1.0 / math.sqrt(config.kv_channels)
        self.scale = softmax_scale if softmax_scale is not None else default_scale
        self._turns = not config.multi_latent_attention  # latent attention has turned already
        self.window = None if hf is None else hf.window_of(layer_number - 1)
        # Sinks of this rank's query heads, [h], by Megatron's name.
        self.softmax_offset: torch.nn.Parameter | None = None
        if hf is not None and hf.has_sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    @override
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_args: object,
        packed_seq_params: PackedLayout,
        **_kwargs: object,
    ) -> Tensor:
        """Return [T, h, v] for query [T, h, d], key [T, g, d] and value [T, g, v].

        Queries and keys come without their positions, which are added here; those of latent
        attention come with positions.
        """
        layout, split = packed_seq_params, packed_seq_params.split
        if self._turns:
            query, key = layout.rotation.turned(query), layout.rotation.turned(key)
        query, key, value = split.exchanged(query, key, value)
        if self.window is not None or self.softmax_offset is not None:
            return split.returned(self._windowed(query, key, value, layout))
        if layout.shared is not None:
            return shared_attention(query, key, value, layout, layout.shared, self.scale)
        if split.shares.rings > 1:
            output = ring_attention(query, key, value, layout.ring, self.scale)
        elif has_kernel(query):
            output = cuda_attention(query, key, value, layout.bounds, self.scale)
        else:
            output = grouped_attention(query, key, value, layout.groups, self.scale)
        return split.returned(output)

    def _windowed(self, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout) -> Tensor:
        shared, sinks = layout.shared, None
        if shared is not None:
            key, value = shared.of_all(key), shared.of_all(value)
        if self.softmax_offset is not None:  # those of the heads that context parallelism left here
            sinks = self.softmax_offset.view(layout.split.shares.parts, -1)[layout.split.part]
        return windowed_attention(
            query, key, value, layout.bounds, self.scale, window=self.window, sinks=sinks
        )

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,  # noqa: ARG002  # megatron passes it
    ) -> dict[str, Any]:
        """Return the sinks in Megatron's sharded form; nothing without sinks."""
        weights = self.state_dict(prefix="", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            weights, prefix, {"softmax_offset": 0}, sharded_offsets
        )
        return sharded


def shared_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    shared: SharedPrompts,
    scale: float,
) -> Tensor:
    """Return attention [U, h, v] of the computed tokens, [U, h, d], to all of their sequences.

    A CPU computes queries of all tokens, too: products with weights cost far more there.
    """
    key, value = shared.of_all(key), shared.of_all(value)
    if has_kernel(query):
        return cuda_attention(query, key, value, layout.bounds, scale)
    output = grouped_attention(shared.of_all(query), key, value, layout.groups, scale)
    return output.index_select(0, shared.computed)
