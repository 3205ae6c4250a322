"""Attention over sequences of different lengths, those of one length together.

On a CPU a batch has hundreds of short sequences but few distinct lengths; they are grouped once per
microbatch.

Shapes: T tokens of B sequences; h query heads and g key and value heads, d channels per head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor
from typing_extensions import override


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


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: LengthGroups,
    scale: float,
    *,
    is_causal: bool = True,
) -> Tensor:
    """Return attention [T, h, d], causal or not, one call per distinct length of sequence."""
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
            q, k, v, is_causal=is_causal, scale=scale, enable_gqa=q.size(1) != k.size(1)
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
