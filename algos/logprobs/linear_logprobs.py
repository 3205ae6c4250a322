"""Log-probabilities, entropy and KL from hidden states: logits exist a part of them at a time.

A vocabulary of 150,000 makes the logits of 8,000 tokens 5 GB in float32, and autograd keeps them
more than once. Here all tokens are multiplied by a chunk of the output weights' rows at a time,
reduced to a few numbers per token and forgotten; the backward pass multiplies once more, unless all
logits fit KEPT_BYTES. Chunks are of the vocabulary and not of tokens, so that a row's gradient is
one matrix product over all tokens, summed in float32 inside of it and written once in the weights'
type: no sum of them in float32. The weights may be split over ranks by rows, as tensor parallelism
does: each rank sends a few numbers per token, once, and the backward pass sends nothing.

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
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from slipstream.algos.logprobs.chunks import PADDED_LOGIT, Chunk, LogitGradients, tempered
from slipstream.algos.logprobs.logits import gradients, statistics
from slipstream.algos.logprobs.sampling import Kept, OutputLayer, Sampling
from slipstream.algos.weight_gradients import add_weight_gradient, no_gradient

_COMPILES = torch.__version__ >= "2.13"
CHUNK_BYTES = 64 * 2**20  # size of one chunk's logits in float32, on a CPU
CUDA_CHUNK_BYTES = 512 * 2**20  # fewer passes over the sum of the hidden states' gradient
MIN_CHUNK_COLUMNS = 1024  # however many tokens: those passes are V / c, over T rows
KEPT_BYTES = 512 * 2**20  # size of all logits in float32 that are kept for the backward pass

_NO_COLUMNS = (PADDED_LOGIT, PADDED_LOGIT, 0.0, PADDED_LOGIT, 0.0)  # statistics of no columns


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
    logits_bytes = 4 * len(hidden) * len(layer.weight) * (1 if reference is None else 2)
    has_gradient = torch.is_grad_enabled() and (hidden.requires_grad or layer.weight.requires_grad)
    keeps = has_gradient and logits_bytes <= KEPT_BYTES
    if chunk_columns is None:
        chunk_columns = _columns_of_a_chunk(hidden, KEPT_BYTES if keeps else None)
    other = None
    if reference is not None:
        sampling = Sampling.of(reference.layer, temperature, barred, kept)
        other = _Frozen(reference.hidden.detach(), reference.layer.weight.detach(), sampling)
    logprobs, entropy, kl = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]  # torch leaves apply untyped
        hidden,
        layer.weight,
        target,
        Sampling.of(layer, temperature, barred, kept),
        other,
        layer.split,
        layer.gradient,
        chunk_columns,
        keeps,
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
    sampling = Sampling.of(layer, temperature, barred, kept)
    log_sums = hidden.new_full((2, len(hidden)), -torch.inf, dtype=torch.float64)
    for columns in _chunks(len(layer.weight), _columns_of_a_chunk(hidden)):
        logits = sampling.logits(hidden, layer.weight, columns)
        logits = tempered(logits, temperature, slice(None), sampling.num_real_in(columns))
        once = logits.logsumexp(-1)
        part = torch.stack([once, logits.mul_(2.0).logsumexp(-1)]).double()
        log_sums = torch.logaddexp(log_sums, part)
    log_sum, log_sum_of_squares = _gathered(log_sums, layer.split).logsumexp(0)
    squares: Tensor = (log_sum_of_squares - 2.0 * log_sum).exp()
    return squares if hidden.dtype == torch.float64 else squares.float()


class _Frozen(NamedTuple):
    """The reference's side: makes its logits."""

    hidden: Tensor  # [T, H of that model]
    weight: Tensor  # [V/tp, H of that model]
    sampling: Sampling

    def beside(self, chunk: Chunk, columns: slice) -> Chunk:
        """Return a chunk of the policy's logits with the reference's of the same columns."""
        others = self.sampling.logits(self.hidden, self.weight, columns)
        return replace(chunk, others=others, others_real=self.sampling.num_real_in(columns))


class _Context(Protocol):
    """Autograd's context of the two passes of a function."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    sampling: Sampling
    reference: _Frozen | None
    gradient: Tensor | None
    chunk_columns: int
    kept: list[Chunk] | None

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
        sampling: Sampling,
        reference: _Frozen | None,
        group: dist.ProcessGroup | None,
        gradient: Tensor | None,
        chunk_columns: int,
        keeps: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        num_rows = len(weight) * (1 if group is None else group.size())
        column = target.clamp(0, num_rows - 1) - sampling.first_row  # may be of another rank
        own = hidden.new_tensor(_NO_COLUMNS, dtype=torch.float64).unsqueeze(-1)
        own = own.expand(-1, len(hidden))  # float64: nothing is lost by joining many chunks
        kept: list[Chunk] = []
        for columns in _chunks(len(weight), chunk_columns):
            chunk = _chunk_of(hidden, weight, column, columns, sampling, reference)
            own = _joined(torch.stack([own, statistics(hidden, chunk).double()]))
            if keeps:
                kept.append(chunk)
        log_total, logit, entropy, other_total, kl = _joined(_gathered(own, group)).unbind()
        logprobs = logit - log_total

        # A target that is barred or padding has a constant for its logit: no gradient.
        is_free = logit > PADDED_LOGIT / 2
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs, log_total, entropy, kl, gap_offset = (
            tensor.to(exact) for tensor in (logprobs, log_total, entropy, kl, other_total - kl)
        )
        ctx.save_for_backward(hidden, weight, column, is_free, log_total, entropy, gap_offset)
        ctx.sampling, ctx.reference, ctx.gradient = sampling, reference, gradient
        ctx.chunk_columns, ctx.kept = chunk_columns, kept if keeps else None
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
        by_weight = torch.empty_like(weight) if needs_weight and ctx.gradient is None else None
        untempered = ctx.sampling.untempered
        by_all = untempered(torch.zeros_like(log_total) if by_logprobs is None else by_logprobs)
        rows = LogitGradients(
            log_total,
            entropy,
            gap_offset,
            by_all=by_all,
            by_target=by_all * is_free,
            by_entropy=None if by_entropy is None else untempered(by_entropy),
            by_kl=None if by_kl is None else untempered(by_kl),
        )
        kept, ctx.kept = ctx.kept, None  # a second pass would find gradients in their place
        for number, columns in enumerate(_chunks(len(weight), ctx.chunk_columns)):
            chunk = (
                kept[number]
                if kept is not None
                else _chunk_of(hidden, weight, column, columns, ctx.sampling, ctx.reference)
            )
            sent = gradients(hidden, chunk, rows, hidden.dtype)
            if by_hidden is not None:
                add_weight_gradient(by_hidden, sent.t(), weight[columns])
            if by_weight is not None:
                torch.mm(sent.t(), hidden, out=by_weight[columns])
            elif needs_weight and ctx.gradient is not None:
                add_weight_gradient(ctx.gradient[columns], sent, hidden)
        by_hidden = None if by_hidden is None else by_hidden.to(hidden.dtype)
        if needs_weight and ctx.gradient is not None:
            by_weight = no_gradient(weight.shape, weight.dtype, weight.device)
        return by_hidden, by_weight, None, None, None, None, None, None, None


def _chunk_of(
    hidden: Tensor,
    weight: Tensor,
    column: Tensor,
    columns: slice,
    sampling: Sampling,
    reference: _Frozen | None,
) -> Chunk:
    chunk = sampling.chunk(sampling.logits(hidden, weight, columns), column, columns)
    return chunk if reference is None else reference.beside(chunk, columns)


def _columns_of_a_chunk(hidden: Tensor, chunk_bytes: int | None = None) -> int:
    """Return the number of columns whose logits, in float32, fill a chunk; a multiple of 128.

    So the rows of logits begin where a GPU reads them by 16 bytes a thread. A CPU multiplies narrow
    types in float32: a chunk's rows of the weights, converted, fill no more than CHUNK_BYTES.
    """
    chunk_bytes = chunk_bytes or (CUDA_CHUNK_BYTES if hidden.is_cuda else CHUNK_BYTES)
    columns = chunk_bytes // (4 * max(1, len(hidden)))
    if not hidden.is_cuda and hidden.element_size() < 4:
        columns = min(columns, CHUNK_BYTES // (4 * hidden.shape[-1]))
    return max(MIN_CHUNK_COLUMNS, columns - columns % 128)


def _chunks(num_columns: int, chunk_columns: int) -> Iterator[slice]:
    starts = range(0, num_columns, chunk_columns)
    return (slice(at, min(at + chunk_columns, num_columns)) for at in starts)


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
