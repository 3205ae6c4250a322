"""Policy-gradient surrogates: the loss of each token. Each is one formula.

Notation: pi = current policy; a = anchor, the policy in the ratio's denominator (proximal, or
behavior); r = pi / a of one token; A = advantage; |y| = masked-in tokens of a sequence; sg =
without gradient. Shapes: T tokens of B sequences laid end to end.

A surrogate of whole sequences (gspo, gmpo) returns its loss at every token, and the gradient of a
token's loss flows through that token only. Summed over a sequence, with equal weights, this is
the gradient of the sequence's loss; with weights per token, each weighs its own token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor, where

from slipstream.algos.packing import Packing
from slipstream.algos.parts import NoOptions, Options, surrogate
from slipstream.algos.ratios import binary_kl, bounded_exp, log_ratio, sequence_ratio, upcast

Width = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[float, Meta(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeMinibatch:
    """All tokens of a minibatch that are trained, of all microbatches and ranks, in no order.

    Equal on all ranks but for that order. Shapes: n tokens.
    """

    proximal: Tensor  # [n] log q
    behavior: Tensor  # [n] log mu
    advantages: Tensor  # [n]


@dataclass(frozen=True, slots=True, kw_only=True)
class SurrogateInputs:
    """Inputs of a surrogate. Nothing outside the packing's mask matters.

    Optional fields are set for surrogates that need them (``needs``), and perhaps for others.

    Raises:
        ValueError: a tensor does not have the shape of the packing's mask.
    """

    current: Tensor  # [T] log pi, with gradient
    anchor: Tensor  # [T] log a
    behavior: Tensor  # [T] log mu
    advantages: Tensor  # [T]
    packing: Packing
    entropy: Tensor | None = None  # [T] of pi, with gradient
    reference: Tensor | None = None  # [T] log ref
    lags: Tensor | None = None  # [T] int64, staleness of each token in learner steps
    minibatch: WholeMinibatch | None = None  # before its first gradient

    def __post_init__(self) -> None:
        """Reject tensors that are not aligned."""
        expected = tuple(self.packing.mask.shape)
        for name in ("current", "anchor", "behavior", "advantages", "entropy", "reference", "lags"):
            found: Tensor | None = getattr(self, name)
            if found is not None and tuple(found.shape) != expected:
                raise ValueError(
                    f"{name} has shape {tuple(found.shape)}, expected {expected} as the mask"
                )

    @property
    def log_ratios(self) -> Tensor:
        """Log r, not clamped, 0.0 outside the mask, [T]."""
        return log_ratio(target=self.current, sampled_from=self.anchor, mask=self.packing.mask)

    def masked(self, per_token: Tensor) -> Tensor:
        """Return float32 or float64 values, 0.0 outside the mask. Shapes [T] -> [T]."""
        values = upcast(per_token)
        return where(self.packing.mask, values, torch.zeros_like(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """A surrogate at each token. All [T]; the flags are False outside the mask."""

    per_token: Tensor  # loss with gradient, 0.0 outside the mask
    ratio: Tensor  # the clipped one, of the token or of its sequence; no gradient
    clipped_up: Tensor  # bool, the clip above took or reduced the gradient
    clipped_down: Tensor  # bool, the clip below did
    clipped_dual: Tensor  # bool, the second clip of negative advantages did
    figures: Mapping[str, Tensor] = field(default_factory=dict)
    """Of one's own, by name: the mean over trained tokens is each step's figure ``own/NAME``."""


@surrogate("policy-gradient")
def policy_gradient(inputs: SurrogateInputs, _: NoOptions) -> Terms:
    """Policy gradient without a ratio: -A log pi (REINFORCE, Williams 1992)."""
    loss = -inputs.masked(inputs.advantages) * inputs.masked(inputs.current)
    return _terms(inputs, loss, bounded_exp(inputs.log_ratios))


@surrogate("reinforce-is")
def reinforce_is(inputs: SurrogateInputs, _: NoOptions) -> Terms:
    """Policy gradient with an importance ratio and no clip: -r A."""
    ratio = bounded_exp(inputs.log_ratios)
    return _terms(inputs, -ratio * inputs.masked(inputs.advantages), ratio)


class PpoOptions(Options, frozen=True, kw_only=True):
    """Trust region of the token's ratio."""

    clip_low: Share = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Width = 0.2
    """The ratio is clipped above 1 + clip_high; DAPO takes 0.28."""
    clip_dual: Annotated[float, Meta(gt=1)] | None = None
    """Where the advantage is negative, the loss is at most clip_dual * |A| if set."""


@surrogate("ppo-clip", PpoOptions)
def ppo_clip(inputs: SurrogateInputs, options: PpoOptions) -> Terms:
    """PPO: -min(r A, clip(r, 1 - low, 1 + high) A) (arXiv 1707.06347, eq. 7).

    With clip_dual = c, the loss of a negative advantage is min(that, -c A) (arXiv 1912.09729). Two
    widths are those of DAPO (arXiv 2503.14476, eq. 10).
    """
    return _clipped(
        inputs,
        bounded_exp(inputs.log_ratios),
        low=options.clip_low,
        high=options.clip_high,
        dual=options.clip_dual,
    )


class GspoOptions(Options, frozen=True, kw_only=True):
    """Trust region of the sequence's ratio, a geometric mean and therefore near 1."""

    clip_low: Share = 3e-4
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Width = 4e-4
    """The ratio is clipped above 1 + clip_high."""


@surrogate("gspo", GspoOptions)
def gspo(inputs: SurrogateInputs, options: GspoOptions) -> Terms:
    """GSPO: -min(s A, clip(s, 1 - low, 1 + high) A) with s = exp(mean_t log r_t).

    Of a token, sg(s) pi / sg(pi) takes the place of s (arXiv 2507.18071).
    """
    log_ratios = inputs.log_ratios
    means = inputs.packing.spread(inputs.packing.means(log_ratios))
    ratio = bounded_exp(_with_gradient_of(means, log_ratios))
    return _clipped(inputs, ratio, low=options.clip_low, high=options.clip_high, dual=None)


class CispoOptions(Options, frozen=True, kw_only=True):
    """Bounds of the weight on each token's gradient."""

    clip_low: Share | None = None
    """The weight is at least 1 - clip_low; not set for no floor."""
    clip_high: Width = 4.0
    """The weight is at most 1 + clip_high."""


@surrogate("cispo", CispoOptions)
def cispo(inputs: SurrogateInputs, options: CispoOptions) -> Terms:
    """CISPO: -sg(clip(r, 1 - low, 1 + high)) A log pi (arXiv 2506.13585).

    No token loses its gradient; a clipped one has less of it, or with a floor more.
    """
    ratio = bounded_exp(inputs.log_ratios).detach()
    low = 0.0 if options.clip_low is None else 1.0 - options.clip_low
    high = 1.0 + options.clip_high
    weighted = ratio.clamp(low, high) * inputs.masked(inputs.advantages)
    return _terms(
        inputs, -weighted * inputs.masked(inputs.current), ratio, up=ratio > high, down=ratio < low
    )


class SapoOptions(Options, frozen=True, kw_only=True):
    """Speed at which the soft gate closes as the ratio leaves 1."""

    tau_positive: Positive = 1.0
    """Temperature where the advantage is positive."""
    tau_negative: Positive = 1.05
    """Temperature where it is not; larger forgets faster."""


@surrogate("sapo", SapoOptions)
def sapo(inputs: SurrogateInputs, options: SapoOptions) -> Terms:
    """SAPO: -f(r) A with f(r) = 4 / tau * sigmoid(tau (r - 1)) (arXiv 2511.20347)."""
    ratio = bounded_exp(inputs.log_ratios)
    advantages = inputs.masked(inputs.advantages)
    tau = torch.full_like(ratio, options.tau_negative)
    tau = where(advantages > 0, torch.full_like(ratio, options.tau_positive), tau)
    return _terms(inputs, -torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau) * advantages, ratio)


class GmpoOptions(Options, frozen=True, kw_only=True):
    """Trust region of the token's log-ratio, wide because the mean over tokens dampens it."""

    clip_low: Width = 0.4
    """The log-ratio is clipped below -clip_low."""
    clip_high: Width = 0.4
    """The log-ratio is clipped above clip_high."""


@surrogate("gmpo", GmpoOptions)
def gmpo(inputs: SurrogateInputs, options: GmpoOptions) -> Terms:
    """GMPO: -A exp(mean_t c_t), c the clipped log-ratio (arXiv 2507.20673).

    c = min(log r, high) where A > 0 and max(log r, -low) where it is not. A is the mean over the
    sequence: advantages are meant to be equal within it.
    """
    packing, log_ratios = inputs.packing, inputs.log_ratios
    advantages = inputs.masked(inputs.advantages)
    clipped = where(
        advantages > 0,
        log_ratios.clamp(max=options.clip_high),
        log_ratios.clamp(min=-options.clip_low),
    )
    means = packing.spread(packing.means(clipped))
    of_sequence = bounded_exp(_with_gradient_of(means, clipped))
    return _terms(
        inputs,
        -packing.spread(packing.means(advantages)) * of_sequence,
        bounded_exp(log_ratios),
        up=(advantages > 0) & (log_ratios > options.clip_high),
        down=(advantages < 0) & (log_ratios < -options.clip_low),
    )


class DppoTvOptions(Options, frozen=True, kw_only=True):
    """Trust region of the probability itself."""

    clip_low: Share = 0.2
    """Tokens with A <= 0 are dropped once pi is more than this below the anchor."""
    clip_high: Share = 0.2
    """Tokens with A > 0 are dropped once pi is more than this above the anchor."""
    max_weight: Positive = 20.0
    """Cap of the importance ratio that weighs the gradient."""


@surrogate("dppo-tv", DppoTvOptions)
def dppo_tv(inputs: SurrogateInputs, options: DppoTvOptions) -> Terms:
    """DPPO with total variation: -sg(min(r, cap)) A log pi where |pi - a| is in bounds.

    Only tokens on their way out are dropped (arXiv 2602.04879, binary TV).
    """
    gained = _probability(inputs, inputs.current) - _probability(inputs, inputs.anchor)
    return _divergence_bounded(
        inputs, gained > options.clip_high, gained < -options.clip_low, options.max_weight
    )


class DppoKlOptions(Options, frozen=True, kw_only=True):
    """Trust region of the divergence of two coins: this token, or any other."""

    clip_low: Width = 0.05
    """Tokens with A <= 0 are dropped once pi is below the anchor by a KL of more nats."""
    clip_high: Width = 0.05
    """Tokens with A > 0 are dropped once pi is above the anchor by a KL of more nats."""
    max_weight: Positive = 20.0
    """Cap of the importance ratio that weighs the gradient."""


@surrogate("dppo-kl", DppoKlOptions)
def dppo_kl(inputs: SurrogateInputs, options: DppoKlOptions) -> Terms:
    """DPPO with a KL: -sg(min(r, cap)) A log pi where the binary KL(a || pi) is in bounds.

    KL = a log(a / pi) + (1 - a) log((1 - a) / (1 - pi)), with 1e-8 added to the probabilities of
    "any other token". Only tokens on their way out are dropped (arXiv 2602.04879, binary KL).
    """
    pi, anchor = inputs.masked(inputs.current.detach()), inputs.masked(inputs.anchor)
    divergence = binary_kl(anchor, pi)
    return _divergence_bounded(
        inputs,
        (divergence > options.clip_high) & (pi > anchor),
        (divergence > options.clip_low) & (pi < anchor),
        options.max_weight,
    )


class DrpoOptions(Options, frozen=True, kw_only=True):
    """Trust region of the probability itself, without an edge."""

    width: Positive = 0.2
    """Where pi has moved so far from the anchor, A pulls no more; beyond, it pulls back."""


@surrogate("drpo", DrpoOptions)
def drpo(inputs: SurrogateInputs, options: DrpoOptions) -> Terms:
    """DRPO: -r A + |A| a (r - 1)^2 / (2 width) (arXiv 2606.09821).

    The gradient is -r (A - |A| (pi - a) / width) by log pi: DPPO's total variation as a slope. On
    its way out a token's pull shrinks with the distance, is 0 at the width and turns round beyond.
    """
    ratio = bounded_exp(inputs.log_ratios)
    advantages = inputs.masked(inputs.advantages)
    anchor = _probability(inputs, inputs.anchor)
    distance = anchor * (ratio - 1.0)  # pi - a
    loss = -ratio * advantages + advantages.abs() * distance * (ratio - 1.0) / (2 * options.width)
    far_out = distance.detach() * advantages.sign() > options.width
    return _terms(
        inputs, loss, ratio, up=far_out & (advantages > 0), down=far_out & (advantages < 0)
    )


class ToprOptions(Options, frozen=True, kw_only=True):
    """Bound on the weight of failed sequences."""

    level: Literal["token", "sequence", "geometric"] = "sequence"
    """The token's ratio, the product over its sequence, or the product's root (its mean)."""
    high: Positive = 1.0
    """Largest weight of a failed sequence."""


@surrogate("topr", ToprOptions)
def topr(inputs: SurrogateInputs, options: ToprOptions) -> Terms:
    """TOPR: -A log pi where A > 0, and -sg(min(s, high)) A log pi where it is not.

    s is the ratio of the sequence (arXiv 2503.14286): successes are imitated however the policy
    has moved, failures count less the less probable they have become.
    """
    packing, log_ratios = inputs.packing, inputs.log_ratios.detach()
    if options.level == "token":
        ratio = bounded_exp(log_ratios)
    else:
        geometric = options.level == "geometric"
        ratio = packing.spread(sequence_ratio(log_ratios, packing, geometric=geometric))
    advantages = inputs.masked(inputs.advantages)
    failed = advantages < 0
    weights = where(failed, ratio.clamp(max=options.high), torch.ones_like(ratio))
    loss = -weights * advantages * inputs.masked(inputs.current)
    return _terms(inputs, loss, ratio, up=failed & (ratio > options.high))


def _clipped(
    inputs: SurrogateInputs, ratio: Tensor, *, low: float, high: float, dual: float | None
) -> Terms:
    """Return -min(r A, clip(r) A), and at most -dual A where A < 0. Shapes [T]."""
    advantages = inputs.masked(inputs.advantages)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1.0 - low, 1.0 + high) * advantages)
    above = torch.zeros_like(inputs.packing.mask)
    if dual is not None:
        above = (advantages < 0) & (ratio > dual)
        loss = where(above, -dual * advantages, loss)
    return _terms(
        inputs,
        loss,
        ratio,
        up=(advantages > 0) & (ratio > 1.0 + high),
        down=(advantages < 0) & (ratio < 1.0 - low),
        dual=above,
    )


def _divergence_bounded(
    inputs: SurrogateInputs, far_above: Tensor, far_below: Tensor, max_weight: float
) -> Terms:
    """Return -sg(min(r, cap)) A log pi, 0.0 where A pulls further out. Shapes [T]."""
    advantages, ratio = inputs.masked(inputs.advantages), bounded_exp(inputs.log_ratios).detach()
    up = far_above & (advantages > 0)
    down = far_below & (advantages <= 0)
    loss = -ratio.clamp(max=max_weight) * advantages * inputs.masked(inputs.current)
    return _terms(inputs, where(up | down, torch.zeros_like(loss), loss), ratio, up=up, down=down)


def _probability(inputs: SurrogateInputs, logprobs: Tensor) -> Tensor:
    """Return probabilities without gradient, at most 1.0. Shapes [T] -> [T]."""
    return inputs.masked(logprobs.detach()).clamp(max=0.0).exp()


def _with_gradient_of(values: Tensor, source: Tensor) -> Tensor:
    """Return the values with the gradient of the source (straight-through). Shapes [T]."""
    return values.detach() + (source - source.detach())


def _terms(
    inputs: SurrogateInputs,
    loss: Tensor,
    ratio: Tensor,
    *,
    up: Tensor | None = None,
    down: Tensor | None = None,
    dual: Tensor | None = None,
) -> Terms:
    """Return the terms with everything outside the mask zeroed."""
    mask = inputs.packing.mask
    none = torch.zeros_like(mask)
    return Terms(
        per_token=where(mask, loss, torch.zeros_like(loss)),
        ratio=ratio.detach(),
        clipped_up=none if up is None else mask & up,
        clipped_down=none if down is None else mask & down,
        clipped_dual=none if dual is None else mask & dual,
    )
