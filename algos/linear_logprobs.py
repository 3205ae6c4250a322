"""Log-probabilities, entropy and KL from hidden states: logits exist a part of them at a time.

A vocabulary of 150,000 makes the logits of 8,000 tokens 5 GB in float32, and autograd keeps them
more than once. Here all tokens are multiplied by a chunk of the output weights' rows at a time,
reduced to a few numbers per token and forgotten; the backward pass multiplies once more. Chunks are
of the vocabulary and not of tokens, so that a row's gradient is one matrix product over all tokens,
summed in float32 inside of it and written once in the weights' type: no sum of them in float32. The
weights may be split over ranks by rows, as tensor parallelism does: each rank sends a few numbers
per token, once, and the backward pass sends nothing.

With p the softmax of a token's logits x, H its entropy, q the reference's softmax, and K =
KL(p || q), the gradients by logit j of the log-probability of token k, of H and of K are

    [j = k] - p_j        -p_j (log p_j + H)        p_j (log p_j - log q_j - K)

Split into parts of the columns, p is a choice of a part (share s_r) and of a column there (p_r), so
that H = sum_r s_r (H_r - log s_r) and K = sum_r s_r (K_r + log s_r - log t_r), t_r being q's share.
So are chunks joined, and then ranks.

Shapes: T tokens, H hidden size, V rows of output weights over all ranks, V/tp of this rank, c rows
of a chunk (columns of the logits), R parts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

PADDED_LOGIT = -1e30  # probability 0; finite, so that 0 * logit is 0 and not NaN
_COMPILES = torch.__version__ >= "2.13"
CHUNK_BYTES = 64 * 2**20  # size of one chunk's logits in float32, on a CPU
CUDA_CHUNK_BYTES = 512 * 2**20  # fewer passes over the sum of the hidden states' gradient
MIN_CHUNK_COLUMNS = 1024  # however many tokens: those passes are V / c, over T rows

_NO_COLUMNS = (PADDED_LOGIT, PADDED_LOGIT, 0.0, PADDED_LOGIT, 0.0)  # _part of no columns


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLayer:
    """The last layer of a model on this rank, and its barred and padding tokens."""

    weight: Tensor  # [V/tp, H] rank r holds rows r*V/tp to (r+1)*V/tp
    group: dist.ProcessGroup | None = None  # ranks that the rows are split over
    vocab_size: int | None = None  # rows from here on are padding, with probability 0
    barred_ids: tuple[int, ...] = ()  # tokens with probability 0 where ``barred`` is True

    @property
    def split(self) -> dist.ProcessGroup | None:
        """Ranks that share the vocabulary; None if there are no others."""
        return self.group if self.group is not None and self.group.size() > 1 else None

    @property
    def first_row(self) -> int:
        """Token id of this rank's first row."""
        return self.split.rank() * len(self.weight) if self.split is not None else 0


class Kept(NamedTuple):
    """Which tokens a sampler kept (top-k, top-p, min-p); K of them for all T tokens together."""

    is_truncated: Tensor  # [T] bool, False where it left none out
    rows: Tensor  # [K] int64, the token that a kept one is for, 0 to T - 1
    ids: Tensor  # [K] int64

    def before(self) -> "Kept":
        """Return them for the hidden states that choose: one index lower, that of 0 is the last."""
        count = len(self.is_truncated)
        return Kept(self.is_truncated.roll(-1), (self.rows - 1) % max(count, 1), self.ids)


class TokenLogprobs(NamedTuple):
    """A distribution at each token. Shapes [T] float32 (float64 of float64), in nats."""

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
    kept: Kept | None = None,
    reference: Reference | None = None,
    chunk_columns: int | None = None,
) -> TokenLogprobs:
    """Return the log-probability of each target, the entropy, and the KL from a reference.

    All are of softmax(hidden @ weight.T / temperature), differentiable (once) by hidden and weight,
    and equal on all ranks. The gradient by ``hidden`` is this rank's share: a caller that splits
    the rows sums it over ranks, as Megatron's copy to the tensor-parallel region does.

    On one rank, torch.compile takes it whole, but unrolls the chunks, and a compiler may
    keep logits for the backward pass: to save memory, leave it out of compiled regions. Before
    torch 2.13 compiled gradients are wrong: there it ends the region that is compiled.

    Args:
        hidden: [T, H] of any float type.
        layer: the output layer.
        target: [T] int64 token ids; the result for other numbers is finite and meaningless.
        temperature: [T], 1 if None.
        barred: [T] bool, where ``layer.barred_ids`` cannot be chosen; nowhere if None.
        kept: tokens that can be chosen; all if None.
        reference: the other policy of the KL; tempered, barred and truncated alike.
        chunk_columns: columns of this rank whose logits exist at a time; None fills CHUNK_BYTES
            (CUDA_CHUNK_BYTES), with MIN_CHUNK_COLUMNS at least.
    """
    if torch.compiler.is_compiling() and not _COMPILES:
        raise RuntimeError(
            f"torch {torch.__version__} compiles wrong gradients of linear_logprobs: torch >= 2.13 "
            "is needed where all is to be one graph"
        )
    if chunk_columns is None:
        chunk_columns = _columns_of_a_chunk(hidden)
    other = None
    if reference is not None:
        sampling = _Sampling.of(reference.layer, temperature, barred, kept)
        other = _Frozen(reference.hidden.detach(), reference.layer.weight.detach(), sampling)
    logprobs, entropy, kl = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]  # torch leaves apply untyped
        hidden,
        layer.weight,
        target,
        _Sampling.of(layer, temperature, barred, kept),
        other,
        layer.split,
        chunk_columns,
    )
    return TokenLogprobs(logprobs, entropy, kl)


@torch.no_grad()
def squared_probabilities(
    hidden: Tensor,
    layer: OutputLayer,
    *,
    temperature: Tensor | None = None,
    barred: Tensor | None = None,
    kept: Kept | None = None,
) -> Tensor:
    """Return the sum over the vocabulary of p^2 at each token, without gradient. [T, H] -> [T].

    The chance that two draws are equal. Arguments as for ``linear_logprobs``; equal on all ranks.
    """
    sampling = _Sampling.of(layer, temperature, barred, kept)
    log_sums = hidden.new_full((2, len(hidden)), -torch.inf, dtype=torch.float64)
    for chunk in _chunks(len(layer.weight), _columns_of_a_chunk(hidden)):
        logits = sampling.logits(hidden, layer.weight, chunk)
        once = logits.logsumexp(-1)
        part = torch.stack([once, logits.mul_(2.0).logsumexp(-1)]).double()
        log_sums = torch.logaddexp(log_sums, part)
    log_sum, log_sum_of_squares = _gathered(log_sums, layer.split).logsumexp(0)
    squares: Tensor = (log_sum_of_squares - 2.0 * log_sum).exp()
    return squares if hidden.dtype == torch.float64 else squares.float()


@dataclass(frozen=True, slots=True)
class _Sampling:
    """Makes the logits of this rank's columns, alike in both passes."""

    temperature: Tensor | None  # [T]
    barred: Tensor | None  # [T] bool
    barred_columns: tuple[int, ...]  # this rank's
    num_real: int  # columns from here on are padding
    first_row: int
    kept: Kept | None

    @classmethod
    def of(
        cls,
        layer: OutputLayer,
        temperature: Tensor | None,
        barred: Tensor | None,
        kept: Kept | None,
    ) -> Self:
        """Return the sampling of a layer's tokens."""
        first, rows = layer.first_row, len(layer.weight)
        last = first + rows if layer.vocab_size is None else layer.vocab_size
        here = tuple(i - first for i in layer.barred_ids if first <= i < first + rows)
        return cls(temperature, barred, here, min(max(last - first, 0), rows), first, kept)

    def logits(self, hidden: Tensor, weight: Tensor, chunk: slice) -> Tensor:
        """Return a chunk's logits, in memory of their own. Shapes [T, H], [V/tp, H] -> [T, c]."""
        logits = _product(hidden, weight[chunk].t())
        if self.temperature is not None:
            logits.div_(self.temperature.unsqueeze(-1))
        if self.num_real < chunk.stop:
            logits[:, max(self.num_real - chunk.start, 0) :] = PADDED_LOGIT
        if self.barred is not None:
            for column in self.barred_columns:
                if chunk.start <= column < chunk.stop:
                    logits[:, column - chunk.start].masked_fill_(self.barred, PADDED_LOGIT)
        if self.kept is not None:
            logits.masked_fill_(self._left_out(self.kept, chunk), PADDED_LOGIT)
        return logits

    def _left_out(self, kept: Kept, chunk: slice) -> Tensor:
        """Return where a chunk's tokens cannot be chosen, [T, c] bool."""
        size = chunk.stop - chunk.start
        left_out = kept.is_truncated.unsqueeze(-1).repeat(1, size + 1)  # a column for all others
        column = kept.ids - self.first_row - chunk.start
        is_here = (column >= 0) & (column < size)
        left_out[kept.rows, column.where(is_here, size)] = False
        return left_out[:, :size]

    def untempered(self, by_logits: Tensor) -> Tensor:
        """Scale a gradient by logits, [T], to one by the product before them, [T, 1]."""
        by_product = by_logits if self.temperature is None else by_logits / self.temperature
        return by_product.unsqueeze(-1)


class _Frozen(NamedTuple):
    """The reference's side: makes its logits."""

    hidden: Tensor  # [T, H of that model]
    weight: Tensor  # [V/tp, H of that model]
    sampling: _Sampling

    def logits(self, chunk: slice) -> Tensor:
        """Return a chunk's logits, in memory of their own. Shapes [T, c]."""
        return self.sampling.logits(self.hidden, self.weight, chunk)


class _Context(Protocol):
    """Autograd's context of the two passes of a function."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    sampling: _Sampling
    reference: _Frozen | None
    chunk_columns: int

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
        chunk_columns: int,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        num_rows = len(weight) * (1 if group is None else group.size())
        column = target.clamp(0, num_rows - 1) - sampling.first_row  # may be of another rank
        own = hidden.new_tensor(_NO_COLUMNS, dtype=torch.float64).unsqueeze(-1)
        own = own.expand(-1, len(hidden))  # float64: nothing is lost by joining many chunks
        for chunk in _chunks(len(weight), chunk_columns):
            logits = sampling.logits(hidden, weight, chunk)
            others = reference.logits(chunk) if reference is not None else None
            part = _part(logits, column - chunk.start, others)
            own = _joined(torch.stack([own, part.double()]))
        log_total, logit, entropy, other_total, kl = _joined(_gathered(own, group)).unbind()
        logprobs = logit - log_total

        # A target that is barred or padding has a constant for its logit: no gradient.
        is_free = logit > PADDED_LOGIT / 2
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs, log_total, entropy, kl, gap_offset = (
            tensor.to(exact) for tensor in (logprobs, log_total, entropy, kl, other_total - kl)
        )
        ctx.save_for_backward(hidden, weight, column, is_free, log_total, entropy, gap_offset)
        ctx.sampling, ctx.reference, ctx.chunk_columns = sampling, reference, chunk_columns
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
        by_hidden = torch.zeros_like(hidden, dtype=log_total.dtype) if needs_hidden else None
        by_weight = torch.empty_like(weight) if needs_weight else None
        none = torch.zeros_like(log_total)
        by_chosen = ctx.sampling.untempered(none if by_logprobs is None else by_logprobs)
        by_entropy = None if by_entropy is None else ctx.sampling.untempered(by_entropy)
        by_kl = None if by_kl is None else ctx.sampling.untempered(by_kl)
        for chunk in _chunks(len(weight), ctx.chunk_columns):
            logits = ctx.sampling.logits(hidden, weight, chunk)
            all_logprobs = logits.sub_(log_total.unsqueeze(-1))
            probabilities = all_logprobs.exp()
            # Values as large as PADDED_LOGIT meet their probability 0 first: they cannot overflow.
            grad = probabilities * -by_chosen
            at, is_here = _within(column - chunk.start, grad)
            grad.scatter_add_(-1, at, by_chosen * (is_free.unsqueeze(-1) & is_here))
            if by_kl is not None and ctx.reference is not None:
                gap = all_logprobs - ctx.reference.logits(chunk)
                gap.add_(gap_offset.unsqueeze(-1)).mul_(probabilities)
                grad.addcmul_(gap, by_kl)
            if by_entropy is not None:
                surprise = all_logprobs.add_(entropy.unsqueeze(-1)).mul_(probabilities)
                grad.addcmul_(surprise, by_entropy, value=-1)
            sent = grad.to(hidden.dtype)
            if by_hidden is not None:
                _add_product(by_hidden, sent, weight[chunk])
            if by_weight is not None:
                torch.mm(sent.t(), hidden, out=by_weight[chunk])
        by_hidden = None if by_hidden is None else by_hidden.to(hidden.dtype)
        return by_hidden, by_weight, None, None, None, None, None


def _columns_of_a_chunk(hidden: Tensor) -> int:
    """Return the number of columns whose logits, in float32, fill a chunk."""
    chunk_bytes = CUDA_CHUNK_BYTES if hidden.is_cuda else CHUNK_BYTES
    return max(MIN_CHUNK_COLUMNS, chunk_bytes // (4 * max(1, len(hidden))))


def _chunks(num_columns: int, chunk_columns: int) -> Iterator[slice]:
    starts = range(0, num_columns, chunk_columns)
    return (slice(at, min(at + chunk_columns, num_columns)) for at in starts)


def _within(column: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return columns [T, 1] that the logits [T, c] have, and where they are the ones asked for."""
    at = column.clamp(0, logits.shape[-1] - 1)
    return at.unsqueeze(-1), (at == column).unsqueeze(-1)


def _part(logits: Tensor, column: Tensor, others: Tensor | None) -> Tensor:
    """Return the statistics of these columns alone; consumes the logits.

    Args:
        logits: [T, c].
        column: [T] of the target, if it is one of these.
        others: [T, c] of the reference.

    Returns:
        [5, T]: log of the sum of exp, the target's logit (PADDED_LOGIT if it is not here), entropy,
        log of the reference's sum of exp, KL.
    """
    at, is_here = _within(column, logits)
    chosen = logits.gather(-1, at).where(is_here, PADDED_LOGIT).squeeze(-1)
    other_largest = other_log_sum = torch.zeros_like(chosen)
    if others is not None:
        other_largest = others.amax(-1)
        other_log_sum = others.sub_(other_largest.unsqueeze(-1)).exp().sum(-1).log()
    largest = logits.amax(-1)
    weights = logits.sub_(largest.unsqueeze(-1)).exp()
    total = weights.sum(-1)
    log_sum = total.log()
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


def _joined(parts: Tensor) -> Tensor:
    """Return the statistics of all parts of the columns together. Shapes [R, 5, T] -> [5, T]."""
    log_sums, logits, entropies, other_log_sums, kls = parts.unbind(1)
    log_total, other_total = log_sums.logsumexp(0), other_log_sums.logsumexp(0)
    log_shares, other_log_shares = log_sums - log_total, other_log_sums - other_total
    shares = log_shares.exp()
    entropy = (shares * (entropies - log_shares)).sum(0)
    kl = (shares * (kls + log_shares - other_log_shares)).sum(0)
    return torch.stack([log_total, logits.amax(0), entropy, other_total, kl])


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return a matrix product of narrow types in float32: it is never rounded to theirs.

    A logit of 10 in bfloat16 is off by up to 0.03 nats, which is more than a policy moves in a
    step.
    """
    if left.dtype in {torch.float32, torch.float64}:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()  # a CPU has no product of a wider type than its factors


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a matrix product to a total that may be of a wider type."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(_product(left, right))
