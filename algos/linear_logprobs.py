"""Log-probabilities, entropy and KL from hidden states: logits exist a few tokens at a time.

A vocabulary of 150,000 makes the logits of 8,000 tokens 5 GB in float32, and autograd keeps them
more than once. Here each chunk of tokens is multiplied by the output weights, reduced to a few
numbers per token and forgotten; the backward pass multiplies once more. The weights may be split
over ranks by rows, as tensor parallelism does: each rank sends a few numbers per token, once, and
the backward pass sends nothing.

With p the softmax of a token's logits x, H its entropy, q the reference's softmax, and K =
KL(p || q), the gradients by logit j of the log-probability of token k, of H and of K are

    [j = k] - p_j        -p_j (log p_j + H)        p_j (log p_j - log q_j - K)

Split into the ranks' columns, p is a choice of a rank (share s_r) and of a column there (p_r), so
that H = sum_r s_r (H_r - log s_r) and K = sum_r s_r (K_r + log s_r - log t_r), t_r being q's share.

Shapes: T tokens, c tokens of a chunk, H hidden size, V rows of output weights over all ranks, V/tp
of this rank, R ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from algos.ratios import upcast

PADDED_LOGIT = -1e30  # probability 0; finite, so that 0 * logit is 0 and not NaN
CHUNK_BYTES = 64 * 2**20  # of one chunk's logits in float32, on a CPU
CUDA_CHUNK_BYTES = 512 * 2**20  # fewer passes over the sum of the weights' gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLayer:
    """The last layer of a model on this rank, and what is barred or padding in it."""

    weight: Tensor  # [V/tp, H] rank r holds rows r*V/tp to (r+1)*V/tp
    group: dist.ProcessGroup | None = None  # ranks that the rows are split over
    vocab_size: int | None = None  # rows from here on are padding, with probability 0
    barred_ids: tuple[int, ...] = ()  # tokens with probability 0 where ``barred`` says so

    @property
    def split(self) -> dist.ProcessGroup | None:
        """Return the ranks to talk to, None if there are none."""
        return self.group if self.group is not None and self.group.size() > 1 else None

    @property
    def first_row(self) -> int:
        """Return the token id of this rank's first row."""
        return self.split.rank() * len(self.weight) if self.split is not None else 0


class TokenLogprobs(NamedTuple):
    """What a distribution says at each token. Shapes [T] float32 (float64 of float64), in nats."""

    logprobs: Tensor
    entropy: Tensor
    kl: Tensor | None = None  # KL(this || reference)


class Reference(NamedTuple):
    """Another model's hidden states at the same tokens, and its output layer; no gradient."""

    hidden: Tensor  # [T, H of that model]
    layer: OutputLayer  # split over the same ranks


def linear_logprobs(
    hidden: Tensor,
    layer: OutputLayer,
    target: Tensor,
    *,
    temperature: Tensor | None = None,
    barred: Tensor | None = None,
    reference: Reference | None = None,
    chunk_tokens: int | None = None,
) -> TokenLogprobs:
    """Return the log-probability of each target, the entropy, and the KL from a reference.

    All are of softmax(hidden @ weight.T / temperature), differentiable (once) by hidden and weight,
    and equal on all ranks. The gradient by ``hidden`` is this rank's share: whoever splits the rows
    sums it over ranks, as Megatron's copy to the tensor-parallel region does.

    On one rank, torch.compile takes it whole, but unrolls the chunks for each T, and a compiler may
    keep logits for the backward pass: to save memory, leave it out of compiled regions.

    Args:
        hidden: [T, H] of any float type.
        layer: the output layer.
        target: [T] int64 token ids; what is said of other numbers is finite and means nothing.
        temperature: [T], 1 if None.
        barred: [T] bool, where ``layer.barred_ids`` cannot be chosen; nowhere if None.
        reference: what KL is taken from; tempered and barred alike.
        chunk_tokens: tokens whose logits exist at a time; None fills CHUNK_BYTES
            (CUDA_CHUNK_BYTES).
    """
    if chunk_tokens is None:
        chunk_tokens = _tokens_of_a_chunk(hidden, layer)
    other = None
    if reference is not None:
        sampling = _Sampling.of(reference.layer, temperature, barred)
        other = _Frozen(reference.hidden.detach(), reference.layer.weight.detach(), sampling)
    logprobs, entropy, kl = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]  # torch leaves apply untyped
        hidden,
        layer.weight,
        target,
        _Sampling.of(layer, temperature, barred),
        other,
        layer.split,
        chunk_tokens,
    )
    return TokenLogprobs(logprobs, entropy, kl)


@torch.no_grad()
def squared_probabilities(
    hidden: Tensor,
    layer: OutputLayer,
    *,
    temperature: Tensor | None = None,
    barred: Tensor | None = None,
) -> Tensor:
    """Return the sum over the vocabulary of p^2 at each token, without gradient. [T, H] -> [T].

    The chance that two draws are equal. Arguments as for ``linear_logprobs``; equal on all ranks.
    """
    sampling = _Sampling.of(layer, temperature, barred)
    exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    part = hidden.new_empty(2, len(hidden), dtype=exact)
    for chunk in _chunks(len(hidden), _tokens_of_a_chunk(hidden, layer)):
        logits = sampling.logits(hidden, layer.weight, chunk)
        part[0, chunk] = logits.logsumexp(-1)
        part[1, chunk] = logits.mul_(2.0).logsumexp(-1)
    log_sum, log_sum_of_squares = _gathered(part, layer.split).logsumexp(0)
    squares: Tensor = (log_sum_of_squares - 2.0 * log_sum).exp()
    return squares


@dataclass(frozen=True, slots=True)
class _Sampling:
    """How tokens are chosen from this rank's columns: makes the logits, alike in both passes."""

    temperature: Tensor | None  # [T]
    barred: Tensor | None  # [T] bool
    barred_columns: Tensor | None  # int64, columns of this rank
    num_real: int  # columns from here on are padding
    first_row: int

    @classmethod
    def of(cls, layer: OutputLayer, temperature: Tensor | None, barred: Tensor | None) -> Self:
        """Return how a layer's tokens are chosen."""
        first, rows = layer.first_row, len(layer.weight)
        last = first + rows if layer.vocab_size is None else layer.vocab_size
        here = [i - first for i in layer.barred_ids if first <= i < first + rows]
        columns = None
        if barred is not None and here:
            columns = torch.tensor(here, device=layer.weight.device)
        return cls(temperature, barred, columns, min(max(last - first, 0), rows), first)

    def logits(self, hidden: Tensor, weight: Tensor, chunk: slice) -> Tensor:
        """Return the logits of a chunk, in memory of their own. [T, H], [V/tp, H] -> [c, V/tp]."""
        logits = upcast(hidden[chunk] @ weight.t())
        if self.temperature is not None:
            logits.div_(self.temperature[chunk].unsqueeze(-1))
        if self.num_real < len(weight):
            logits[:, self.num_real :] = PADDED_LOGIT
        if self.barred is not None and self.barred_columns is not None:
            free = logits[:, self.barred_columns]
            logits[:, self.barred_columns] = free.masked_fill(
                self.barred[chunk].unsqueeze(-1), PADDED_LOGIT
            )
        return logits

    def untempered(self, by_logits: Tensor) -> Tensor:
        """Return what a gradient by logits, [T], is to the product before them, [T, 1]."""
        by_product = by_logits if self.temperature is None else by_logits / self.temperature
        return by_product.unsqueeze(-1)


class _Frozen(NamedTuple):
    """The reference's side: makes its logits."""

    hidden: Tensor  # [T, H of that model]
    weight: Tensor  # [V/tp, H of that model]
    sampling: _Sampling

    def logits(self, chunk: slice) -> Tensor:
        """Return the logits of a chunk, in memory of their own. Shapes [c, V/tp]."""
        return self.sampling.logits(self.hidden, self.weight, chunk)


class _Context(Protocol):
    """What autograd offers to the two passes of a function."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    sampling: _Sampling
    reference: _Frozen | None
    chunk_tokens: int

    def save_for_backward(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: _Context,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        sampling: _Sampling,
        reference: _Frozen | None,
        group: dist.ProcessGroup | None,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        column = target - sampling.first_row
        is_here = (column >= 0) & (column < len(weight))
        column = column.clamp(0, len(weight) - 1).unsqueeze(-1)
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        part = hidden.new_empty(5, len(hidden), dtype=exact)
        for chunk in _chunks(len(hidden), chunk_tokens):
            logits = sampling.logits(hidden, weight, chunk)
            others = reference.logits(chunk) if reference is not None else None
            part[:, chunk] = _part(logits, column[chunk], others)

        ranks = _gathered(part, group)
        log_total, log_shares = _shares(ranks[:, 0])
        other_total, other_log_shares = _shares(ranks[:, 3])
        shares = log_shares.exp()
        rank = (target // len(weight)).clamp(0, len(ranks) - 1).unsqueeze(0)
        logprobs = (ranks[:, 1] + log_shares).gather(0, rank).squeeze(0)
        entropy = (shares * (ranks[:, 2] - log_shares)).sum(0)
        kl = (shares * (ranks[:, 4] + log_shares - other_log_shares)).sum(0)

        # A target that is barred or padding has a constant for its logit: no gradient.
        is_free = is_here & (part[1] > PADDED_LOGIT / 2)
        gap_offset = other_total - kl
        ctx.save_for_backward(hidden, weight, column, is_free, log_total, entropy, gap_offset)
        ctx.sampling, ctx.reference, ctx.chunk_tokens = sampling, reference, chunk_tokens
        ctx.set_materialize_grads(False)
        return logprobs, entropy, kl if reference is not None else None

    @staticmethod
    @once_differentiable
    @override
    def backward(
        ctx: _Context, by_logprobs: Tensor | None, by_entropy: Tensor | None, by_kl: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, column, is_free, log_total, entropy, gap_offset = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        by_hidden = torch.empty_like(hidden) if needs_hidden else None
        by_weight = torch.zeros_like(weight, dtype=log_total.dtype) if needs_weight else None
        none = torch.zeros_like(log_total)
        by_chosen = ctx.sampling.untempered(none if by_logprobs is None else by_logprobs)
        by_entropy = None if by_entropy is None else ctx.sampling.untempered(by_entropy)
        by_kl = None if by_kl is None else ctx.sampling.untempered(by_kl)
        for chunk in _chunks(len(hidden), ctx.chunk_tokens):
            logits = ctx.sampling.logits(hidden, weight, chunk)
            all_logprobs = logits.sub_(log_total[chunk].unsqueeze(-1))
            probabilities = all_logprobs.exp()
            # What is as large as PADDED_LOGIT meets its probability 0 first: it cannot overflow.
            grad = probabilities * -by_chosen[chunk]
            grad.scatter_add_(-1, column[chunk], by_chosen[chunk] * is_free[chunk, None])
            if by_kl is not None and ctx.reference is not None:
                gap = all_logprobs - ctx.reference.logits(chunk)
                gap.add_(gap_offset[chunk, None]).mul_(probabilities)
                grad.addcmul_(gap, by_kl[chunk])
            if by_entropy is not None:
                surprise = all_logprobs.add_(entropy[chunk, None]).mul_(probabilities)
                grad.addcmul_(surprise, by_entropy[chunk], value=-1)
            sent = grad.to(hidden.dtype)
            if by_hidden is not None:
                torch.mm(sent, weight, out=by_hidden[chunk])
            if by_weight is not None:
                _add_product(by_weight, sent.t(), hidden[chunk])
        by_weight = None if by_weight is None else by_weight.to(weight.dtype)
        return by_hidden, by_weight, None, None, None, None, None


def _tokens_of_a_chunk(hidden: Tensor, layer: OutputLayer) -> int:
    """Return how many tokens' logits, in float32, fill a chunk."""
    chunk_bytes = CUDA_CHUNK_BYTES if hidden.is_cuda else CHUNK_BYTES
    return max(1, chunk_bytes // (4 * len(layer.weight)))


def _chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    return (slice(at, at + chunk_tokens) for at in range(0, num_tokens, chunk_tokens))


def _part(logits: Tensor, column: Tensor, others: Tensor | None) -> Tensor:
    """Return what this rank's columns say, as if there were no others; consumes the logits.

    Args:
        logits: [c, V/tp].
        column: [c, 1] of the target.
        others: [c, V/tp] of the reference.

    Returns:
        [5, c]: log of the sum of exp, log-probability of the target, entropy, log of the
        reference's sum of exp, KL.
    """
    other_largest = other_log_sum = torch.zeros_like(logits[:, 0])
    if others is not None:
        other_largest = others.amax(-1)
        other_log_sum = others.sub_(other_largest.unsqueeze(-1)).exp().sum(-1).log()
    largest = logits.amax(-1)
    weights = logits.sub_(largest.unsqueeze(-1)).exp()
    total = weights.sum(-1)
    log_sum = total.log()
    chosen = logits.gather(-1, column).squeeze(-1) - log_sum
    if others is not None:
        gap = others.sub_(logits).neg_().mul_(weights).sum(-1) / total
        kl = gap - log_sum + other_log_sum
    else:
        kl = torch.zeros_like(total)
    entropy = log_sum - logits.mul_(weights).sum(-1) / total
    return torch.stack([largest + log_sum, chosen, entropy, other_largest + other_log_sum, kl])


def _gathered(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the parts of all ranks. Shapes [5, T] -> [R, 5, T]."""
    if group is None:
        return part.unsqueeze(0)
    parts = part.new_empty(group.size(), *part.shape)
    dist.all_gather(list(parts.unbind()), part, group=group)
    return parts


def _shares(log_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log of the sum over ranks [T], and the logs of the ranks' shares [R, T]."""
    log_total = log_sums.logsumexp(0)
    return log_total, log_sums - log_total


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a matrix product to a total that may be of a wider type."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
