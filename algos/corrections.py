"""Corrections for data that another policy sampled: weights, rejected tokens, another anchor.

Notation: q = proximal policy, mu = behavior policy, w = q / mu of one token; A = advantage.
Nothing here has a gradient. Shapes: T tokens of B sequences laid end to end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor, where

from algos.packing import Packing
from algos.parts import Options, correction
from algos.ratios import MAX_LOG_RATIO, bounded_exp, log_ratio, sequence_ratio, upcast

NotNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]


def _itself(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionInputs:
    """What a correction is computed from. Nothing outside the packing's mask matters.

    Raises:
        ValueError: a tensor does not have the shape of the packing's mask.
    """

    proximal: Tensor  # [T] log q
    behavior: Tensor  # [T] log mu
    advantages: Tensor  # [T]
    lags: Tensor | None = None  # [T] int64, staleness of each token in learner steps
    packing: Packing
    gather: Callable[[Tensor], Tensor] = _itself  # [n] -> [sum of n], concatenated over ranks

    def __post_init__(self) -> None:
        """Reject tensors that are not aligned."""
        expected = tuple(self.packing.mask.shape)
        for name in ("proximal", "behavior", "advantages", "lags"):
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != expected:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}, expected {expected} as the mask"
                )

    @property
    def log_ratios(self) -> Tensor:
        """Return log w, not clamped, 0.0 outside the mask, [T]."""
        return log_ratio(
            target=self.proximal.detach(), sampled_from=self.behavior, mask=self.packing.mask
        )

    def masked(self, per_token: Tensor) -> Tensor:
        """Return float32 or float64 values, 0.0 outside the mask. Shapes [T] -> [T]."""
        values = upcast(per_token.detach())
        return where(self.packing.mask, values, torch.zeros_like(values))

    def known_lags(self) -> Tensor:
        """Return the lags, at least 0 and 0 outside the mask, [T] int64.

        Raises:
            ValueError: there are none.
        """
        if self.lags is None:
            raise ValueError("this correction needs CorrectionInputs.lags, got None")
        return where(self.packing.mask, self.lags, torch.zeros_like(self.lags)).clamp(min=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What is done to each token's loss."""

    weights: Tensor  # [T] factor, >= 0, no gradient, 1.0 where nothing is corrected
    keep: Tensor  # [T] bool, tokens that stay: a subset of the mask
    proximal: Tensor | None = None  # [T] log q instead of the one given


def combined(corrections: Sequence[Correction], packing: Packing) -> Correction:
    """Return all corrections as one: weights multiply, kept is what all keep, the last q stands.

    Args:
        corrections: of the same tokens; none of them leaves everything as it is.
        packing: of these tokens.
    """
    weights, keep = torch.ones(packing.mask.shape, device=packing.mask.device), packing.mask
    proximal = None
    for one in corrections:
        weights, keep = weights * one.weights, keep & one.keep
        proximal = proximal if one.proximal is None else one.proximal
    return Correction(weights=weights, keep=keep, proximal=proximal)


class ImportanceSamplingOptions(Options, frozen=True, kw_only=True):
    """Whose ratio weighs a token, and its bounds."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """The token's ratio, the product over its sequence, or the product's root (its mean)."""
    high: Positive = 2.0
    """Weights are at most this."""
    low: NotNegative = 0.0
    """Weights are at least this."""

    def __post_init__(self) -> None:
        """Reject what has no meaning."""
        if self.low > self.high:
            raise ValueError(
                f"importance-sampling needs low <= high, got low {self.low}, high {self.high}"
            )


@correction("importance-sampling", ImportanceSamplingOptions)
def importance_sampling(inputs: CorrectionInputs, options: ImportanceSamplingOptions) -> Correction:
    """Truncated importance sampling: weight = min(max(w, low), high).

    On tokens it is the correction of decoupled PPO (arXiv 2110.00641, eq. 12; arXiv 2505.24298,
    eq. 5). On sequences w is the product over the sequence, which is unbiased without a cap, or
    its geometric mean.
    """
    packing, log_ratios = inputs.packing, inputs.log_ratios
    if options.level == "token":
        weights = bounded_exp(log_ratios)
    else:
        geometric = options.level == "geometric"
        weights = packing.spread(sequence_ratio(log_ratios, packing, geometric=geometric))
    return _weighing(inputs, weights.clamp(options.low, options.high))


class RejectionOptions(Options, frozen=True, kw_only=True):
    """What is measured, over what, and its bounds; a measure of exactly a bound stays."""

    measure: Literal["ratio", "k1", "k2", "k3"] = "ratio"
    """The ratio proximal / behavior, or an estimate of KL(behavior || proximal) in nats."""
    level: Literal["token", "sequence", "geometric", "sequence-mean", "sequence-max"] = "token"
    """Each token's measure; or of a sequence the product of ratios and the sum of a KL
    (sequence), the geometric mean of ratios, the mean, or the maximum."""
    high: float | None = 2.0
    """Rejected above this; inf for no limit."""
    low: float | None = None
    """Rejected below this; not set for no limit."""

    def __post_init__(self) -> None:
        """Reject what has no meaning."""
        if self.high is None and self.low is None:
            raise ValueError("rejection needs a bound: high, low, or both; got neither")
        if self.high is not None and self.low is not None and self.low > self.high:
            raise ValueError(f"rejection needs low <= high, got low {self.low}, high {self.high}")
        if self.level == "geometric" and self.measure != "ratio":
            raise ValueError(
                f'level "geometric" is of ratios, got measure "{self.measure}"; '
                'the mean of a KL is level "sequence-mean"'
            )


@correction("rejection", RejectionOptions)
def rejection(inputs: CorrectionInputs, options: RejectionOptions) -> Correction:
    """Drop the tokens, or the whole sequences, whose measure is out of bounds.

    Measures of a token, of samples from mu: ratio w, k1 = -log w, k2 = (log w)^2 / 2,
    k3 = w - 1 - log w; |log w| counts as 20 at most. Together with importance-sampling, bounds on
    the ratio of tokens are IcePop (arXiv 2510.18855), on that of sequences masked importance
    sampling.
    """
    packing = inputs.packing
    log_ratios = inputs.log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    measured = _measured(log_ratios, options.measure)
    if options.level == "geometric" or (options.level, options.measure) == ("sequence", "ratio"):
        ratio = sequence_ratio(log_ratios, packing, geometric=options.level == "geometric")
        measured = packing.spread(ratio)
    elif options.level == "sequence":
        measured = packing.spread(packing.sums(measured))
    elif options.level == "sequence-mean":
        measured = packing.spread(packing.means(measured))
    elif options.level == "sequence-max":
        measured = packing.spread(packing.largest(measured))
    inside = packing.mask
    if options.high is not None:
        inside = inside & (measured <= options.high)
    if options.low is not None:
        inside = inside & (measured >= options.low)
    return _keeping(inputs, inside)


class VetoOptions(Options, frozen=True, kw_only=True):
    """How improbable a token may have become."""

    threshold: Positive = 1e-4
    """A sequence is dropped if a token's ratio proximal / behavior is below this."""


@correction("veto", VetoOptions)
def veto(inputs: CorrectionInputs, options: VetoOptions) -> Correction:
    """Drop a sequence if any of its tokens has w < threshold: it has all but lost its support."""
    lowest = -inputs.packing.largest(-inputs.log_ratios)
    return _keeping(inputs, bounded_exp(inputs.packing.spread(lowest)) >= options.threshold)


class OpsmOptions(Options, frozen=True, kw_only=True):
    """How far a failed sequence may be from the proximal policy."""

    max_kl: NotNegative = 1e-4
    """Tokens with A < 0 are dropped above this mean KL of their sequence, in nats."""


@correction("opsm", OpsmOptions)
def opsm(inputs: CorrectionInputs, options: OpsmOptions) -> Correction:
    """Off-policy sequence masking: drop where A < 0 and mean_t(-log w) > max_kl.

    What the policy would hardly write again teaches nothing by having failed (arXiv 2512.02556).
    """
    packing = inputs.packing
    is_far = packing.spread(packing.means(-inputs.log_ratios)) > options.max_kl
    return _keeping(inputs, ~(is_far & (inputs.masked(inputs.advantages) < 0)))


class M2poOptions(Options, frozen=True, kw_only=True):
    """Trust region of the whole minibatch."""

    threshold: Positive = 0.04
    """Largest mean of log(proximal / behavior) squared over the tokens that stay."""


@correction("m2po", M2poOptions, needs=("whole_minibatch",))
def m2po(inputs: CorrectionInputs, options: M2poOptions) -> Correction:
    """M2PO: drop the tokens of largest (log w)^2 until its mean is at most the threshold.

    Dropped are only tokens that a PPO clip would stop: A > 0 and w > 1, or A < 0 and w < 1. All
    others stay and count in the mean; if it is above the threshold without any of the former,
    these are all dropped (arXiv 2510.01161). |log w| counts as 20 at most. Tokens of
    equal measure at the limit are dropped together: the result does not depend on their order.
    """
    mask = inputs.packing.mask
    log_ratios = inputs.log_ratios.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    squares = log_ratios.square()
    droppable = mask & (inputs.masked(inputs.advantages) * log_ratios.sign() > 0)
    limit = _second_moment_limit(
        fixed=inputs.gather(squares[mask & ~droppable]),
        droppable=inputs.gather(squares[droppable]),
        threshold=options.threshold,
    )
    return _keeping(inputs, ~droppable | (squares < limit))


class StalenessDecayOptions(Options, frozen=True, kw_only=True):
    """How fast old tokens lose their weight."""

    decay: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """A token's weight falls by this factor with every learner step of staleness."""


@correction("staleness-decay", StalenessDecayOptions)
def staleness_decay(inputs: CorrectionInputs, options: StalenessDecayOptions) -> Correction:
    """Weigh a token by decay ** staleness, whatever its ratio is."""
    lags = inputs.known_lags().to(inputs.log_ratios.dtype)
    return _weighing(inputs, options.decay**lags)


class ApproximateProximalOptions(Options, frozen=True, kw_only=True):
    """There is nothing to set."""


@correction("approximate-proximal", ApproximateProximalOptions, needs=("first",))
def approximate_proximal(inputs: CorrectionInputs, _: ApproximateProximalOptions) -> Correction:
    """Place the anchor between mu and the policy that was given as proximal, one version back.

    log q' = log mu + a (log q - log mu) with a = 1 - 1 / staleness, and a = 0 for staleness 0:
    linear in the version between that of the token and that of q. With the current policy given
    as q, nothing is evaluated for the anchor.
    """
    lags = inputs.known_lags().to(inputs.log_ratios.dtype)
    share = 1.0 - 1.0 / lags.clamp(min=1.0)
    anchor = inputs.masked(inputs.behavior) + share * inputs.log_ratios
    everything = _keeping(inputs, inputs.packing.mask)
    return Correction(weights=everything.weights, keep=everything.keep, proximal=anchor)


def _measured(log_ratios: Tensor, measure: str) -> Tensor:
    """Return the measure of each token. Shapes [T] -> [T]."""
    if measure == "k1":
        return -log_ratios
    if measure == "k2":
        return 0.5 * log_ratios.square()
    ratio = log_ratios.exp()
    return ratio - 1.0 - log_ratios if measure == "k3" else ratio


def _second_moment_limit(*, fixed: Tensor, droppable: Tensor, threshold: float) -> Tensor:
    """Return the least square that must go for the mean of the rest to be at most the threshold.

    Shapes: [m] squares that stay and [n] that may go, of all ranks -> []. inf: none must go.
    """
    ascending = droppable.sort().values
    none = ascending.new_zeros(1)
    sums = fixed.sort().values.sum() + torch.cat([none, ascending.cumsum(0)])
    numbers = len(fixed) + torch.arange(len(sums), device=sums.device)
    is_met = sums / numbers.clamp(min=1) <= threshold
    staying = where(is_met, torch.arange(len(sums), device=sums.device), 0).max()
    return torch.cat([ascending, none + torch.inf])[staying]


def _weighing(inputs: CorrectionInputs, weights: Tensor) -> Correction:
    """Return a correction that weighs and rejects nothing."""
    mask = inputs.packing.mask
    return Correction(weights=where(mask, weights, torch.ones_like(weights)), keep=mask)


def _keeping(inputs: CorrectionInputs, keep: Tensor) -> Correction:
    """Return a correction that rejects and weighs nothing."""
    return Correction(weights=torch.ones_like(inputs.log_ratios), keep=inputs.packing.mask & keep)
