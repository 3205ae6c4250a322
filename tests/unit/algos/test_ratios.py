import math

import pytest
import torch

from algos.ratios import MAX_LOG_RATIO, importance_ratio
from algos.reduce import masked_sum, token_mean

MASK = torch.tensor([True, True, False])


def test_the_ratio_is_target_over_sampled_from_and_one_outside_the_mask():
    ratio = importance_ratio(
        target=torch.tensor([-1.0, -2.0, -9.0]),
        sampled_from=torch.tensor([-1.5, -2.0, -1.0]),
        mask=MASK,
    )
    assert ratio.tolist() == pytest.approx([math.exp(0.5), 1.0, 1.0])


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf")])
def test_neither_ratio_nor_gradient_sees_what_is_masked(garbage: float):
    target = torch.tensor([-1.0, -2.0, -3.0]).requires_grad_()
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


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 100.0])
def test_sums_and_means_ignore_what_is_masked(garbage: float):
    per_token = torch.tensor([1.0, 2.0, garbage])
    assert masked_sum(per_token, MASK).item() == 3.0
    assert token_mean(per_token, MASK, global_num_tokens=6).item() == 0.5


def test_the_sum_over_nothing_is_zero():
    assert masked_sum(torch.tensor([1.0, 2.0]), torch.tensor([False, False])).item() == 0.0
