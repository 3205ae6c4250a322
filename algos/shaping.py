"""Shapes rewards and selects trajectories before advantages are computed.

``copies`` counts how often a trajectory is in the batch: 0 leaves it out, 2 trains it twice.

Shapes: N trajectories of a step.
"""

from typing import Literal, assert_never

import torch
from torch import Tensor, where

Over = Literal["batch", "group"]
Strategy = Literal["pow", "max-min", "max-random"]

_LEAST_WEIGHT = 1e-8  # a trajectory's in resampling: a batch of zeros is drawn from evenly
_ROUNDING = 1e-12  # share of a group's sum of squares below which a part of it is no spread


def scaled(rewards: Tensor, *, scale: float, bias: float, clip: float | None) -> Tensor:
    """Return (rewards + bias) * scale, clipped to [-clip, clip]. Shapes [N] -> [N] float64."""
    changed = (rewards.double() + bias) * scale
    return changed if clip is None else changed.clamp(-clip, clip)


def normalized(
    rewards: Tensor,
    groups: Tensor,
    num_groups: int,
    *,
    over: Over,
    divide_by_std: bool,
    epsilon: float,
) -> Tensor:
    """Return (r - mean) / (std + epsilon) over the group or the whole batch. [N] -> [N] float64.

    The standard deviation is unbiased. A lone value, or one equal to all others, becomes 0.0.

    Args:
        rewards: [N].
        groups: [N] int64, the group of each trajectory, below num_groups.
        num_groups: number of groups of the step.
        over: rewards that have a mean and a standard deviation in common.
        divide_by_std: False leaves r - mean.
        epsilon: added to the standard deviation.
    """
    if over == "batch":
        groups, num_groups = torch.zeros_like(groups), 1
    centered = group_centered(rewards, groups, num_groups)
    if not divide_by_std:
        return centered
    return centered / (group_deviations(rewards, groups, num_groups) + epsilon)


def overlong_penalty(
    lengths: Tensor, *, max_tokens: int, buffer_tokens: int, factor: float
) -> Tensor:
    """Return the penalty of too long a response, -factor to 0.0. Shapes [N] -> [N] float64.

    Soft overlong punishment, DAPO (arXiv 2503.14476) eq. 13: 0 up to ``max_tokens -
    buffer_tokens``, from there falling in a straight line to -factor at ``max_tokens``.
    """
    into_buffer = lengths.double() - (max_tokens - buffer_tokens)
    return -factor * (into_buffer / buffer_tokens).clamp(0.0, 1.0)


def overlong_filter(is_truncated: Tensor) -> Tensor:
    """Return the copies that leave truncated responses out (DAPO). [N] bool -> [N] int64."""
    return (~is_truncated).long()


def zero_variance(rewards: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Return True where all rewards of the trajectory's group are equal. Shapes [N] -> [N] bool."""
    least = group_extremes(rewards, groups, num_groups, "amin")
    return least == group_extremes(rewards, groups, num_groups, "amax")


def resampling(
    rewards: Tensor, generator: torch.Generator, *, strategy: Strategy, power: float, share: float
) -> Tensor:
    """Return copies that follow the rewards, N in all: PF-PPO (arXiv 2409.06957). [N] int64.

    N trajectories are drawn with replacement, each with a chance proportional to

        pow          |r| ** power
        max-min      1 for the best and the worst, 0 for the rest
        max-random   1 for the best, ``share`` for the rest

    Args:
        rewards: [N].
        generator: source of the draw; the same seed draws the same.
        strategy: one of the above.
        power: exponent of "pow".
        share: chance of one of the rest, in units of that of the best ("max-random").
    """
    rewards = rewards.double()
    best, worst = rewards == rewards.max(), rewards == rewards.min()
    match strategy:
        case "pow":
            weights = rewards.abs().pow(power)
        case "max-min":
            weights = (best | worst).double()
        case "max-random":
            weights = best.double() + share * (~best).double()
        case _:
            assert_never(strategy)
    drawn = torch.multinomial(
        weights + _LEAST_WEIGHT, len(rewards), replacement=True, generator=generator
    )
    return torch.bincount(drawn, minlength=len(rewards))


def group_sums(values: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Return the sum over each trajectory's group, at the trajectory. Shapes [N] -> [N]."""
    zeros = torch.zeros(num_groups, dtype=values.dtype, device=values.device)
    return zeros.index_add(0, groups, values)[groups]


def group_extremes(
    values: Tensor, groups: Tensor, num_groups: int, which: Literal["amin", "amax"]
) -> Tensor:
    """Return the extreme over each trajectory's group, at the trajectory. Shapes [N] -> [N]."""
    start = torch.zeros(num_groups, dtype=values.dtype, device=values.device)
    return start.scatter_reduce(0, groups, values, which, include_self=False)[groups]


def group_centered(
    rewards: Tensor, groups: Tensor, num_groups: int, weights: Tensor | None = None
) -> Tensor:
    """Return r minus the mean of its group, exactly 0.0 if all are equal. [N] -> [N] float64.

    Args:
        rewards: [N].
        groups: [N] int64.
        num_groups: number of groups of the step.
        weights: [N] >= 0, of the mean; None weighs all the same.
    """
    # Relative to the smallest, equal rewards are zeros: no rounding is left for a std to blow up.
    above = rewards.double() - group_extremes(rewards, groups, num_groups, "amin")
    weights = torch.ones_like(above) if weights is None else weights.double()
    total = group_sums(weights, groups, num_groups)
    weighted = group_sums(weights * above, groups, num_groups)
    return above - weighted / where(total > 0, total, 1.0)


def group_deviations(rewards: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Return the unbiased standard deviation of the group, 1.0 of a single. [N] -> [N] float64."""
    squares = group_centered(rewards, groups, num_groups).square()
    counts = group_sums(torch.ones_like(squares), groups, num_groups)
    variances = group_sums(squares, groups, num_groups) / (counts - 1).clamp(min=1)
    return where(counts > 1, variances.sqrt(), 1.0)


def sibling_deviations(rewards: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Return the unbiased standard deviation of each trajectory's siblings. [N] -> [N] float64.

    It is 0.0 where they are equal, and where there are fewer than two. Their sum of squares about
    their mean is that of the group about its mean, less n / (n - 1) of the trajectory's square.
    """
    squares = group_centered(rewards, groups, num_groups).square()
    counts = group_sums(torch.ones_like(squares), groups, num_groups)
    total = group_sums(squares, groups, num_groups)
    of_siblings = total - squares * counts / (counts - 1).clamp(min=1)
    of_siblings = where((of_siblings > _ROUNDING * total) & (counts > 2), of_siblings, 0.0)
    return (of_siblings / (counts - 2).clamp(min=1)).sqrt()
