"""SwiGLU against float64; TRITON_INTERPRET=1 has the kernels compute it."""

from functools import partial

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from slipstream.algos.kernels import replaced_calls
from slipstream.learner.model.kernels.swiglu import swiglu
from slipstream.learner.model.kernels.swiglu_form import PLAIN, Form

SIZES = [(3, 5), (1, 1), (0, 4), (2, 64), (1, 1500)]  # 1500: a kernel's row in two blocks
# To bfloat16 each operator rounds by half of it, and Triton's interpreter cuts off once.
ROUNDED = 2**-7
LIMITED = Form(1.702, 1.0, 2.0)


@pytest.fixture(autouse=True)
def no_kernel_replaced():
    yield
    assert replaced_calls() == 0


def by_hand(gate_up: torch.Tensor, weight: torch.Tensor | None, form: Form = PLAIN) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    if form.limit is not None:
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    product = gate / (1 + (-form.slope * gate).exp()) * (up + form.offset)
    return product if weight is None else product * weight


def given(rows: int, inner: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    seeded = torch.Generator().manual_seed(rows + inner)
    gate_up = torch.randn(rows, 2 * inner, generator=seeded) * 3
    gradient, weight = torch.randn(rows, inner, generator=seeded), torch.rand(rows, 1)
    return gate_up.to(dtype), gradient.to(dtype), weight


def results(compute, gate_up, gradient, weight) -> list[torch.Tensor]:  # noqa: ANN001
    leaves = [gate_up.detach().requires_grad_()]
    if weight is not None:
        leaves.append(weight.detach().requires_grad_())
    product = compute(leaves[0], leaves[1] if weight is not None else None)
    product.backward(gradient)
    return [product.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize(
    ("rows", "inner", "form"),
    [
        *((*size, PLAIN) for size in SIZES),
        (3, 5, LIMITED),
        (2, 64, LIMITED),
        (3, 5, Form(0.5, -1.0)),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2 * ROUNDED)]
)
def test_values_and_gradients_are_those_of_float64(
    dtype: torch.dtype, tolerance: float, rows: int, inner: int, is_weighted: bool, form: Form
):
    gate_up, gradient, weight = given(rows, inner, dtype)
    weight = weight if is_weighted else None
    exact = results(
        partial(by_hand, form=form),
        gate_up.double(),
        gradient.double(),
        None if weight is None else weight.double(),
    )
    computed = results(partial(swiglu, form=form), gate_up, gradient, weight)
    assert [value.dtype for value in computed] == [dtype, dtype, torch.float32][: len(exact)]
    for value, expected in zip(computed, exact, strict=True):
        assert value.shape == expected.shape
        scale = expected.abs().clamp(min=1)
        assert ((value - expected).abs() / scale).lt(tolerance).all()


def test_views_of_wider_tensors_and_expanded_gradients_give_the_same():
    gate_up, _, weight = given(4, 6, torch.float32)
    wide = torch.zeros(4, 30)
    wide[:, 1:25:2] = gate_up
    spread = wide[:, 1:25:2]
    ones = torch.ones(1, 1).expand(4, 6)
    contiguous = results(swiglu, gate_up, ones.contiguous(), weight)
    for value, expected in zip(results(swiglu, spread, ones, weight), contiguous, strict=True):
        assert torch.allclose(value, expected, atol=1e-6)


def test_leading_dimensions_are_kept():
    gate_up, _, weight = given(6, 4, torch.float32)
    stacked = swiglu(gate_up.view(2, 3, 8), weight.view(2, 3, 1))
    assert stacked.equal(swiglu(gate_up, weight).view(2, 3, 4))


def test_gate_and_up_alone_are_kept_and_a_weight_beside_them():
    gate_up, _, weight = given(3, 5, torch.float32)
    kept: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        swiglu(gate_up.requires_grad_(), weight.requires_grad_())
    assert [saved.numel() for saved in kept] == [gate_up.numel(), weight.numel()]
