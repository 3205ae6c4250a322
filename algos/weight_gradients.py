"""A weight's gradient, added to a total without being rounded or kept on the way.

Shapes: T tokens, R rows of the weight (its outputs), H columns (its inputs).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.algos.kernels import FusedOperator

_CHUNK_BYTES = 16 * 2**20  # most bytes of float32, without the total
_MIN_CHUNK_ROWS = 64  # however many tokens: a product of fewer rows is slow


def add_weight_gradient(total: Tensor, by_output: Tensor, inputs: Tensor) -> None:
    """Add the gradient of a weight, by_output.T @ inputs, to its total.

    Products of narrower types are summed in the total's. Nothing of the total's size is made.

    Args:
        total: [R, H], or some rows of it; float32, or the type of the others.
        by_output: [T, R], the gradient by the layer's outputs.
        inputs: [T, H], the layer's inputs, of the same type.
    """
    if total.dtype == by_output.dtype:
        total.addmm_(by_output.t(), inputs)
    elif total.is_cuda:
        _add_narrow(total, total, by_output, inputs)
    else:
        _add_chunks(total, by_output, inputs)


def no_gradient(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what autograd is given for a weight whose gradient is in its total: no elements.

    A sparse tensor of the weight's shape takes no memory, and hooks of the gradient run.
    """
    return torch.empty(tuple(shape), dtype=dtype, layout=torch.sparse_coo, device=device)


def _add_at_once(total: Tensor, by_output: Tensor, inputs: Tensor) -> None:
    torch.ops.aten.addmm.dtype_out(total, by_output.t(), inputs, total.dtype, out=total)


def _add_product(total: Tensor, by_output: Tensor, inputs: Tensor) -> None:
    """Add what a GPU multiplied into a tensor as large as the total."""
    total.add_(torch.mm(by_output.t(), inputs, out_dtype=total.dtype))


def _add_chunks(total: Tensor, by_output: Tensor, inputs: Tensor) -> None:
    wide = inputs.to(total.dtype)
    rows = max(_CHUNK_BYTES // (4 * max(len(wide), 1)), _MIN_CHUNK_ROWS)
    for first in range(0, len(total), rows):
        columns = by_output[:, first : first + rows]
        total[first : first + rows].addmm_(columns.t().to(total.dtype), wide)


_add_narrow = FusedOperator("weight gradients", kernel=_add_at_once, operators=_add_product)
