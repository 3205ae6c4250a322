"""SwiGLU, plain or with limits, that keeps gate and up alone for its backward pass.

Shapes: T tokens, I inner channels; a matrix [T, 2I] has the gates first, then the ups, as the first
linear layer of an MLP writes it.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from slipstream.algos.kernels import FusedOperator
from slipstream.learner.model.kernels.swiglu_form import PLAIN, Form


def swiglu(gate_up: Tensor, weight: Tensor | None = None, form: Form = PLAIN) -> Tensor:
    """Return silu(gate) * up * weight, or another form, [..., I] in the type of ``gate_up``.

    A kernel computes in float32 and rounds once. On a CPU each of torch's operators does, so that a
    narrow type is rounded after silu and after each product.

    Args:
        gate_up: [..., 2I].
        weight: [..., 1] of each token, in any floating type; None is 1.
        form: what takes the place of silu(gate) * up.
    """
    rows = gate_up.reshape(-1, gate_up.size(-1))
    weights = None if weight is None else weight.reshape(-1, 1)
    product: Tensor = _SwiGlu.apply(rows, weights, form)  # type: ignore[no-untyped-call]  # of torch
    return product.view(*gate_up.shape[:-1], product.size(-1))


class _SwiGlu(torch.autograd.Function):
    @override
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor | None, form: Form) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        ctx.form = form
        return _product(gate_up, gate_up, weight, form)

    @override
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        gate_up, weight = ctx.saved_tensors
        return *_gradients(gradient, gradient, gate_up, weight, ctx.form), None


def _forward_kernel(gate_up: Tensor, weight: Tensor | None, form: Form) -> Tensor:
    from slipstream.learner.model.kernels import triton_swiglu  # needs Triton

    return triton_swiglu.forward(gate_up, weight, form)


def _forward_operators(gate_up: Tensor, weight: Tensor | None, form: Form) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if form == PLAIN:
        product = F.silu(gate).mul_(up)
    else:
        gate, up = _limited(gate, up, form)
        product = gate * (form.slope * gate).sigmoid_() * (up + form.offset)
    return product if weight is None else product.mul_(weight)


def _limited(gate: Tensor, up: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    if form.limit is None:
        return gate, up
    return gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)


def _backward_kernel(
    gradient: Tensor, gate_up: Tensor, weight: Tensor | None, form: Form
) -> tuple[Tensor, Tensor | None]:
    from slipstream.learner.model.kernels import triton_swiglu  # needs Triton

    return triton_swiglu.backward(gradient, gate_up, weight, form)


def _backward_operators(
    gradient: Tensor, gate_up: Tensor, weight: Tensor | None, form: Form
) -> tuple[Tensor, Tensor | None]:
    if form != PLAIN:
        return _backward_of_form(gradient, gate_up, weight, form)
    (gate, up), results = gate_up.chunk(2, dim=-1), torch.empty_like(gate_up)
    of_gate, of_up = results.chunk(2, dim=-1)
    of_weight = None
    torch.ops.aten.silu.out(gate, out=of_up)
    torch.mul(gradient, up, out=of_gate)
    if weight is not None:
        shares = (of_gate * of_up).sum(-1, keepdim=True, dtype=torch.float32)
        of_weight = shares.to(weight.dtype)
        of_gate.mul_(weight)
        of_up.mul_(weight)
    torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
    of_up.mul_(gradient)
    return results, of_weight


def _backward_of_form(
    gradient: Tensor, gate_up: Tensor, weight: Tensor | None, form: Form
) -> tuple[Tensor, Tensor | None]:
    whole_gate, whole_up = gate_up.chunk(2, dim=-1)
    gate, up = _limited(whole_gate, whole_up, form)
    sigmoid = (form.slope * gate).sigmoid_()
    gated, raised = gate * sigmoid, up + form.offset
    of_weight = None
    if weight is not None:
        shares = (gradient * gated * raised).sum(-1, keepdim=True, dtype=torch.float32)
        of_weight = shares.to(weight.dtype)
        gradient = gradient * weight
    of_gate = gradient * raised * (sigmoid + form.slope * gated * (1.0 - sigmoid))
    of_up = gradient * gated
    if form.limit is not None:  # beyond it nothing changes
        of_gate = of_gate * (whole_gate <= form.limit)
        of_up = of_up * (whole_up.abs() <= form.limit)
    return torch.cat([of_gate, of_up], dim=-1).to(gate_up.dtype), of_weight


_product = FusedOperator("SwiGLU", kernel=_forward_kernel, operators=_forward_operators)
_gradients = FusedOperator(
    "SwiGLU's gradients", kernel=_backward_kernel, operators=_backward_operators
)
