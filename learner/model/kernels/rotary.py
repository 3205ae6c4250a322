"""Turns queries and keys by their angles, and keeps the angles alone for the backward pass.

Shapes: T tokens, h heads of d channels, of these r turn.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from slipstream.algos.kernels import FusedOperator


def turn(heads: Tensor, cos: Tensor, sin: Tensor, *, in_pairs: bool, first: int) -> Tensor:
    """Return heads [T, h, d], turned in float32 and rounded to their own type once.

    Args:
        heads: [T, h, d], with any strides.
        cos: [T, 1, r/2] float32.
        sin: [T, 1, r/2] float32.
        in_pairs: True if a channel turns with its neighbor, not with that of the other half.
        first: first channel that turns: 0, or d - r. Other channels stay.
    """
    turned: Tensor = _Turn.apply(heads, cos, sin, in_pairs, first)  # type: ignore[no-untyped-call]  # of torch
    return turned


class _Turn(torch.autograd.Function):
    """Backward, the gradient is turned by the opposite angles."""

    @staticmethod
    @override
    def forward(
        ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor, in_pairs: bool, first: int
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.how = {"in_pairs": in_pairs, "first": first}
        return _turned(heads, heads, cos, sin, **ctx.how, is_back=False)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        turned = _turned(gradient, gradient, cos, sin, **ctx.how, is_back=True)
        return turned, None, None, None, None


def _kernel(
    heads: Tensor, cos: Tensor, sin: Tensor, *, in_pairs: bool, first: int, is_back: bool
) -> Tensor:
    from slipstream.learner.model.kernels import triton_rotary  # needs Triton

    return triton_rotary.turned(heads, cos, sin, in_pairs=in_pairs, first=first, is_back=is_back)


def _operators(
    heads: Tensor, cos: Tensor, sin: Tensor, *, in_pairs: bool, first: int, is_back: bool
) -> Tensor:
    result, last = heads.new_empty(heads.shape), first + 2 * cos.size(-1)
    if last - first < heads.size(-1):
        still = slice(first) if first else slice(last, None)
        result[..., still] = heads[..., still]
    turning = result[..., first:last]
    exact = (
        turning if turning.dtype is torch.float32 else torch.empty_like(turning, dtype=cos.dtype)
    )
    sign = -1 if is_back else 1
    (x, y), (turned_x, turned_y) = (
        (tensor[..., 0::2], tensor[..., 1::2]) if in_pairs else tensor.chunk(2, dim=-1)
        for tensor in (heads[..., first:last], exact)
    )
    torch.mul(x, cos, out=turned_x).addcmul_(y, sin, value=-sign)
    torch.mul(y, cos, out=turned_y).addcmul_(x, sin, value=sign)
    if exact is not turning:
        turning.copy_(exact)
    return result


_turned = FusedOperator("rotary embedding", kernel=_kernel, operators=_operators)
