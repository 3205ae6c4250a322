"""Log-probabilities of chosen tokens and entropy, from logits that are split over ranks.

Shapes: T tokens of all sequences laid end to end, V columns of logits over all ranks (the
vocabulary, padded to a multiple of the ranks), V/tp columns of this rank.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

PADDED_LOGIT = -1e30  # probability 0; finite, so that 0 * logit is 0 and not NaN


def vocab_parallel_logprobs(
    logits: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target token and the entropy at each position.

    The logits are never gathered: each rank sends three numbers per token. Both results are
    differentiable, and equal on all ranks of the group.

    Args:
        logits: [T, V/tp] of any float type; rank r holds columns r*V/tp to (r+1)*V/tp.
        target: [T] int64, below ``vocab_size``.
        group: the ranks that the columns are split over; None if this rank holds all of them.
        vocab_size: columns from here on are padding, with probability 0; None if there are none.

    Returns:
        logprobs [T] float32 and entropy [T] float32, in nats.
    """
    split = group if group is not None and group.size() > 1 else None
    logprobs, entropy = _VocabParallelLogprobs.apply(logits, target, split, vocab_size)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return logprobs, entropy


class _Context(Protocol):
    """What autograd offers to the two passes of a function."""

    logits_dtype: torch.dtype
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: _Context,
        logits: Tensor,
        target: Tensor,
        group: dist.ProcessGroup | None,
        vocab_size: int | None,
    ) -> tuple[Tensor, Tensor]:
        num_columns = logits.size(-1)
        first_column = group.rank() * num_columns if group is not None else 0
        shifted = _mask_padding(logits.float(), first_column, vocab_size)
        largest = shifted.amax(-1)
        if group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = shifted - largest.unsqueeze(-1)

        column = target - first_column
        is_here = (column >= 0) & (column < num_columns)
        column = column.clamp(0, num_columns - 1).unsqueeze(-1)
        chosen = shifted.gather(-1, column).squeeze(-1) * is_here
        weights = shifted.exp()
        sums = torch.stack([weights.sum(-1), (weights * shifted).sum(-1), chosen])
        if group is not None:
            dist.all_reduce(sums, group=group)
        total, weighted, chosen = sums.unbind()
        log_total = total.log()
        entropy = log_total - weighted / total

        all_logprobs = shifted.sub_(log_total.unsqueeze(-1))
        ctx.save_for_backward(all_logprobs, column, is_here, entropy)
        ctx.logits_dtype = logits.dtype
        ctx.set_materialize_grads(False)
        return chosen - log_total, entropy

    @staticmethod
    @override
    def backward(
        ctx: _Context, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        all_logprobs, column, is_here, entropy = ctx.saved_tensors
        probabilities = all_logprobs.exp()
        grad = torch.zeros_like(all_logprobs)
        if grad_entropy is not None:
            surprise = all_logprobs + entropy.unsqueeze(-1)
            grad = -grad_entropy.unsqueeze(-1) * probabilities * surprise
        if grad_logprobs is not None:
            grad -= probabilities * grad_logprobs.unsqueeze(-1)
            grad.scatter_add_(-1, column, (grad_logprobs * is_here).unsqueeze(-1))
        return grad.to(ctx.logits_dtype), None, None, None


def _mask_padding(logits: Tensor, first_column: int, vocab_size: int | None) -> Tensor:
    """Return the logits with the columns from ``vocab_size`` on at probability 0."""
    num_columns = logits.size(-1)
    if vocab_size is None or first_column + num_columns <= vocab_size:
        return logits
    columns = torch.arange(first_column, first_column + num_columns, device=logits.device)
    return logits.masked_fill(columns >= vocab_size, PADDED_LOGIT)
