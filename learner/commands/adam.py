"""AdamW of one tenant's adapters, whose numbers may be others at each step.

Decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101), in float32. Every rank that has a
copy of an adapter updates it alike, from the same sum of gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.wire.messages.commands import OptimStep

_OF_CLIPPING = 1e-6  # added to a norm that divides, as torch does


@dataclass(slots=True)
class Moments:
    """Weights of the optimizer and its two moments, float32, by adapter's tensor."""

    weights: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    step: int = 0  # updates so far

    @classmethod
    def of(cls, weights: Sequence[Tensor]) -> "Moments":
        """Begin without an update; weights are copied."""
        own = [weight.detach().float().clone() for weight in weights]
        return cls(own, [torch.zeros_like(w) for w in own], [torch.zeros_like(w) for w in own])


@torch.no_grad()
def update(moments: Moments, gradients: Sequence[Tensor], norm: float, adam: OptimStep) -> None:
    """Do one step of AdamW, with gradients float32 whose ``norm`` is over all ranks."""
    scale = 1.0
    if adam.clip > 0.0:
        scale = min(1.0, adam.clip / (norm + _OF_CLIPPING))
    moments.step += 1
    bias1 = 1.0 - adam.beta1**moments.step
    bias2 = 1.0 - adam.beta2**moments.step
    for weight, first, second, gradient in zip(
        moments.weights, moments.first, moments.second, gradients, strict=True
    ):
        scaled = gradient if scale == 1.0 else gradient * scale
        first.lerp_(scaled, 1.0 - adam.beta1)
        second.mul_(adam.beta2).addcmul_(scaled, scaled, value=1.0 - adam.beta2)
        weight.mul_(1.0 - adam.lr * adam.weight_decay)
        weight.addcdiv_(first, (second / bias2).sqrt_().add_(adam.epsilon), value=-adam.lr / bias1)
