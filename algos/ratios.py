"""Importance ratios. Every loss takes its ratio from here.

Shapes: T tokens.
"""

from torch import Tensor, where

MAX_LOG_RATIO = 10.0  # exp(10) is about 2e4: past this a token carries no usable signal


def importance_ratio(*, target: Tensor, sampled_from: Tensor, mask: Tensor) -> Tensor:
    """Return pi_target / pi_sampled_from per token, 1.0 outside the mask. Shapes [T].

    Gradient flows through ``target`` only.
    """
    log_ratio = where(mask, target - sampled_from.detach(), 0.0)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
