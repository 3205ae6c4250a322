"""Products of rows with the weights of their experts, for all experts of a rank in one call.

Shapes: M rows, sorted by expert; E experts, K inputs and N outputs of each. ``ends`` is [E] int32,
on the device of the rows: the number of rows of an expert and of those before it; the last is M.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from slipstream.algos.weight_gradients import no_gradient

_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 16  # bytes; a multiple of them in each row of each operand


def grouped_linear(
    rows: Tensor, weight: Tensor, ends: Tensor, total: Tensor | None = None
) -> Tensor:
    """Return each row times the weight of its expert, [M, N].

    The host does not wait for the device. A gradient of the weight is rounded once to the weight's
    type, as grouped products are, before it is added to a total.

    Args:
        rows: [M, K]; M may be 0.
        weight: [E, N, K], of the type of the rows.
        ends: [E] int32.
        total: [E, N, K] float32, which the weight's gradient is added to; without it autograd
            returns the gradient.
    """
    product: Tensor = _GroupedLinear.apply(rows, weight, ends, total)  # type: ignore[no-untyped-call]  # of torch
    return product


def with_bias(rows: Tensor, bias: Tensor, ends: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return each row plus the bias of its expert, [M, N].

    Args:
        rows: [M, N].
        bias: [E, N], of the type of the rows.
        ends: [E] int32.
        weight: factor of each row's bias, [M, 1] in any floating type; None is 1.
    """
    total: Tensor = _Biased.apply(rows, bias, ends, weight)  # type: ignore[no-untyped-call]  # of torch
    return total


class _Biased(torch.autograd.Function):
    """Adds biases; their gradients are products with weights, whose order of sums is known."""

    @override
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, bias: Tensor, ends: Tensor, weight: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(bias if weight is not None else None, ends, weight)
        of_rows = _of_rows(bias, ends, len(rows))
        return rows + (of_rows if weight is None else of_rows * weight.to(rows.dtype))

    @override
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, Tensor | None]:
        bias, ends, weight = ctx.saved_tensors
        columns = gradient.new_ones(len(gradient), _ALIGNMENT // gradient.dtype.itemsize)
        of_weight = None
        if weight is not None:
            columns *= weight
            products = gradient * _of_rows(bias, ends, len(gradient))
            of_weight = products.sum(-1, keepdim=True, dtype=torch.float32).to(weight.dtype)
        of_bias = weight_gradients(gradient.contiguous(), columns, ends)[..., 0]
        return gradient, of_bias, None, of_weight


def _of_rows(bias: Tensor, ends: Tensor, count: int) -> Tensor:
    """Return the bias of each row's expert, [M, N]."""
    numbers = torch.arange(count, device=ends.device, dtype=ends.dtype)
    return bias.index_select(0, torch.searchsorted(ends, numbers, right=True))


class _GroupedLinear(torch.autograd.Function):
    @override
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor, total: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight, ends)
        ctx.total = total
        return grouped_product(rows, weight.transpose(1, 2), ends)

    @override
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weight, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        by_rows = grouped_product(gradient, weight, ends) if ctx.needs_input_grad[0] else None
        by_weight = None
        if ctx.needs_input_grad[1]:
            by_weight = weight_gradients(gradient, rows, ends)
            if ctx.total is not None:
                ctx.total.add_(by_weight)
                weight.grad_added_to_main_grad = True  # Megatron's mark
                by_weight = no_gradient(weight.shape, weight.dtype, weight.device)
        return by_rows, by_weight, None, None


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return each row times the matrix of its expert. [M, K], [E, K, N] -> [M, N]."""
    if not len(rows):
        return rows.new_empty(0, matrices.size(2))
    if has_kernel(rows.dtype, *matrices.shape[1:]):
        return F.grouped_mm(rows, matrices, offs=ends)
    products = zip(_of_experts(rows, ends), matrices, strict=True)
    return torch.cat([part @ matrix for part, matrix in products])


def weight_gradients(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient of each expert's weight. [M, N], [M, K] -> [E, N, K]."""
    if not len(rows):
        return rows.new_zeros(len(ends), gradient.size(1), rows.size(1))
    if has_kernel(rows.dtype, gradient.size(1), rows.size(1)):
        return F.grouped_mm(gradient.t(), rows, offs=ends)
    products = zip(_of_experts(gradient, ends), _of_experts(rows, ends), strict=True)
    return torch.stack([by_output.t() @ part for by_output, part in products])


def has_kernel(dtype: torch.dtype, *sizes: int) -> bool:
    """Return True if torch takes matrices of these sizes in groups.

    On a GPU before Hopper, and in float32 and float16, it multiplies them one by one itself.
    """
    return dtype in _KERNEL_DTYPES and not any(size * dtype.itemsize % _ALIGNMENT for size in sizes)


def _of_experts(rows: Tensor, ends: Tensor) -> Iterator[Tensor]:
    """Yield the rows of each expert; the host waits for the numbers."""
    start = 0
    for end in ends.tolist():
        yield rows[start:end]
        start = end
