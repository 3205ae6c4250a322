"""Causal attention over sequences of different lengths, laid end to end without padding.

Shapes: T tokens of B sequences; h query heads and g key and value heads of this rank, d channels
per head. A GPU has kernels for this, in narrow types. On a CPU a batch has hundreds of short
sequences but few distinct lengths, so sequences of one length are computed together; they are
grouped once per microbatch. Under context parallelism (context.py) ranks exchange heads for tokens
before and after attention.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from typing_extensions import override

from slipstream.learner.model.context import TokenSplit
from slipstream.learner.model.cuda_attention import AttentionBounds, cuda_attention, has_kernel
from slipstream.learner.model.experts.expert_choices import ExpertChoices
from slipstream.learner.model.rotary import Rotation
from slipstream.learner.model.shared_prompts import SharedPrompts
from slipstream.wire.errors import ConfigError


@dataclass(frozen=True)
class LengthGroups:
    """The sequences of a microbatch, ordered by length."""

    order: Tensor | None  # [T] token at each place of the new order; None if nothing moves
    inverse: Tensor | None  # [T] place of each token in the new order
    sizes: tuple[tuple[int, int], ...]  # (number of sequences, their length), in the new order


def group_by_length(cu_seqlens: Tensor) -> LengthGroups:
    """Return an order of tokens in which sequences of equal length are neighbors.

    Args:
        cu_seqlens: [B + 1] int32; sequence i holds tokens cu_seqlens[i] to cu_seqlens[i + 1].
    """
    starts = cu_seqlens[:-1].long()
    lengths = cu_seqlens.long().diff()
    counts = lengths.bincount().tolist()
    sizes = tuple((count, length) for length, count in enumerate(counts) if count and length)
    if len(sizes) <= 1:
        return LengthGroups(order=None, inverse=None, sizes=sizes)
    by_length = lengths.argsort(stable=True)
    sorted_lengths = lengths[by_length]
    new_starts = sorted_lengths.cumsum(0) - sorted_lengths
    num_tokens = sum(count * length for count, length in sizes)
    order = torch.arange(num_tokens, device=cu_seqlens.device)
    order += (starts[by_length] - new_starts).repeat_interleave(sorted_lengths)
    return LengthGroups(order=order, inverse=order.argsort(), sizes=sizes)


@dataclass
class PackedLayout(PackedSeqParams):  # type: ignore[misc]  # megatron is untyped
    """Megatron's description of a packed microbatch, with data shared by its layers."""

    rotation: Rotation = field(kw_only=True)  # rotation of this rank's tokens
    split: TokenSplit = field(kw_only=True)  # split of all tokens
    choices: ExpertChoices | None = field(kw_only=True, default=None)  # choices of routers
    shared: SharedPrompts | None = field(kw_only=True, default=None)  # prompts computed once

    @cached_property
    def groups(self) -> LengthGroups:
        """Sequences grouped by length, computed by the first layer that needs them."""
        return group_by_length(self.cu_seqlens_kv)

    @cached_property
    def pieces(self) -> tuple[AttentionBounds, ...]:
        """Bounds of the sequences of queries and keys, for each run of this rank's queries.

        A run has no queries of the sequences before it, and no keys of the sequences after it. A
        prompt that another sequence computes has no queries.
        """
        bounds: Tensor = self.cu_seqlens_kv
        longest: int = self.max_seqlen_kv
        if self.shared is not None:
            return (AttentionBounds(self.cu_seqlens_q, bounds, self.max_seqlen_q, longest),)
        return tuple(
            AttentionBounds(
                bounds.clamp(first, end) - first,
                bounds.clamp(max=end),
                min(longest, end - first),
                longest,
            )
            for first, end in self.split.pieces()
        )


class VarlenCoreAttention(torch.nn.Module):
    """Takes the place of Megatron's core attention; packed sequences only."""

    def __init__(
        self,
        config: TransformerConfig,
        *_args: object,
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
        if layout.shared is not None:
            return shared_attention(query, key, value, layout, layout.shared, self.scale)
        if split.shares.rings > 1:
            runs = [end - first for first, end in split.pieces()]
            asked = zip(torch.split(query, runs), layout.pieces, strict=True)
            attend = cuda_attention if has_kernel(query) else bounded_attention
            output = torch.cat(
                [attend(mine, key, value, bounds, self.scale) for mine, bounds in asked]
            )
        elif has_kernel(query):
            output = cuda_attention(query, key, value, layout.pieces[0], self.scale)
        else:
            output = grouped_attention(query, key, value, layout.groups, self.scale)
        return split.returned(output)


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
        return cuda_attention(query, key, value, layout.pieces[0], scale)
    output = grouped_attention(shared.of_all(query), key, value, layout.groups, scale)
    return output.index_select(0, shared.computed)


def bounded_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: AttentionBounds, scale: float
) -> Tensor:
    """Return attention of the last tokens of sequences to all before them, in any type.

    Arguments are those of ``cuda_attention``; each sequence is a call.
    """
    ends = zip(*(b.tolist() for b in (bounds.queries, bounds.keys)), strict=True)
    outputs = []
    for (first, first_key), (end, end_key) in pairwise(ends):
        if first == end:
            continue
        q, k, v = (
            part.transpose(0, 1)
            for part in (query[first:end], key[first_key:end_key], value[first_key:end_key])
        )
        is_before = torch.ones(q.size(1), k.size(1), dtype=torch.bool, device=q.device)
        output = F.scaled_dot_product_attention(
            q[None],
            k[None],
            v[None],
            attn_mask=is_before.tril(k.size(1) - q.size(1)),
            scale=scale,
            enable_gqa=q.size(0) != k.size(0),
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, groups: LengthGroups, scale: float
) -> Tensor:
    """Return causal attention [T, h, d], one call per distinct length of sequence."""
    if groups.order is not None and groups.inverse is not None:
        query, key, value = (
            _permute(tensor, groups.order, groups.inverse) for tensor in (query, key, value)
        )
    num_tokens = [count * length for count, length in groups.sizes]
    parts = zip(*(torch.split(tensor, num_tokens) for tensor in (query, key, value)), strict=True)
    outputs = []
    for (count, length), qkv in zip(groups.sizes, parts, strict=True):
        q, k, v = (part.unflatten(0, (count, length)).transpose(1, 2) for part in qkv)
        output = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.size(1) != k.size(1)
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    output = torch.cat(outputs)
    if groups.order is not None and groups.inverse is not None:
        output = _permute(output, groups.inverse, groups.order)
    return output


def _permute(tensor: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    permuted: Tensor = _Permute.apply(tensor, order, inverse)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return permuted


class _Permute(torch.autograd.Function):
    """Reorders rows; the gradient is the inverse gather, where torch's own would add up rows."""

    @staticmethod
    @override
    def forward(
        ctx: torch.autograd.function.FunctionCtx, tensor: Tensor, order: Tensor, inverse: Tensor
    ) -> Tensor:
        ctx.save_for_backward(inverse)
        return tensor.index_select(0, order)

    @staticmethod
    @override
    def backward(
        ctx: torch.autograd.function.BackwardCFunction, grad: Tensor
    ) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None
