"""Advantages of trajectories from the rewards of their group.

Shapes: N groups of G siblings.
"""

from torch import Tensor

_EPSILON = 1e-6


def group_relative_advantages(rewards: Tensor, *, divide_by_std: bool) -> Tensor:
    """Return A = (r - mean(r)) / (std(r) + 1e-6) within each group. Shapes [N, G] -> [N, G].

    GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2), with the unbiased standard deviation;
    without ``divide_by_std`` the centred reward alone (Dr. GRPO, arXiv 2503.20783). A group of
    equal rewards has advantage 0 everywhere.

    Raises:
        ValueError: fewer than two siblings.
    """
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards must be [groups, siblings >= 2], got {tuple(rewards.shape)}")
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if not divide_by_std:
        return centred
    return centred / (rewards.std(dim=1, keepdim=True) + _EPSILON)
