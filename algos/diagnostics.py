"""Sums that become means once every microbatch and rank has added its own. Shapes: T tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.algos.ratios import bounded_exp, log_ratio

Sums = dict[str, Tensor]
_TOKENS = "policy/tokens"
_CRITIC_TOKENS = "critic/tokens"
_CORRECTION = "staleness/correction"
_SQUARED = "staleness/correction_squared"
_MAXIMA = ("policy/ratio_max", "staleness/correction_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosed:
    """Inputs and effects of a loss, per token and without gradient. Shapes [T]."""

    mask: Tensor  # bool, the tokens that the policy chose
    keep: Tensor  # bool, not rejected by any correction
    proximal: Tensor
    behavior: Tensor
    entropy: Tensor
    ratio: Tensor  # the one that the surrogate clips
    weights: Tensor  # the correction's
    clipped_up: Tensor  # bool
    clipped_down: Tensor  # bool
    clipped_dual: Tensor  # bool


def diagnostic_sums(seen: Diagnosed, lags: Tensor | None = None, *, num_lags: int = 0) -> Sums:
    """Return sums over the mask, their number of tokens, and maxima. Shapes [].

    mismatch_kl is the k3 estimate of KL(mu || q) (http://joschu.net/blog/kl-approx.html). With
    ``num_lags``, everything is there once more for each version lag, as NAME@lagK; older tokens
    count to the last.

    Args:
        seen: inputs and effects of one microbatch.
        lags: [T] int, learner steps between a token's policy and the step that trains it.
        num_lags: how many of them are distinguished.
    """
    mask = seen.mask
    log_correction = log_ratio(target=seen.proximal.detach(), sampled_from=seen.behavior, mask=mask)
    correction = bounded_exp(log_correction)
    clipped = seen.clipped_up | seen.clipped_down | seen.clipped_dual
    per_token = {
        _TOKENS: mask,
        "policy/entropy": seen.entropy,
        "policy/ratio": seen.ratio,
        "policy/clip_fraction": clipped,
        "policy/clip_up": seen.clipped_up,
        "policy/clip_down": seen.clipped_down,
        "policy/clip_dual": seen.clipped_dual,
        "staleness/masked": mask & ~seen.keep,
        "staleness/weight": seen.weights * seen.keep,
        _CORRECTION: correction,
        _SQUARED: correction.square(),
        "staleness/mismatch_kl": correction - 1.0 - log_correction,
        "staleness/logprob_abs_diff": log_correction.abs(),
    }
    stacked = torch.stack([values.detach().to(correction.dtype) for values in per_token.values()])
    stacked = torch.where(mask, stacked, torch.zeros_like(stacked))
    highest = torch.stack([seen.ratio.detach().to(correction.dtype), correction])
    highest = torch.where(mask, highest, torch.zeros_like(highest))
    sums = dict(zip(per_token, stacked.sum(-1), strict=True))
    sums |= dict(zip(_MAXIMA, highest.amax(-1), strict=True))
    if lags is None or num_lags == 0:
        return sums
    index = lags.clamp(0, num_lags - 1).long()
    by_lag = stacked.new_zeros(len(stacked), num_lags).index_add(1, index, stacked)
    most_by_lag = highest.new_zeros(2, num_lags).scatter_reduce(
        1, index.expand(2, -1), highest, "amax"
    )
    for lag in range(num_lags):
        sums |= {f"{name}@lag{lag}": by_lag[i, lag] for i, name in enumerate(per_token)}
        sums |= {f"{name}@lag{lag}": most_by_lag[i, lag] for i, name in enumerate(_MAXIMA)}
    return sums


def is_maximum(name: str) -> bool:
    """Return True if figures of this name are combined by maximum instead of sum."""
    return name.partition("@")[0] in _MAXIMA


def add_sums(total: Sums, more: Mapping[str, Tensor]) -> None:
    """Add a microbatch's sums."""
    for name, value in more.items():
        if name not in total:
            total[name] = value.clone()
        elif is_maximum(name):
            total[name] = torch.maximum(total[name], value)
        else:
            total[name] = total[name] + value


def added(several: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums and maxima of several minibatches together."""
    totals: dict[str, float] = {}
    for sums in several:
        for name, value in sums.items():
            if name not in totals:
                totals[name] = value
            else:
                both = totals[name], value
                totals[name] = max(both) if is_maximum(name) else sum(both)
    return totals


def figures_of(sums: Mapping[str, float]) -> dict[str, float]:
    """Return means, maxima and effective sample shares, overall and by version lag.

    Args:
        sums: results of ``diagnostic_sums``, over all microbatches and ranks.
    """
    figures: dict[str, float] = {}
    for name, total in sums.items():
        base, at, lag = name.partition("@")
        count = sums.get(_TOKENS + at + lag, 0.0)
        if count <= 0:
            continue
        figures[name] = total if base == _TOKENS or is_maximum(name) else total / count
    for name in [figure for figure in figures if figure.startswith(_SQUARED)]:
        suffix = name.removeprefix(_SQUARED)
        squared = figures.pop(name)
        mean = figures[f"{_CORRECTION}{suffix}"]
        figures[f"staleness/ess{suffix}"] = effective_sample_share(mean, squared)
    return figures


def effective_sample_share(mean_ratio: float, mean_squared_ratio: float) -> float:
    """Return ESS / n = E[r]^2 / E[r^2] (Kish), 1.0 when every ratio is equal."""
    return mean_ratio**2 / mean_squared_ratio if mean_squared_ratio > 0 else 0.0


def critic_sums(*, mask: Tensor, values: Tensor, returns: Tensor, is_clipped: Tensor) -> Sums:
    """Return sums over the mask that measure how well returns are predicted. Shapes [].

    Args:
        mask: [T] bool.
        values: [T] predicted before the step.
        returns: [T] observed.
        is_clipped: [T] bool, errors whose gradient the clip took.
    """
    per_token = {
        _CRITIC_TOKENS: mask,
        "critic/clip_fraction": is_clipped,
        "critic/value": values,
        "critic/return": returns,
        "critic/return_squared": returns.square(),
        "critic/squared_error": (returns - values).square(),
    }
    stacked = torch.stack([each.detach().to(values.dtype) for each in per_token.values()])
    sums = torch.where(mask, stacked, torch.zeros_like(stacked)).double().sum(-1)
    return dict(zip(per_token, sums, strict=True))


def critic_figures(sums: Mapping[str, float]) -> dict[str, float]:
    """Return means, and the explained variance 1 - E[(R - V)^2] / Var[R] (0 of constant returns).

    Args:
        sums: results of ``critic_sums``, over all microbatches and ranks.
    """
    count = max(sums[_CRITIC_TOKENS], 1.0)
    means = {name: total / count for name, total in sums.items() if name != _CRITIC_TOKENS}
    variance = means.pop("critic/return_squared") - means["critic/return"] ** 2
    error = means.pop("critic/squared_error")
    means["critic/explained_variance"] = 1.0 - error / variance if variance > 1e-12 else 0.0
    return means
