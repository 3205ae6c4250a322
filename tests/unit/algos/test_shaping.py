from typing import Literal, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from docs.generate.evidence import DEFINITION, proves
from slipstream.algos.shaping import (
    Over,
    Strategy,
    normalized,
    overlong_filter,
    resampling,
    scaled,
    zero_variance,
)

REWARDS = torch.tensor([1.0, 0.0, 0.5, -0.5, 0.5, 0.5], dtype=torch.float64)
GROUPS = torch.tensor([1, 0, 1, 0, 2, 2])


@proves("data.scale", "data.bias", "data.clip", against=DEFINITION)
def test_rewards_are_moved_then_scaled_then_clipped():
    rewards = torch.tensor([1.0, 0.5, -3.0])
    assert scaled(rewards, scale=2.0, bias=-0.25, clip=None).tolist() == [1.5, 0.5, -6.5]
    assert scaled(rewards, scale=2.0, bias=-0.25, clip=1.0).tolist() == [1.0, 0.5, -1.0]


@proves("data.normalize = group", "data.normalize = batch", against=DEFINITION)
@pytest.mark.parametrize("over", ["batch", "group"])
@pytest.mark.parametrize("divide_by_std", [True, False])
def test_normalized_rewards_have_mean_0_and_std_1(over: Over, divide_by_std: bool):
    rewards = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 7
    groups = torch.tensor([0, 1, 2] * 4)
    ours = normalized(rewards, groups, 3, over=over, divide_by_std=divide_by_std, epsilon=0.0)
    for group in range(3) if over == "group" else [None]:
        of = torch.ones(12, dtype=torch.bool) if group is None else groups == group
        assert ours[of].mean().item() == pytest.approx(0.0, abs=1e-12)
        std = 1.0 if divide_by_std else rewards[of].std().item()
        assert ours[of].std().item() == pytest.approx(std)


def test_epsilon_is_added_to_the_standard_deviation():
    ours = normalized(
        torch.tensor([0.0, 2.0]),
        torch.tensor([0, 0]),
        1,
        over="group",
        divide_by_std=True,
        epsilon=0.5,
    )
    assert ours.tolist() == pytest.approx([-1 / (2**0.5 + 0.5), 1 / (2**0.5 + 0.5)])


@pytest.mark.parametrize("divide_by_std", [True, False])
def test_a_reward_that_is_alone_or_equal_to_all_becomes_0(divide_by_std: bool):
    ours = normalized(
        torch.tensor([5.0, 0.1, 0.1, 0.1]),
        torch.tensor([1, 0, 0, 0]),
        2,
        over="group",
        divide_by_std=divide_by_std,
        epsilon=1e-9,
    )
    assert ours.tolist() == [0.0] * 4


@proves("data.overlong_filter", against=DEFINITION)
def test_truncated_responses_are_left_out():
    copies = overlong_filter(torch.tensor([True, False, True]))
    assert copies.tolist() == [0, 1, 0]
    assert copies.dtype == torch.int64


@proves("data.zero_variance = mask", against=DEFINITION)
def test_a_group_without_variance_is_found_whatever_its_neighbors_are():
    assert zero_variance(REWARDS, GROUPS, 3).tolist() == [False] * 4 + [True] * 2
    alone = zero_variance(torch.tensor([3.0, 1.0, 3.0]), torch.tensor([2, 0, 1]), 3)
    assert alone.tolist() == [True] * 3
    # equal to the last bit, not nearly
    nearly = torch.tensor([0.3, 0.1 + 0.2], dtype=torch.float64)
    assert zero_variance(nearly, torch.tensor([0, 0]), 1).tolist() == [False, False]


# ---- resampling --------------------------------------------------------------


def drawn(strategy: Strategy, rewards: Tensor = REWARDS, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return resampling(rewards, generator, strategy=strategy, power=2.0, share=0.25)


@pytest.mark.parametrize("strategy", ["pow", "max-min", "max-random"])
@given(rewards=st.lists(st.floats(-10, 10), min_size=1, max_size=30), seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=30)
def test_as_many_are_drawn_as_there_were_and_the_seed_decides_which(
    strategy: Strategy, rewards: list[float], seed: int
):
    given_rewards = torch.tensor(rewards, dtype=torch.float64)
    copies = drawn(strategy, given_rewards, seed)
    assert copies.dtype == torch.int64
    assert copies.shape == given_rewards.shape
    assert copies.sum().item() == len(rewards)
    assert copies.min().item() >= 0
    assert torch.equal(copies, drawn(strategy, given_rewards, seed))


def test_another_seed_draws_others():
    rewards = torch.linspace(0.5, 1.0, 64)
    assert not torch.equal(drawn("pow", rewards, seed=1), drawn("pow", rewards, seed=2))


@proves(
    *(f"data.resample = {one}" for one in get_args(Strategy)), against=DEFINITION, what="chances"
)
@proves("data.resample_power", "data.resample_share", against=DEFINITION, what="chances")
def test_the_mean_of_many_draws_is_the_chance_of_the_strategy():
    for strategy, weights in [
        ("pow", [1.0, 0.0, 0.25, 0.25, 0.25, 0.25]),
        ("max-min", [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]),
        ("max-random", [1.0, 0.25, 0.25, 0.25, 0.25, 0.25]),
    ]:
        rounds = 4000
        generator = torch.Generator().manual_seed(7)
        total = torch.zeros(len(REWARDS))
        for _ in range(rounds):
            total += resampling(REWARDS, generator, strategy=strategy, power=2.0, share=0.25)
        chances = np.array(weights) / np.sum(weights)
        # five standard deviations of a multinomial count
        spread = 5 * np.sqrt(chances * (1 - chances) / (rounds * len(REWARDS)))
        difference = np.abs(total.numpy() / (rounds * len(REWARDS)) - chances)
        assert (difference <= spread + 1e-4).all()


@pytest.mark.parametrize("strategy", ["pow", "max-min", "max-random"])
def test_a_batch_of_zeros_is_drawn_from_evenly(strategy: Literal["pow", "max-min", "max-random"]):
    copies = drawn(strategy, torch.zeros(2000))
    # each expects one copy; nothing is preferred
    assert copies.sum().item() == 2000
    assert copies.max().item() < 10
    assert copies[:1000].sum().item() == pytest.approx(1000, abs=5 * 2000**0.5 / 2)
