"""The loss of the critic. Shapes: T tokens; V = value, R = return, V' = value before the step."""

from collections.abc import Callable

import torch
from torch import Tensor, where

from slipstream.algos.ratios import upcast


def value_loss(
    values: Tensor,
    returns: Tensor,
    values_before: Tensor,
    *,
    clip: float | None,
    huber: float | None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return max(l(V - R), l(clamp(V, V' +- clip) - R)) and where the second was larger.

    l(e) = e^2 / 2 (PPO's reference code; arXiv 2005.12729, section 3). With ``huber`` = h, it is
    h (|e| - h / 2) from |e| = h on. Gradient flows through ``values`` only.

    Args:
        values: [T] V, with gradient.
        returns: [T] R.
        values_before: [T] V'.
        clip: how far a value may move in one step and still count; None for any distance.
        huber: error from which the loss is linear; None for nowhere.
        mask: [T] bool; outside it the loss and its gradient are 0.0 whatever the values there. All
            tokens count if None.

    Returns:
        The loss [T] and [T] bool, the tokens whose gradient the clip took.
    """
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    v, r, before = (
        where(mask, upcast(tensor), torch.zeros((), device=mask.device))
        for tensor in (values, returns.detach(), values_before.detach())
    )
    loss_of = _half_square if huber is None else _huber(huber)
    plain = loss_of(v - r)
    if clip is None:
        return plain, torch.zeros_like(mask)
    near = loss_of(v.clamp(before - clip, before + clip) - r)
    return torch.maximum(plain, near), near.detach() > plain.detach()


def _half_square(error: Tensor) -> Tensor:
    return 0.5 * error.square()


def _huber(threshold: float) -> Callable[[Tensor], Tensor]:
    def loss(error: Tensor) -> Tensor:
        inner = error.clamp(-threshold, threshold)
        return inner * (error - 0.5 * inner)

    return loss
