"""What is computed from a chunk of logits: statistics of its columns, and their gradient.

Each has two forms: a Triton kernel that reads the logits once (triton_logits.py), and torch's
operators, which take a few rows at a time, so that all but the first read of them meet a cache.

Shapes: T tokens, c columns of the chunk.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from slipstream.algos.kernels import FusedOperator
from slipstream.algos.logprobs.chunks import PADDED_LOGIT, Chunk, LogitGradients

_BLOCK_BYTES = 2**20  # size of the rows that torch's operators take at a time


def _statistics_by_kernel(chunk: Chunk) -> Tensor:
    from slipstream.algos.logprobs import triton_logits  # needs Triton

    return triton_logits.statistics(chunk)


def _statistics_by_operators(chunk: Chunk) -> Tensor:
    found = chunk.logits.new_empty(5, len(chunk.logits))
    for rows in _blocks(chunk.logits):
        target = chunk.target[rows]
        x, y = chunk.tempered(rows), chunk.tempered_others(rows)
        at, is_here = _within(target, x)
        is_free = is_here & (chunk.logits[rows].gather(-1, at) > PADDED_LOGIT / 2)
        chosen = x.gather(-1, at).where(is_free, PADDED_LOGIT).squeeze(-1)
        found[:, rows] = _statistics_of(x, chosen, y)
    return found


def _statistics_of(x: Tensor, chosen: Tensor, y: Tensor | None) -> Tensor:
    largest = x.amax(-1)
    below = x - largest.unsqueeze(-1)
    weights = below.exp()
    total = weights.sum(-1)
    log_total = total.log()
    mean = below.mul_(weights).sum(-1) / total
    other_log_sum = kl = torch.zeros_like(total)
    if y is not None:
        other_largest = y.amax(-1)
        other_below = y - other_largest.unsqueeze(-1)
        other_log_total = other_below.exp().sum(-1).log()
        other_log_sum = other_largest + other_log_total
        other_mean = other_below.mul_(weights).sum(-1) / total
        kl = mean - other_mean - log_total + other_log_total
    return torch.stack([largest + log_total, chosen, log_total - mean, other_log_sum, kl])


statistics = FusedOperator(
    "statistics of logits", kernel=_statistics_by_kernel, operators=_statistics_by_operators
)
"""chunk -> statistics of its columns alone, [5, T].

Log of the sum of exp, the target's logit (PADDED_LOGIT if it is not here or cannot be chosen),
entropy, log of the reference's sum of exp (0 without one), KL. The logits stay as they are.
"""


def _gradients_by_kernel(chunk: Chunk, rows: LogitGradients, dtype: torch.dtype) -> Tensor:
    from slipstream.algos.logprobs import triton_logits  # needs Triton

    return triton_logits.gradients(chunk, rows, dtype)


def _gradients_by_operators(chunk: Chunk, rows: LogitGradients, dtype: torch.dtype) -> Tensor:
    logits = chunk.logits
    found = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    for block in _blocks(logits):
        all_logprobs = chunk.tempered(block) - rows.log_total[block, None]
        probabilities = all_logprobs.exp()
        # Values as large as PADDED_LOGIT meet their probability 0 first: they cannot overflow.
        grad = probabilities * -rows.by_all[block, None]
        at, is_here = _within(chunk.target[block], grad)
        grad.scatter_add_(-1, at, rows.by_target[block, None] * is_here)
        others = chunk.tempered_others(block)
        if rows.by_kl is not None and others is not None:
            gap = all_logprobs - others
            gap.add_(rows.gap_offset[block, None]).mul_(probabilities)
            grad.addcmul_(gap, rows.by_kl[block, None])
        if rows.by_entropy is not None:
            surprise = all_logprobs.add_(rows.entropy[block, None]).mul_(probabilities)
            grad.addcmul_(surprise, rows.by_entropy[block, None], value=-1)
        found[block] = grad
    return found


gradients = FusedOperator(
    "gradients of logits", kernel=_gradients_by_kernel, operators=_gradients_by_operators
)
"""(chunk, rows, dtype) -> gradient by the products that the logits are, [T, c] of ``dtype``.

It consumes the logits: where ``dtype`` is theirs the gradient takes their place.
"""


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Return slices of rows that fill ``_BLOCK_BYTES``; all of them where shapes are symbols."""
    size = len(logits)
    if torch.compiler.is_compiling() or logits.is_cuda:
        return iter([slice(0, size)])
    count = max(1, _BLOCK_BYTES // max(1, logits[:1].nbytes))
    return (slice(at, min(at + count, size)) for at in range(0, size, count))


def _within(target: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return columns [T, 1] that the logits [T, c] have, and where they are the ones asked for."""
    at = target.clamp(0, logits.shape[-1] - 1)
    return at.unsqueeze(-1), (at == target).unsqueeze(-1)
