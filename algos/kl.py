"""Estimates of a KL divergence from the tokens that were sampled. Shapes: T tokens.

d = log pi - log reference of a token sampled from pi. Each estimates KL(pi || reference)
(Schulman, http://joschu.net/blog/kl-approx.html); their gradients estimate different things:

    kind       value                gradient
    k1         d                    of d: 0 on average, no penalty at all
    k2         d^2 / 2              of d^2 / 2: on average that of the KL (arXiv 2506.09477)
    k3         exp(-d) - 1 + d      of the value: on average that of KL(reference || pi)
    low-var    k3, at most 10       of the value, 0 where the bound holds
    abs        |d|                  of the value
    k1+, k3+   of k1, of k3         of k2

"full" is the sum over the vocabulary, which needs all logits and is not estimated here.

All of this is of tokens that pi sampled. For tokens that mu sampled, weights r = pi / mu give the
same averages as tokens that pi sampled. Where the value's own gradient is wanted (k1,
k3, low-var, abs), r has its gradient, too: the gradient of k1 and of k3 is then on average that of
KL(pi || reference) (DeepSeek-V3.2, arXiv 2512.02556, has k3 so). Where the gradient is that of k2,
r has none, and it is on average that of KL(pi || reference) as before.
"""

from typing import Literal

import torch
from torch import Tensor, where

from slipstream.algos.ratios import MAX_LOG_RATIO, importance_ratio, log_ratio

Kind = Literal["k1", "k2", "k3", "abs", "low-var", "k1+", "k3+", "full"]

MAX_LOW_VAR = 10.0  # in nats
_GRADIENT_OF_K2 = frozenset({"k2", "k1+", "k3+"})


def kl_estimate(
    kind: Kind,
    *,
    current: Tensor,
    reference: Tensor,
    mask: Tensor,
    sampled_from: Tensor | None = None,
) -> Tensor:
    """Return the estimate of KL(current || reference) at each token, 0.0 outside the mask.

    Gradient flows through ``current`` only. In k3, -d is at most MAX_LOG_RATIO: there is no
    gradient where the reference is further above than that.

    Args:
        kind: one of the table above.
        current: [T] log pi.
        reference: [T] log reference.
        mask: [T] bool.
        sampled_from: [T] log mu; weighs the estimate by current / mu. None weighs nothing.

    Raises:
        ValueError: kind is "full".
    """
    if kind == "full":
        raise ValueError("a full KL is computed from logits; log-probabilities only estimate one")
    d = log_ratio(target=current, sampled_from=reference, mask=mask)
    if kind.endswith("+"):
        half_square = _value("k2", d)
        value = _value("k1" if kind == "k1+" else "k3", d)
        estimate = value.detach() + (half_square - half_square.detach())
    else:
        estimate = _value(kind, d)
    if sampled_from is not None:
        weight = importance_ratio(target=current, sampled_from=sampled_from, mask=mask)
        estimate = estimate * (weight.detach() if kind in _GRADIENT_OF_K2 else weight)
    return where(mask, estimate, torch.zeros_like(estimate))


def _value(kind: Kind, d: Tensor) -> Tensor:
    """Return the value of an estimate without its plus. Shapes [T] -> [T]."""
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d.square()
    if kind == "abs":
        return d.abs()
    bounded = d.clamp(min=-MAX_LOG_RATIO)
    k3 = (-bounded).exp() - 1.0 + bounded
    return k3.clamp(max=MAX_LOW_VAR) if kind == "low-var" else k3
