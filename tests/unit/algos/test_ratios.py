import math

import pytest
import torch

from slipstream.algos.packing import Packing
from slipstream.algos.ratios import (
    MAX_LOG_RATIO,
    bounded_exp,
    importance_ratio,
    log_ratio,
    sequence_ratio,
    upcast,
)
from slipstream.algos.reduce import masked_sum

MASK = torch.tensor([True, True, False])
PACKING = Packing.of(torch.tensor([True, True, False, True, False]), torch.tensor([0, 3, 4, 5]))


def test_the_ratio_is_target_over_sampled_from_and_one_outside_the_mask():
    ratio = importance_ratio(
        target=torch.tensor([-1.0, -2.0, -9.0]),
        sampled_from=torch.tensor([-1.5, -2.0, -1.0]),
        mask=MASK,
    )
    assert ratio.tolist() == pytest.approx([math.exp(0.5), 1.0, 1.0])


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf")])
def test_neither_ratio_nor_gradient_sees_what_is_masked(garbage: float):
    target = torch.tensor([-1.0, -2.0, garbage]).requires_grad_()
    sampled_from = torch.tensor([-1.0, -2.0, garbage])
    importance_ratio(target=target, sampled_from=sampled_from, mask=MASK).sum().backward()
    assert target.grad is not None
    assert target.grad.tolist() == [1.0, 1.0, 0.0]


def test_gradient_flows_through_the_target_only():
    target = torch.zeros(3, requires_grad=True)
    sampled_from = torch.zeros(3, requires_grad=True)
    importance_ratio(target=target, sampled_from=sampled_from, mask=MASK).sum().backward()
    assert sampled_from.grad is None


def test_the_ratio_is_bounded_on_both_sides():
    ratio = importance_ratio(
        target=torch.tensor([0.0, -100.0, 0.0]),
        sampled_from=torch.tensor([-100.0, 0.0, 0.0]),
        mask=MASK,
    )
    assert ratio.log().tolist() == pytest.approx([MAX_LOG_RATIO, -MAX_LOG_RATIO, 0.0])


def test_beyond_the_bound_there_is_no_gradient():
    log_ratios = torch.tensor([30.0, -30.0, 1.0]).requires_grad_()
    bounded_exp(log_ratios).sum().backward()
    assert log_ratios.grad is not None
    assert log_ratios.grad.tolist() == pytest.approx([0.0, 0.0, math.e])


def test_a_log_ratio_is_not_bounded():
    difference = log_ratio(
        target=torch.tensor([0.0, -100.0, 5.0]), sampled_from=torch.zeros(3), mask=MASK
    )
    assert difference.tolist() == [0.0, -100.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_subtracted_in_float32(dtype: torch.dtype):
    target, sampled_from = torch.tensor([-8.0, 0.0, 0.0]), torch.tensor([-(2.0**-10), 0.0, 0.0])
    difference = log_ratio(target=target.to(dtype), sampled_from=sampled_from.to(dtype), mask=MASK)
    assert difference.dtype == torch.float32
    assert difference[0].item() == -8.0 + 2.0**-10  # neither type of 16 bits has this number
    assert upcast(target.double()).dtype == torch.float64


def test_the_ratio_of_a_sequence_is_the_product_over_its_mask_or_its_root():
    for geometric, expected in [(False, [math.exp(0.8), math.exp(-1.0), 1.0]), (True, None)]:
        log_ratios = torch.tensor([0.5, 0.3, float("nan"), -1.0, float("inf")])
        ratio = sequence_ratio(log_ratios, PACKING, geometric=geometric)
        expected = expected or [math.exp(0.4), math.exp(-1.0), 1.0]
        assert ratio.tolist() == pytest.approx(expected)


def test_the_product_of_many_ratios_does_not_overflow():
    packing = Packing.of(torch.ones(3, dtype=torch.bool), torch.tensor([0, 3]))
    ratio = sequence_ratio(torch.full((3,), 1e4), packing, geometric=False)
    assert ratio.tolist() == pytest.approx([math.exp(MAX_LOG_RATIO)])


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 100.0])
def test_a_sum_ignores_what_is_masked(garbage: float):
    per_token = torch.tensor([1.0, 2.0, garbage])
    assert masked_sum(per_token, MASK).item() == 3.0


def test_the_sum_over_nothing_is_zero():
    assert masked_sum(torch.tensor([1.0, 2.0]), torch.tensor([False, False])).item() == 0.0
