"""Policy-gradient surrogates. Each is one formula over shared parts.

Notation: pi = current, q = proximal, mu = behavior policy; A = advantage. Shapes: T tokens.
"""

from dataclasses import dataclass

from torch import Tensor, minimum

from algos.batch import TrainBatch
from algos.ratios import importance_ratio
from algos.reduce import token_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Trust region on the ratio: [1 - low, 1 + high]."""

    low: float = 0.2
    high: float = 0.2


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """Return -min(r A, clip(r) A) per token (PPO, arXiv 1707.06347, eq. 7). Shapes [T]."""
    clipped = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    return -minimum(ratio * advantages, clipped * advantages)


def decoupled_ppo_loss(batch: TrainBatch, clip: Clip, *, max_correction: float) -> Tensor:
    """Return the mean of min(q / mu, c) * -min(r A, clip(r) A) with r = pi / q. Shape [].

    Decoupled PPO (arXiv 2110.00641, eq. 12; arXiv 2505.24298, eq. 5): the trust region is around
    the proximal policy q, and the ratio q / mu, capped at ``max_correction`` and without
    gradient, corrects for staleness.
    """
    ratio = importance_ratio(
        target=batch.current_logprobs,
        sampled_from=batch.proximal_logprobs,
        mask=batch.loss_mask,
    )
    correction = importance_ratio(
        target=batch.proximal_logprobs,
        sampled_from=batch.behavior_logprobs,
        mask=batch.loss_mask,
    ).clamp(max=max_correction)
    per_token = correction.detach() * clipped_surrogate(ratio, batch.advantages, clip)
    return token_mean(per_token, batch.loss_mask, global_num_tokens=batch.global_num_tokens)
