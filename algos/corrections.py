"""Corrections for data that another policy sampled: weights, rejected tokens, another anchor.

Notation: q = proximal policy, mu = behavior policy, w = q / mu of one token; A = advantage.
Nothing here has a gradient. Shapes: T tokens of B sequences laid end to end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor, where
from typing_extensions import override

from slipstream.algos.packing import Packing
from slipstream.algos.parts import Options, correction
from slipstream.algos.ratios import (
    MAX_LOG_RATIO,
    binary_kl,
    bounded_exp,
    log_ratio,
    sequence_ratio,
    upcast,
)
from slipstream.algos.reduce import cumulated

NotNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


def _itself(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionInputs:
    """Inputs of a correction. Nothing outside the packing's mask matters.

    Optional fields are set for corrections that need them (``needs``), and perhaps for others.

    Raises:
        ValueError: a tensor does not have the shape of the packing's mask.
    """

    proximal: Tensor  # [T] log q
    behavior: Tensor  # [T] log mu
    advantages: Tensor  # [T]
    lags: Tensor | None = None  # [T] int64, staleness of each token in learner steps
    packing: Packing
    entropy: Tensor | None = None  # [T] of q
    reference: Tensor | None = None  # [T] log ref
    gather: Callable[[Tensor], Tensor] = _itself  # [n] -> [sum of n], concatenated over ranks

    def __post_init__(self) -> None:
        """Reject tensors that are not aligned."""
        expected = tuple(self.packing.mask.shape)
        for name in ("proximal", "behavior", "advantages", "lags", "entropy", "reference"):
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != expected:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}, expected {expected} as the mask"
                )

    @property
    def log_ratios(self) -> Tensor:
        """Log w, not clamped, 0.0 outside the mask, [T]."""
        return log_ratio(
            target=self.proximal.detach(), sampled_from=self.behavior, mask=self.packing.mask
        )

    def masked(self, per_token: Tensor) -> Tensor:
        """Return float32 or float64 values, 0.0 outside the mask. Shapes [T] -> [T]."""
        values = upcast(per_token.detach())
        return where(self.packing.mask, values, torch.zeros_like(values))

    def total(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return sums over all ranks, in float64; for parts that need the whole minibatch.

        Args:
            values: numbers of this rank, each [].
        """
        mine = torch.stack([value.double() for value in values])
        return list(self.gather(mine).view(-1, len(values)).sum(0))

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
    """Changes to each token's loss."""

    weights: Tensor  # [T] factor, >= 0, no gradient, 1.0 where nothing is corrected
    keep: Tensor  # [T] bool, tokens that stay: a subset of the mask
    proximal: Tensor | None = None  # [T] log q instead of the one given
    penalty: Tensor | None = None  # [T] >= 0, added to the loss times |log r|; None is 0


def combined(corrections: Sequence[Correction], packing: Packing) -> Correction:
    """Return all corrections as one.

    Weights multiply, kept is what all keep, the last q wins, penalties add up.

    Args:
        corrections: corrections of the same tokens; an empty sequence changes nothing.
        packing: layout of these tokens.
    """
    weights, keep = torch.ones(packing.mask.shape, device=packing.mask.device), packing.mask
    proximal = penalty = None
    for part in corrections:
        weights, keep = weights * part.weights, keep & part.keep
        proximal = proximal if part.proximal is None else part.proximal
        if part.penalty is not None:
            penalty = part.penalty if penalty is None else penalty + part.penalty
    return Correction(weights=weights, keep=keep, proximal=proximal, penalty=penalty)


class ImportanceSamplingOptions(Options, frozen=True, kw_only=True):
    """Whose ratio weighs a token, and its bounds."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """The token's ratio, the product over its sequence, or the product's root (its mean)."""
    high: Positive = 2.0
    """Weights are at most this."""
    low: NotNegative = 0.0
    """Weights are at least this."""
    normalize: bool = False
    """Divide by the mean weight of the minibatch, after the bounds: the step stays as long."""

    @property
    @override
    def needs(self) -> frozenset[str]:
        return frozenset({"whole_minibatch"}) if self.normalize else frozenset()

    def __post_init__(self) -> None:
        """Reject meaningless settings."""
        if self.low > self.high:
            raise ValueError(
                f"importance-sampling needs low <= high, got low {self.low}, high {self.high}"
            )


@correction("importance-sampling", ImportanceSamplingOptions)
def importance_sampling(inputs: CorrectionInputs, options: ImportanceSamplingOptions) -> Correction:
    """Truncated importance sampling: weight = min(max(w, low), high).

    On tokens it is the correction of decoupled PPO (arXiv 2110.00641, eq. 12; arXiv 2505.24298,
    eq. 5). On sequences w is the product over the sequence, which is unbiased without a cap, or
    its geometric mean. Normalized weights have mean 1 over the tokens of a minibatch, or over its
    sequences where they are of sequences.
    """
    packing, log_ratios = inputs.packing, inputs.log_ratios
    if options.level == "token":
        counted = weights = bounded_exp(log_ratios).clamp(options.low, options.high)
        there = packing.mask
    else:
        geometric = options.level == "geometric"
        ratios = sequence_ratio(log_ratios, packing, geometric=geometric)
        counted, there = ratios.clamp(options.low, options.high), packing.counts > 0
        weights = packing.spread(counted)
    if options.normalize:
        total, count = inputs.total([where(there, counted, 0.0).sum(), there.sum()])
        mean = total / count.clamp(min=1)
        weights = weights / where(mean > 0, mean, 1.0).to(weights.dtype)
    return _weighing(inputs, weights)


class RejectionOptions(Options, frozen=True, kw_only=True):
    """Measure, its unit and its bounds; a measure of exactly a bound stays."""

    measure: Literal["ratio", "k1", "k2", "k3", "tv", "binary-kl"] = "ratio"
    """The ratio proximal / behavior; an estimate of KL(behavior || proximal) in nats (k1 to k3);
    how far the probability moved (tv), or the KL of this token against all others (binary-kl)."""
    level: Literal["token", "sequence", "geometric", "sequence-mean", "sequence-max"] = "token"
    """Each token's measure; or of a sequence the product of ratios and the sum of other measures
    (sequence), the geometric mean of ratios, the mean, or the maximum."""
    high: float | None = 2.0
    """Rejected above this; inf for no limit."""
    low: float | None = None
    """Rejected below this; not set for no limit."""

    def __post_init__(self) -> None:
        """Reject meaningless settings."""
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
    k3 = w - 1 - log w, tv = |q - mu|, binary-kl = KL(mu || q) of the coin "this token or another";
    |log w| counts as 20 at most in the first four. Together with importance-sampling, bounds on
    the ratio of tokens are IcePop (arXiv 2510.18855), on that of sequences masked importance
    sampling. tv and binary-kl do not trip over rare tokens (arXiv 2602.04879).
    """
    packing = inputs.packing
    log_ratios = inputs.log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    measured = _measured(inputs, log_ratios, options.measure)
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
    """Bound on how improbable a token may have become."""

    threshold: Positive = 1e-4
    """A sequence is dropped if a token's ratio proximal / behavior is below this."""


@correction("veto", VetoOptions)
def veto(inputs: CorrectionInputs, options: VetoOptions) -> Correction:
    """Drop a sequence if any of its tokens has w < threshold: q hardly writes it any more."""
    lowest = -inputs.packing.largest(-inputs.log_ratios)
    return _keeping(inputs, bounded_exp(inputs.packing.spread(lowest)) >= options.threshold)


class OpsmOptions(Options, frozen=True, kw_only=True):
    """Bound on the distance of a failed sequence from the proximal policy."""

    max_kl: NotNegative = 1e-4
    """Tokens with A < 0 are dropped above this mean KL of their sequence, in nats."""


@correction("opsm", OpsmOptions)
def opsm(inputs: CorrectionInputs, options: OpsmOptions) -> Correction:
    """Off-policy sequence masking: drop where A < 0 and mean_t(-log w) > max_kl.

    A failed answer that the policy would hardly write again teaches nothing (arXiv 2512.02556).
    """
    packing = inputs.packing
    is_far = packing.spread(packing.means(-inputs.log_ratios)) > options.max_kl
    return _keeping(inputs, ~(is_far & (inputs.masked(inputs.advantages) < 0)))


class M2poOptions(Options, frozen=True, kw_only=True):
    """Trust region of the whole minibatch."""

    threshold: Positive = 0.04
    """Largest mean of log(proximal / behavior) squared over the trust-region tokens that stay."""


@correction("m2po", M2poOptions, needs=("whole_minibatch",))
def m2po(inputs: CorrectionInputs, options: M2poOptions) -> Correction:
    """M2PO: drop the trust-region tokens of largest (log w)^2 until their mean is at most that.

    Trust-region tokens are those that a PPO clip could stop: A > 0 and w > 1, or A < 0 and w < 1.
    The mean is over those of them that stay, and over no others; all other tokens stay
    (arXiv 2510.01161, algorithm 1). |log w| counts as 20 at most. Tokens of equal measure at the
    limit are dropped together: the result does not depend on their order.
    """
    mask = inputs.packing.mask
    log_ratios = inputs.log_ratios.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    squares = log_ratios.square()
    in_region = mask & (inputs.masked(inputs.advantages) * log_ratios.sign() > 0)
    limit = _second_moment_limit(inputs.gather(squares[in_region]), options.threshold)
    return _keeping(inputs, ~in_region | (squares < limit))


class ClipCovOptions(Options, frozen=True, kw_only=True):
    """Choice of the tokens left out for their effect on the entropy."""

    share: Share = 2e-4
    """At most this share of the minibatch's tokens is dropped, and one where there is any."""
    low: float = 1.0
    """Only tokens whose covariance is above this."""
    high: float = 5.0
    """Only tokens whose covariance is below this."""

    def __post_init__(self) -> None:
        """Reject meaningless settings."""
        if self.low >= self.high:
            raise ValueError(f"clip-cov needs low < high, got low {self.low}, high {self.high}")


@correction("clip-cov", ClipCovOptions, needs=("whole_minibatch",))
def clip_cov(inputs: CorrectionInputs, options: ClipCovOptions) -> Correction:
    """Clip-Cov: drop a few tokens, drawn from those with low < covariance < high.

    Of a token, covariance is (log q - mean log q) (A - mean A), means over the minibatch: tokens
    where it is large take the entropy away (arXiv 2505.22617). The lot is a hash of the token's
    place and of its sequence's behavior log-probabilities: any split into microbatches and ranks
    draws the same. Of tokens that are equal in both, all are drawn or none.
    """
    covariance, num_tokens = _covariance(inputs)
    drawable = inputs.packing.mask & (covariance > options.low) & (covariance < options.high)
    lots = _lots(inputs)
    num_dropped = max(1, int(options.share * num_tokens))
    drawn = _is_among_smallest(lots, drawable, num_dropped, inputs.gather)
    return _keeping(inputs, ~drawn)


class KlCovOptions(Options, frozen=True, kw_only=True):
    """Choice of the tokens held for their effect on the entropy, and the penalty."""

    share: Share = 2e-4
    """This share of the minibatch's tokens is held, and at least one."""
    coefficient: Positive = 1.0
    """Weight of |log r|, which is added to the loss of these tokens."""


@correction("kl-cov", KlCovOptions, needs=("whole_minibatch",))
def kl_cov(inputs: CorrectionInputs, options: KlCovOptions) -> Correction:
    """KL-Cov: add coefficient |log r| to the loss of the tokens of largest covariance.

    Covariance as in clip-cov (arXiv 2505.22617). r is the surrogate's ratio.
    """
    covariance, num_tokens = _covariance(inputs)
    mask = inputs.packing.mask
    num_held = max(1, int(options.share * num_tokens))
    held = _is_among_smallest(-covariance, mask, num_held, inputs.gather)
    everything = _keeping(inputs, mask)
    penalty = held.to(everything.weights.dtype) * options.coefficient
    return replace(everything, penalty=penalty)


class StalenessDecayOptions(Options, frozen=True, kw_only=True):
    """Speed at which old tokens lose their weight."""

    decay: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """A token's weight falls by this factor with every learner step of staleness."""


@correction("staleness-decay", StalenessDecayOptions)
def staleness_decay(inputs: CorrectionInputs, options: StalenessDecayOptions) -> Correction:
    """Weigh a token by decay ** staleness, independent of its ratio."""
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
    return replace(_keeping(inputs, inputs.packing.mask), proximal=anchor)


def _measured(inputs: CorrectionInputs, log_ratios: Tensor, measure: str) -> Tensor:
    """Return the measure of each token. Shapes [T] -> [T]."""
    if measure in {"tv", "binary-kl"}:
        q, mu = (inputs.masked(x).clamp(max=0.0) for x in (inputs.proximal, inputs.behavior))
        return (q.exp() - mu.exp()).abs() if measure == "tv" else binary_kl(mu, q)
    if measure == "k1":
        return -log_ratios
    if measure == "k2":
        return 0.5 * log_ratios.square()
    ratio = log_ratios.exp()
    return ratio - 1.0 - log_ratios if measure == "k3" else ratio


def _second_moment_limit(squares: Tensor, threshold: float) -> Tensor:
    """Return the least square that must go for the mean of the rest to be at most the threshold.

    Shapes: [n] squares of all ranks -> []. inf: none must go.
    """
    ascending = squares.sort().values
    numbers = torch.arange(1, len(ascending) + 1, device=squares.device)
    # Means of the least 1, 2, ... squares never fall, so that the last that is met gives the count.
    staying = (cumulated(ascending) / numbers <= threshold).sum()
    return torch.cat([ascending, ascending.new_full((1,), torch.inf)])[staying]


def _covariance(inputs: CorrectionInputs) -> tuple[Tensor, float]:
    """Return (log q - mean) (A - mean) [T] float64, and how many tokens the minibatch has."""
    mask = inputs.packing.mask
    logprobs = inputs.masked(inputs.proximal).double()
    advantages = inputs.masked(inputs.advantages).double()
    count, of_logprobs, of_advantages = inputs.total(
        [mask.sum(), logprobs[mask].sum(), advantages[mask].sum()]
    )
    count = count.clamp(min=1)
    return (logprobs - of_logprobs / count) * (advantages - of_advantages / count), float(count)


def _lots(inputs: CorrectionInputs) -> Tensor:
    """Return a pseudo-random number for each token, independent of its neighbors. [T].

    Multiplicative hashing (Knuth, TAOCP 3, 6.4) of its place and of the behavior log-probabilities
    of its sequence. Both are received values, added as whole numbers, so every rank draws alike.
    """
    packing = inputs.packing
    ordinal = packing.mask.long().cumsum(0)
    place = ordinal - packing.spread(packing.counts.cumsum(0) - packing.counts)
    bits = inputs.masked(inputs.behavior).float().contiguous().view(torch.int32).long()
    of_token = _hashed(bits ^ _hashed(place))
    return _hashed(of_token ^ packing.spread(packing.sums(of_token))).double()  # exact to 2^53


def _hashed(values: Tensor) -> Tensor:
    """Return 32 bits of each whole number that depend on all of its lowest 32. Shapes [T]."""
    for factor in (0x9E3779B1, 0x85EBCA6B):
        values = ((values ^ (values >> 15)) * factor) & 0xFFFFFFFF
    return values ^ (values >> 13)


def _is_among_smallest(
    values: Tensor, among: Tensor, number: int, gather: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return True at the ``number`` smallest values of a minibatch, fewer on ties. [T].

    Args:
        values: [T] of this rank.
        among: [T] bool, tokens that count.
        number: how many are chosen.
        gather: the function in the correction's inputs.
    """
    mine = values[among]
    candidates = gather(mine.topk(min(number + 1, len(mine)), largest=False).values)
    if len(candidates) <= number:
        return among
    return among & (values < candidates.sort().values[number])


def _weighing(inputs: CorrectionInputs, weights: Tensor) -> Correction:
    """Return a correction that weighs and rejects nothing."""
    mask = inputs.packing.mask
    return Correction(weights=where(mask, weights, torch.ones_like(weights)), keep=mask)


def _keeping(inputs: CorrectionInputs, keep: Tensor) -> Correction:
    """Return a correction that rejects and weighs nothing."""
    return Correction(weights=torch.ones_like(inputs.log_ratios), keep=inputs.packing.mask & keep)
