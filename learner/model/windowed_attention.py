"""Attention with windows and sinks over packed sequences, by the blocks of ring attention.

A query sees the last tokens of a window alone. A sink is one more score of a query head, of a key
without a value: with L the log-sum-exp of the scores and s the sink, attention of a query
is multiplied by sigmoid(L - s) (OpenAI 2025, arXiv:2508.10925, section 2.2). With sinks joined to
the log-sum-exps, kernels compute the gradients of queries, keys and values as they are.

Shapes: T tokens of B sequences; h query heads, g key and value heads, d channels per head.
"""

import torch
from torch import Tensor
from typing_extensions import override

from slipstream.learner.model.cuda_attention import AttentionBounds, has_kernel
from slipstream.learner.model.ring_attention import FEWEST_QUERIES, Blocks


def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: AttentionBounds,
    scale: float,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return causal attention [Q, h, d] for query [Q, h, d], key and value [T, g, d].

    Args:
        query: queries of Q tokens.
        key: keys of all tokens.
        value: values of all tokens.
        bounds: bounds of the sequences.
        scale: factor of the scores.
        window: tokens that a query sees at most, its own the last; None is all.
        sinks: [h], the sink of each query head; None: no sinks.
    """
    blocks = Blocks(scale, has_kernel(query), window)
    bounds = bounds._replace(max_queries=max(FEWEST_QUERIES, bounds.max_queries))
    output: Tensor = _WindowedAttention.apply(query, key, value, sinks, bounds, blocks)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return output


class _WindowedAttention(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        bounds: AttentionBounds,
        blocks: Blocks,
    ) -> Tensor:
        output, sums = blocks.attend(query, key, value, bounds, is_causal=True)
        if sinks is not None:
            joined = torch.logaddexp(sums, sinks.to(sums))
            output = (output * (sums - joined).exp()[..., None]).to(query.dtype)
            sums = joined
        ctx.save_for_backward(query, key, value, sinks, output, sums)  # type: ignore[arg-type]  # takes None
        ctx.of = bounds, blocks  # type: ignore[attr-defined]  # torch's way
        return output

    @staticmethod
    @override
    def backward(
        ctx: torch.autograd.function.BackwardCFunction, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None]:
        query, key, value, sinks, output, sums = ctx.saved_tensors  # type: ignore[misc]  # torch's way
        bounds, blocks = ctx.of  # type: ignore[attr-defined]
        grad = grad.contiguous()
        asked = grad, query, output, sums
        gradients = blocks.gradients(asked, key, value, bounds, is_causal=True)
        of_sinks = None
        if sinks is not None:
            shares = (sinks.to(sums) - sums).exp()  # [Q, h], what sinks take of the softmax
            means = torch.einsum("qhd,qhd->qh", grad.to(sums), output.to(sums))
            of_sinks = -(shares * means).sum(0).to(sinks.dtype)
        return *gradients, of_sinks, None, None
