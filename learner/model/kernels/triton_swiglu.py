"""Triton kernels of SwiGLU: a program computes one row, a block of columns at a time, in float32.

Every input is read once and every result is written once. Arguments are those of kernels/swiglu.py.
"""
# ruff: noqa: ANN001, ANN202, N803 - Triton's language has types and names of its own
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.learner.model.kernels.swiglu_form import PLAIN, Form

_MOST_COLUMNS = 1024  # columns of a block: 16 bytes of bfloat16 for each of 128 threads


def forward(gate_up: Tensor, weight: Tensor | None, form: Form = PLAIN) -> Tensor:
    """Return the product [T, I]."""
    rows, inner = gate_up.size(0), gate_up.size(1) // 2
    product = gate_up.new_empty(rows, inner)
    _swiglu_forward[(rows,)](
        gate_up,
        weight,
        product,
        *gate_up.stride(),
        0 if weight is None else weight.stride(0),
        inner,
        *form,
        BLOCK=_columns(inner),
    )
    return product


def backward(
    gradient: Tensor, gate_up: Tensor, weight: Tensor | None, form: Form = PLAIN
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of gate and up, [T, 2I], and of the weights, [T, 1]."""
    rows, inner = gradient.shape
    of_gate_up = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    of_weight = None if weight is None else weight.new_empty(rows, 1)
    _swiglu_backward[(rows,)](
        gradient,
        gate_up,
        weight,
        of_gate_up,
        of_weight,
        *gradient.stride(),
        *gate_up.stride(),
        0 if weight is None else weight.stride(0),
        inner,
        *form,
        BLOCK=_columns(inner),
    )
    return of_gate_up, of_weight


def _columns(inner: int) -> int:
    columns: int = triton.next_power_of_2(inner)
    return min(columns, _MOST_COLUMNS)


@triton.jit
def _swiglu_forward(
    gate_up,
    weight,
    product,
    row_stride,
    column_stride,
    weight_stride,
    inner,
    SLOPE: tl.constexpr,
    OFFSET: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    gates, ups = gate_up + row * row_stride, gate_up + row * row_stride + inner * column_stride
    for start in range(0, inner, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_inside = column < inner
        gate = tl.load(gates + column * column_stride, is_inside, other=0.0).to(tl.float32)
        up = tl.load(ups + column * column_stride, is_inside, other=0.0).to(tl.float32)
        if LIMIT is not None:
            gate = tl.minimum(gate, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        value = gate * tl.sigmoid(SLOPE * gate) * (up + OFFSET)
        if weight is not None:
            value *= tl.load(weight + row * weight_stride).to(tl.float32)
        tl.store(product + row * inner + column, value, is_inside)


@triton.jit
def _swiglu_backward(
    gradient,
    gate_up,
    weight,
    of_gate_up,
    of_weight,
    gradient_row_stride,
    gradient_column_stride,
    row_stride,
    column_stride,
    weight_stride,
    inner,
    SLOPE: tl.constexpr,
    OFFSET: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    gates, ups = gate_up + row * row_stride, gate_up + row * row_stride + inner * column_stride
    gradients, results = gradient + row * gradient_row_stride, of_gate_up + 2 * row * inner
    share = tl.zeros([BLOCK], tl.float32)  # each column's share of the weight's gradient
    for start in range(0, inner, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_inside = column < inner
        gate = tl.load(gates + column * column_stride, is_inside, other=0.0).to(tl.float32)
        up = tl.load(ups + column * column_stride, is_inside, other=0.0).to(tl.float32)
        of_value = tl.load(gradients + column * gradient_column_stride, is_inside, other=0.0).to(
            tl.float32
        )
        of_gate, of_up = of_value, of_value
        if LIMIT is not None:  # beyond it nothing changes
            of_gate = tl.where(gate <= LIMIT, of_gate, 0.0)
            of_up = tl.where(tl.abs(up) <= LIMIT, of_up, 0.0)
            gate = tl.minimum(gate, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        sigmoid = tl.sigmoid(SLOPE * gate)
        silu = gate * sigmoid
        up += OFFSET
        if weight is not None:
            share += of_value * silu * up
            scale = tl.load(weight + row * weight_stride).to(tl.float32)
            of_gate *= scale
            of_up *= scale
        of_gate *= up * sigmoid * (1.0 + SLOPE * gate * (1.0 - sigmoid))
        tl.store(results + column, of_gate, is_inside)
        tl.store(results + inner + column, of_up * silu, is_inside)
    if weight is not None:
        tl.store(of_weight + row, tl.sum(share, 0))
