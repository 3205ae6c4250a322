"""Sums that become means once every microbatch and rank has added its own. Shapes: T tokens."""

from collections.abc import Mapping

from torch import Tensor, where

from algos.batch import TrainBatch
from algos.losses import Clip
from algos.ratios import importance_ratio
from algos.reduce import masked_sum

_SQUARED = "staleness/correction_squared"


def diagnostic_sums(
    batch: TrainBatch, entropy: Tensor, clip: Clip, *, num_lags: int = 0
) -> dict[str, Tensor]:
    """Return per-token sums over the mask; divide by the global number of tokens. Shapes [].

    mismatch_kl is the k3 estimate of KL(mu || q) (http://joschu.net/blog/kl-approx.html). With
    ``num_lags``, what depends on the age of a token is there once more for each version lag, as
    NAME@lagK with the number of its tokens as tokens@lagK; older ones count to the last.
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
    aging = {
        "policy/clip_fraction": clipped.float(),
        "staleness/correction": correction,
        "staleness/correction_squared": correction.square(),
        "staleness/mismatch_kl": correction - 1.0 - log_correction,
    }
    others = {
        "policy/entropy": entropy.detach(),
        "policy/ratio": ratio,
        "staleness/logprob_abs_diff": log_correction.abs(),
    }
    sums = {name: masked_sum(values, mask) for name, values in (aging | others).items()}
    if batch.lags is not None:
        lags = batch.lags.clamp(0, max(0, num_lags - 1))
        for lag in range(num_lags):
            here = mask & (lags == lag)
            sums[f"tokens@lag{lag}"] = here.sum()
            for name, values in aging.items():
                sums[f"{name}@lag{lag}"] = masked_sum(values, here)
    return sums


def figures_of(sums: Mapping[str, float], num_tokens: int) -> dict[str, float]:
    """Return means and effective sample shares, overall and by version lag.

    Args:
        sums: of ``diagnostic_sums``, over all microbatches and ranks.
        num_tokens: masked-in tokens of all of them.
    """
    figures: dict[str, float] = {}
    for name, total in sums.items():
        _, at, lag = name.partition("@")
        count = sums[f"tokens@{lag}"] if at else num_tokens
        if count > 0 and not name.startswith("tokens@"):
            figures[name] = total / count
    for name in [one for one in figures if one.startswith(_SQUARED)]:
        suffix = name.removeprefix(_SQUARED)
        squared = figures.pop(name)
        mean = figures[f"staleness/correction{suffix}"]
        figures[f"staleness/ess{suffix}"] = effective_sample_share(mean, squared)
        if suffix:
            del figures[f"staleness/correction{suffix}"]
    return figures


def effective_sample_share(mean_ratio: float, mean_squared_ratio: float) -> float:
    """Return ESS / n = E[r]^2 / E[r^2] (Kish), 1.0 when every ratio is equal."""
    return mean_ratio**2 / mean_squared_ratio if mean_squared_ratio > 0 else 0.0
