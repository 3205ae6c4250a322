"""Triton kernels of SwiGLU: a program computes one row, a block of columns at a time, in float32.

Every input is read once and every result is written once. Arguments are those of kernels/swiglu.py.
"""
# ruff: noqa: ANN001, ANN202, N803 - Triton's language has types and names of its own
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST_COLUMNS = 1024  # columns of a block: 16 bytes of bfloat16 for each of 128 threads


def forward(gate_up: Tensor, weight: Tensor | None) -> Tensor:
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
        BLOCK=_columns(inner),
    )
    return product


def backward(
    gradient: Tensor, gate_up: Tensor, weight: Tensor | None
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
        BLOCK=_columns(inner),
    )
    return of_gate_up, of_weight


def _columns(inner: int) -> int:
    columns: int = triton.next_power_of_2(inner)
    return min(columns, _MOST_COLUMNS)


@triton.jit
def _swiglu_forward(
    gate_up, weight, product, row_stride, column_stride, weight_stride, inner, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    gates, ups = gate_up + row * row_stride, gate_up + row * row_stride + inner * column_stride
    for start in range(0, inner, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_inside = column < inner
        gate = tl.load(gates + column * column_stride, is_inside, other=0.0).to(tl.float32)
        up = tl.load(ups + column * column_stride, is_inside, other=0.0).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up
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
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        if weight is not None:
            share += of_value * silu * up
            of_value *= tl.load(weight + row * weight_stride).to(tl.float32)
        of_gate = of_value * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(results + column, of_gate, is_inside)
        tl.store(results + inner + column, of_value * silu, is_inside)
    if weight is not None:
        tl.store(of_weight + row, tl.sum(share, 0))
