"""Triton kernels over rows of logits. Each reads the logits once.

Shapes: T rows, c columns. Logits are [T, c] float32 or float64, their columns next to one another.
"""
# ruff: noqa: ANN001, ANN201, ANN202, N803 - Triton's language has types and names of its own
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.algos.kernels import BeyondKernelError
from slipstream.algos.logprobs.chunks import PADDED_LOGIT, Chunk, LogitGradients

_BLOCK = 4096
_WARPS = 8
_PADDED = tl.constexpr(PADDED_LOGIT)


def statistics(chunk: Chunk) -> Tensor:
    """Return what ``slipstream.algos.logprobs.logits.statistics`` does."""
    logits, others, temperature = _taken(chunk)
    rows, count = logits.shape
    results = logits.new_empty(5, rows)
    if rows:
        given = logits if others is None else others
        logit_statistics[(rows,)](
            logits,
            given,
            chunk.target,
            temperature,
            results,
            rows,
            count,
            chunk.num_real,
            chunk.others_real,
            logits.stride(0),
            given.stride(0),
            HAS_TEMPERATURE=temperature is not None,
            HAS_OTHERS=others is not None,
            BLOCK=_block_of(count),
            num_warps=_WARPS,
        )
    return results


def gradients(chunk: Chunk, rows: LogitGradients, dtype: torch.dtype) -> Tensor:
    """Return what ``slipstream.algos.logprobs.logits.gradients`` does."""
    logits, others, temperature = _taken(chunk)
    num_rows, count = logits.shape
    results = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    given = logits if others is None else others
    block = _block_of(count)
    if num_rows:
        logit_gradients[(num_rows, triton.cdiv(count, block))](
            logits,
            given,
            chunk.target,
            temperature,
            rows.log_total,
            rows.by_target,
            _dense(rows.by_all),
            rows.entropy,
            _dense(rows.by_entropy),
            rows.gap_offset,
            _dense(rows.by_kl),
            results,
            count,
            chunk.num_real,
            chunk.others_real,
            logits.stride(0),
            given.stride(0),
            results.stride(0),
            HAS_TEMPERATURE=temperature is not None,
            HAS_ENTROPY=rows.by_entropy is not None,
            HAS_KL=rows.by_kl is not None and others is not None,
            BLOCK=block,
            num_warps=_WARPS,
        )
    return results


def _taken(chunk: Chunk) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return logits, the reference's, and temperatures, as kernels read them."""
    for logits in (chunk.logits, chunk.others):
        if logits is not None and logits.stride(1) != 1:
            raise BeyondKernelError(f"columns of logits that are {logits.stride(1)} numbers apart")
    temperature = None if chunk.temperature is None else chunk.temperature.to(chunk.logits.dtype)
    return chunk.logits, chunk.others, _dense(temperature)


def _dense(numbers: Tensor | None) -> Tensor | None:
    """Return the numbers of rows next to one another: an expanded tensor has one for all."""
    return None if numbers is None else numbers.contiguous()


def _block_of(columns: int) -> int:
    block: int = triton.next_power_of_2(columns)
    return min(_BLOCK, block)


@triton.jit
def _tempered(x, at, num_real, temperature, HAS_TEMPERATURE: tl.constexpr):
    """Return logits by a row's temperature, with those of padding made PADDED_LOGIT."""
    if HAS_TEMPERATURE:
        # A barred logit stays finite, and what is not a number stays so: a GPU would drop it.
        x = tl.maximum(x / temperature, _PADDED, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(at < num_real, x, _PADDED)


@triton.jit
def logit_statistics(
    logits,
    others,
    targets,
    temperatures,
    results,
    num_rows,
    num_columns,
    num_real,
    others_real,
    logits_stride,
    others_stride,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reduce a row, its largest logit known up to each block (Milakov, arXiv:1805.02867)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    others += row * others_stride
    exact = logits.dtype.element_ty
    temperature = tl.load(temperatures + row) if HAS_TEMPERATURE else 1.0
    largest = tl.full((), _PADDED, exact)
    total = tl.zeros((), exact)
    below = tl.zeros((), exact)  # sum of exp(x - largest) (x - largest)
    other_largest = tl.full((), _PADDED, exact)
    other_total = tl.zeros((), exact)
    other_below = tl.zeros((), exact)  # sum of exp(x - largest) (y - other_largest)
    for start in range(0, num_columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_column = at < num_columns
        x = tl.load(logits + at, mask=is_column, other=_PADDED)
        x = _tempered(x, at, num_real, temperature, HAS_TEMPERATURE)
        larger = tl.maximum(largest, tl.max(x, 0))
        weights = tl.where(is_column, tl.exp(x - larger), 0.0)
        shrunk = tl.exp(largest - larger)
        before = total * shrunk
        if HAS_OTHERS:
            y = tl.load(others + at, mask=is_column, other=_PADDED)
            y = _tempered(y, at, others_real, temperature, HAS_TEMPERATURE)
            other_larger = tl.maximum(other_largest, tl.max(y, 0))
            other_weights = tl.where(is_column, tl.exp(y - other_larger), 0.0)
            other_below = other_below * shrunk + before * (other_largest - other_larger)
            other_below += tl.sum(weights * (y - other_larger), 0)
            other_total *= tl.exp(other_largest - other_larger)
            other_total += tl.sum(other_weights, 0)
            other_largest = other_larger
        below = below * shrunk + before * (largest - larger) + tl.sum(weights * (x - larger), 0)
        total = before + tl.sum(weights, 0)
        largest = larger
    target = tl.load(targets + row)
    is_here = (target >= 0) & (target < num_columns)
    chosen = tl.load(logits + target, mask=is_here, other=_PADDED)
    is_free = chosen > _PADDED / 2
    chosen = _tempered(chosen, target, num_real, temperature, HAS_TEMPERATURE)
    log_total = tl.log(total)
    tl.store(results + row, largest + log_total)
    tl.store(results + num_rows + row, tl.where(is_free, chosen, _PADDED))
    tl.store(results + 2 * num_rows + row, log_total - below / total)
    other_log_sum = tl.zeros((), exact)
    kl = tl.zeros((), exact)
    if HAS_OTHERS:
        other_log_total = tl.log(other_total)
        other_log_sum = other_largest + other_log_total
        kl = (below - other_below) / total - log_total + other_log_total
    tl.store(results + 3 * num_rows + row, other_log_sum)
    tl.store(results + 4 * num_rows + row, kl)


@triton.jit
def logit_gradients(
    logits,
    others,
    targets,
    temperatures,
    log_totals,
    by_targets,
    by_alls,
    entropies,
    by_entropies,
    gap_offsets,
    by_kls,
    results,
    num_columns,
    num_real,
    others_real,
    logits_stride,
    others_stride,
    results_stride,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_KL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a block of a row's gradient; in place where results are the logits."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = at < num_columns
    temperature = tl.load(temperatures + row) if HAS_TEMPERATURE else 1.0
    x = tl.load(logits + row * logits_stride + at, mask=is_column, other=_PADDED)
    x = _tempered(x, at, num_real, temperature, HAS_TEMPERATURE)
    logprobs = x - tl.load(log_totals + row)
    probabilities = tl.exp(logprobs)
    # Values as large as PADDED_LOGIT meet their probability 0 first: they cannot overflow.
    grad = probabilities * -tl.load(by_alls + row)
    grad += tl.where(at == tl.load(targets + row), tl.load(by_targets + row), 0.0)
    if HAS_KL:
        y = tl.load(others + row * others_stride + at, mask=is_column, other=_PADDED)
        y = _tempered(y, at, others_real, temperature, HAS_TEMPERATURE)
        gap = (logprobs - y + tl.load(gap_offsets + row)) * probabilities
        grad += gap * tl.load(by_kls + row)
    if HAS_ENTROPY:
        surprise = (logprobs + tl.load(entropies + row)) * probabilities
        grad -= surprise * tl.load(by_entropies + row)
    grad = grad.to(results.dtype.element_ty)
    tl.store(results + row * results_stride + at, grad, mask=is_column)
