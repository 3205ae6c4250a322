"""Pure: the losses that tenants may ask for, as sums over the targets of a microbatch.

With l the log-probability of a target under the model, w its weight, q its log-probability when it
was sampled, A its advantage and r = exp(l - q):

    cross_entropy         -sum w l
    importance_sampling   -sum r A
    ppo                   -sum min(r A, clamp(r, low, high) A)
    cispo                 -sum clamp(r, low, high) A l, without a gradient through r
    dro                   -sum (l A - beta / 2 (l - q)^2)

A ``mask`` or ``weights`` next to advantages multiply each term.

Shapes: T tokens, K targets of each.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from slipstream.wire.messages.commands import LossName

Inputs = Mapping[str, Tensor]
_LOW, _HIGH, _BETA = 0.8, 1.2, 0.05  # options of the SDK's own losses, without others


def _cross_entropy(logprobs: Tensor, inputs: Inputs, _options: Mapping[str, float]) -> Tensor:
    return logprobs * inputs["weights"]


def _importance_sampling(logprobs: Tensor, inputs: Inputs, _options: Mapping[str, float]) -> Tensor:
    return _ratio(logprobs, inputs) * inputs["advantages"]


def _ppo(logprobs: Tensor, inputs: Inputs, options: Mapping[str, float]) -> Tensor:
    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    return torch.minimum(ratio * advantages, _clipped(ratio, options) * advantages)


def _cispo(logprobs: Tensor, inputs: Inputs, options: Mapping[str, float]) -> Tensor:
    ratio = _clipped(_ratio(logprobs, inputs), options).detach()
    return ratio * inputs["advantages"] * logprobs


def _dro(logprobs: Tensor, inputs: Inputs, options: Mapping[str, float]) -> Tensor:
    square = (logprobs - inputs["logprobs"]).square()
    return logprobs * inputs["advantages"] - 0.5 * options.get("beta", _BETA) * square


def _ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return (logprobs - inputs["logprobs"]).exp()


def _clipped(ratio: Tensor, options: Mapping[str, float]) -> Tensor:
    low, high = options.get("clip_low_threshold", _LOW), options.get("clip_high_threshold", _HIGH)
    return ratio.clamp(low, high)


_GAINS: dict[LossName, Callable[[Tensor, Inputs, Mapping[str, float]], Tensor]] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
}


def loss_of(
    name: LossName, logprobs: Tensor, inputs: Inputs, options: Mapping[str, float]
) -> Tensor:
    """Return the sum of a loss, []. Log-probabilities and inputs are [T, K]."""
    gains = _GAINS[name](logprobs, inputs, options)
    for factor in {"mask", "weights"} & inputs.keys() if name != "cross_entropy" else ():
        gains = gains * inputs[factor]
    return -gains.sum()
