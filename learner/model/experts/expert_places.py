"""Pure: places of tokens in an order by expert, and their way there and back.

Rows are taken by one gather, and the outputs of a token's experts come back by one gather that sums
them. The backward pass of each is the other, so that the order of every sum is known.

Shapes: T tokens, c rows of each; M = T * c rows; H hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override


@dataclass(frozen=True, slots=True)
class Places:
    """Places of tokens in an order by expert; the host knows none of it."""

    tokens: Tensor  # [M] int64, token of each row
    rows: Tensor  # [T, c] int64, rows of each token
    order: Tensor  # [M] int64, number of each row among [T, c]
    ends: Tensor  # [number of experts] int32, rows up to the end of each

    @classmethod
    def of(cls, experts: Tensor, count: int) -> "Places":
        """Sort tokens by expert; those of an expert keep their order.

        Args:
            experts: [T, c] int64, the experts of each token, from 0.
            count: number of experts.
        """
        numbers = torch.arange(max(count, experts.numel()), device=experts.device)
        values, order = torch.sort(experts.flatten(), stable=True)
        rows = torch.empty_like(order).scatter_(0, order, numbers[: len(order)])
        return cls(
            tokens=order.div(experts.size(1), rounding_mode="floor"),
            rows=rows.view_as(experts),
            order=order,
            ends=torch.searchsorted(values, numbers[:count], right=True, out_int32=True),
        )

    def taken(self, tokens: Tensor) -> Tensor:
        """Return the rows of tokens. [T, H] -> [M, H]."""
        return _Taken.apply(tokens, self.tokens, self.rows)  # type: ignore[no-any-return, no-untyped-call]

    def chosen(self, numbers: Tensor) -> Tensor:
        """Return numbers of [T, c] by row, [M]."""
        return _Taken.apply(numbers.flatten(), self.order, self.rows.view(-1, 1))  # type: ignore[no-any-return, no-untyped-call]

    def summed(self, rows: Tensor) -> Tensor:
        """Return the sum of each token's rows. [M, H] -> [T, H]."""
        return _Summed.apply(rows, self.tokens, self.rows)  # type: ignore[no-any-return, no-untyped-call]


class _Taken(torch.autograd.Function):
    @override
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, index: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return tokens.index_select(0, index)

    @override
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _sums(gradient, *ctx.saved_tensors), None, None


class _Summed(torch.autograd.Function):
    @override
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, index: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return _sums(outputs, rows)

    @override
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, *ctx.saved_tensors), None, None


def _sums(values: Tensor, rows: Tensor) -> Tensor:
    """Return the sum of the values in some rows. [M, ...], [T, c] -> [T, ...]."""
    if rows.size(1) == 1 or not len(rows):
        return values.index_select(0, rows.flatten())
    return F.embedding_bag(rows, values, mode="sum")
