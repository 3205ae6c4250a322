"""Products of all experts in one call, beside a product for each."""

import pytest
import torch
from torch import Tensor

from slipstream.learner.model.experts.grouped_products import (
    grouped_linear,
    grouped_product,
    has_kernel,
    weight_gradients,
    with_bias,
)

ENDS = torch.tensor([3, 3, 10, 12], dtype=torch.int32)  # the second expert has no row


def operands(dtype: torch.dtype, inputs: int, outputs: int, rows: int = 12) -> tuple[Tensor, ...]:
    numbers = torch.Generator().manual_seed(1)
    shapes = (rows, inputs), (len(ENDS), outputs, inputs), (rows, outputs)
    return tuple(torch.randn(shape, generator=numbers).to(dtype) for shape in shapes)


def one_by_one(rows: Tensor, weight: Tensor, ends: Tensor = ENDS) -> Tensor:
    starts = [0, *ends.tolist()[:-1]]
    pairs = zip(weight, starts, ends.tolist(), strict=True)
    return torch.cat([rows[start:end] @ own.t() for own, start, end in pairs])


@pytest.mark.parametrize(
    ("dtype", "inputs", "outputs", "is_one_call"),
    [
        (torch.bfloat16, 16, 24, True),
        (torch.float32, 16, 24, True),
        (torch.bfloat16, 12, 24, False),  # rows of 24 bytes
        (torch.float64, 16, 24, False),
    ],
)
def test_outputs_and_gradients_are_those_of_a_product_for_each_expert(
    dtype: torch.dtype, inputs: int, outputs: int, is_one_call: bool
):
    assert has_kernel(dtype, inputs, outputs) is is_one_call
    rows, weight, gradient = operands(dtype, inputs, outputs)
    found, expected = (
        [rows.clone().requires_grad_(), weight.clone().requires_grad_()] for _ in range(2)
    )
    product, right = grouped_linear(*found, ENDS), one_by_one(*expected)
    product.backward(gradient)
    right.backward(gradient)
    limit = 1e-2 if dtype is torch.bfloat16 else 1e-6
    for mine, other in zip(
        [product, *(f.grad for f in found)], [right, *(e.grad for e in expected)], strict=True
    ):
        assert mine is not None
        assert other is not None
        assert mine.dtype == dtype
        assert (mine - other).norm() <= limit * other.norm()
    assert found[1].grad is not None
    assert not found[1].grad[1].any(), "no row was this expert's"


def test_a_gradient_is_added_to_a_total_and_autograd_gets_no_elements():
    rows, weight, gradient = operands(torch.bfloat16, 16, 24)
    weight.requires_grad_()
    total = torch.full(weight.shape, 2.0)
    grouped_linear(rows, weight, ENDS, total).backward(gradient)
    assert weight.grad is not None
    assert weight.grad.is_sparse
    assert weight.grad._nnz() == 0
    alone = weight.detach().requires_grad_()
    grouped_linear(rows, alone, ENDS).backward(gradient)
    assert alone.grad is not None
    assert total.equal(2.0 + alone.grad.float())


def test_no_rows_are_a_product_without_rows_and_gradients_of_zero():
    rows, weight, gradient = operands(torch.bfloat16, 16, 24, rows=0)
    rows.requires_grad_()
    weight.requires_grad_()
    product = grouped_linear(rows, weight, torch.zeros(len(ENDS), dtype=torch.int32))
    assert product.shape == (0, 24)
    product.backward(gradient)
    assert rows.grad is not None
    assert rows.grad.shape == (0, 16)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_numbers_of_rows_are_not_read_by_the_host():
    rows, weight, _ = (tensor.to("meta") for tensor in operands(torch.bfloat16, 16, 24))
    product = grouped_product(rows, weight.transpose(1, 2), ENDS.to("meta"))
    assert product.shape == (12, 24)
    gradients = weight_gradients(product, rows, ENDS.to("meta"))
    assert gradients.shape == weight.shape


def test_rows_are_kept_for_weights_that_train_alone():
    rows, weight, _ = operands(torch.bfloat16, 16, 24)
    rows.requires_grad_()
    kept: list[torch.Size] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    for trains in (False, True):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            grouped_linear(rows, weight.detach().requires_grad_(trains), ENDS)
        assert (rows.shape in kept) == trains


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("num_rows", [12, 0])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_rows_get_the_bias_of_their_expert(dtype: torch.dtype, num_rows: int, is_weighted: bool):
    ends = ENDS if num_rows else torch.zeros_like(ENDS)
    counts = ends.diff(prepend=ends.new_zeros(1))
    rows, _, gradient = operands(dtype, 8, 8, num_rows)
    bias, weight = torch.arange(32.0).view(4, 8).to(dtype), torch.rand(num_rows, 1)
    found, exact = (
        [t.to(kind or t.dtype, copy=True).requires_grad_() for t in (rows, bias, weight)]
        for kind in (None, torch.float64)
    )
    total = with_bias(*found[:2], ends, found[2] if is_weighted else None)
    factor = exact[2] if is_weighted else 1.0
    expected = exact[0] + factor * exact[1].repeat_interleave(counts, 0)
    total.backward(gradient)
    expected.backward(gradient.double())
    tolerance = 2**-6 if dtype is torch.bfloat16 else 1e-5
    for one, other in zip(
        [total, *(leaf.grad for leaf in found[: 2 + is_weighted])],
        [expected, *(leaf.grad for leaf in exact[: 2 + is_weighted])],
        strict=True,
    ):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)
    assert (total.dtype, found[2].dtype) == (dtype, torch.float32)
