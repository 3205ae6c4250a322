"""A weight's gradient, added to its total."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from slipstream.algos import weight_gradients
from slipstream.algos.weight_gradients import add_weight_gradient, no_gradient


class Made(TorchDispatchMode):
    """Notes the largest tensor that is made inside it, by its number of elements."""

    largest = 0

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and func._schema.returns[0].alias_info is None:
            self.largest = max(self.largest, result.numel())
        return result


def sides(tokens: int, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return gradients by the outputs, and inputs."""
    torch.manual_seed(0)
    return torch.randn(tokens, rows, dtype=dtype), torch.randn(tokens, columns, dtype=dtype)


@pytest.mark.parametrize("shape", [(7, 5, 3), (1, 130, 9), (64, 64, 64), (0, 4, 4), (3, 0, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_is_added_as_in_float64(shape: tuple[int, int, int], dtype: torch.dtype):
    by_output, inputs = sides(*shape, dtype)
    total = torch.randn(
        shape[1], shape[2], dtype=max(dtype, torch.float32, key=lambda d: d.itemsize)
    )
    expected = total.double() + by_output.double().t() @ inputs.double()
    add_weight_gradient(total, by_output, inputs)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_sum_of_products_is_nearer_than_one_of_rounded_products():
    by_output, inputs = sides(64, 30, 20, torch.bfloat16)
    total, rounded, right = torch.zeros(30, 20), torch.zeros(30, 20), torch.zeros(30, 20).double()
    for part in range(0, 64, 8):
        output, given = by_output[part : part + 8], inputs[part : part + 8]
        add_weight_gradient(total, output, given)
        rounded += output.t() @ given
        right += output.double().t() @ given.double()
    assert (total - right).norm() < 1e-3 * (rounded - right).norm()


def test_autograd_takes_no_gradient_for_one_and_runs_hooks():
    weight, seen = torch.nn.Parameter(torch.ones(3, 2)), []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(_context: object, weight: Tensor) -> Tensor:
            return weight.sum()

        @staticmethod
        def backward(_context: object, *_by_output: Tensor) -> Tensor:
            return no_gradient(weight.shape, weight.dtype, weight.device)

    weight.register_post_accumulate_grad_hook(lambda one: seen.append(one.grad))
    (Keeps.apply(weight) + Keeps.apply(weight)).backward()
    (gradient,) = seen
    assert (gradient.shape, gradient._nnz()) == (weight.shape, 0)
    (Keeps.apply(weight) + 3 * weight.sum()).backward()
    assert weight.grad is not None
    assert torch.full((3, 2), 3.0).equal(weight.grad.to_dense())


def test_gradients_of_other_layouts_and_some_rows_of_a_total():
    by_output, inputs = sides(9, 200, 6, torch.bfloat16)
    by_output, inputs = by_output.t().contiguous().t(), inputs.t().contiguous().t()
    total = torch.zeros(300, 6)
    add_weight_gradient(total[50:250], by_output, inputs)
    expected = by_output.double().t() @ inputs.double()
    torch.testing.assert_close(total[50:250].double(), expected, rtol=1e-5, atol=1e-5)
    assert not total[:50].any()
    assert not total[250:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_of_the_size_of_the_total_is_made(dtype: torch.dtype):
    by_output, inputs = sides(1000, 10_000, 600, dtype)
    total = torch.zeros(10_000, 600)
    with Made() as made:
        add_weight_gradient(total, by_output, inputs)
    assert made.largest < total.numel()


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch knows no shapes of this operator: it fails on meta"
)
def test_the_operator_of_a_gpu_takes_these_types_and_some_rows():
    total = torch.empty(12, 8, device="meta")
    by_output = torch.empty(5, 6, device="meta", dtype=torch.bfloat16)
    inputs = torch.empty(5, 8, device="meta", dtype=torch.bfloat16)
    weight_gradients._add_at_once(total[3:9], by_output, inputs)


def test_what_replaces_the_operator_of_a_gpu_takes_the_same():
    total = torch.empty(12, 8, device="meta")
    by_output = torch.empty(5, 6, device="meta", dtype=torch.bfloat16)
    inputs = torch.empty(5, 8, device="meta", dtype=torch.bfloat16)
    weight_gradients._add_product(total[3:9], by_output, inputs)
