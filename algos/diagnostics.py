"""Sums that become means once every microbatch and rank has added its own. Shapes: T tokens."""

from torch import Tensor, where

from algos.batch import TrainBatch
from algos.losses import Clip
from algos.ratios import importance_ratio
from algos.reduce import masked_sum


def diagnostic_sums(batch: TrainBatch, entropy: Tensor, clip: Clip) -> dict[str, Tensor]:
    """Return per-token sums over the mask; divide by the global number of tokens. Shapes [].

    mismatch_kl is the k3 estimate of KL(mu || q) (http://joschu.net/blog/kl-approx.html).
    """
    mask = batch.loss_mask
    ratio = importance_ratio(
        target=batch.current_logprobs, sampled_from=batch.proximal_logprobs, mask=mask
    ).detach()
    correction = importance_ratio(
        target=batch.proximal_logprobs, sampled_from=batch.behavior_logprobs, mask=mask
    )
    log_correction = where(mask, batch.proximal_logprobs - batch.behavior_logprobs, 0.0)
    clipped = (ratio < 1.0 - clip.low) | (ratio > 1.0 + clip.high)
    return {
        "policy/entropy": masked_sum(entropy.detach(), mask),
        "policy/clip_fraction": masked_sum(clipped.float(), mask),
        "policy/ratio": masked_sum(ratio, mask),
        "staleness/correction": masked_sum(correction, mask),
        "staleness/correction_squared": masked_sum(correction.square(), mask),
        "staleness/mismatch_kl": masked_sum(correction - 1.0 - log_correction, mask),
        "staleness/logprob_abs_diff": masked_sum(log_correction.abs(), mask),
    }


def effective_sample_share(mean_ratio: float, mean_squared_ratio: float) -> float:
    """Return ESS / n = E[r]^2 / E[r^2] (Kish), 1.0 when every ratio is equal."""
    return mean_ratio**2 / mean_squared_ratio if mean_squared_ratio > 0 else 0.0
