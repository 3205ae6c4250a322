"""Importance ratios. Every loss and every correction takes its ratio from here.

Shapes: T tokens, B sequences.
"""

import torch
from torch import Tensor, where

from slipstream.algos.packing import Packing

MAX_LOG_RATIO = 20.0  # exp(20) is about 5e8: finite, and squares of it are too


def upcast(values: Tensor) -> Tensor:
    """Return float64 unchanged and every other type as float32."""
    return values if values.dtype == torch.float64 else values.float()


def log_ratio(*, target: Tensor, sampled_from: Tensor, mask: Tensor) -> Tensor:
    """Return log pi_target - log pi_sampled_from, not clamped, 0.0 outside the mask. Shapes [T].

    Gradient flows through ``target`` only; where the mask is False none flows, whatever is there.
    """
    zero = torch.zeros((), dtype=torch.float32, device=mask.device)
    chosen = where(mask, upcast(target), zero)
    return chosen - where(mask, upcast(sampled_from.detach()), zero)


def bounded_exp(log_ratios: Tensor) -> Tensor:
    """Return exp of log-ratios clamped to +-MAX_LOG_RATIO: never inf, gradient 0 beyond."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def importance_ratio(*, target: Tensor, sampled_from: Tensor, mask: Tensor) -> Tensor:
    """Return pi_target / pi_sampled_from per token, 1.0 outside the mask. Shapes [T].

    Gradient flows through ``target`` only.
    """
    return bounded_exp(log_ratio(target=target, sampled_from=sampled_from, mask=mask))


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q) of two coins, in nats, without gradient. Shapes [T] logs -> [T].

    p log(p / q) + (1 - p) log((1 - p) / (1 - q)), with 1e-8 added to the probabilities of "any
    other": the difference of two policies where only the probability of one token is known
    (arXiv 2602.04879).
    """
    log_p, log_q = log_p.detach().clamp(max=0.0), log_q.detach().clamp(max=0.0)
    p, q = log_p.exp(), log_q.exp()
    return p * (log_p - log_q) + (1.0 - p) * ((1.0 - p + 1e-8) / (1.0 - q + 1e-8)).log()


def sequence_ratio(log_ratios: Tensor, packing: Packing, *, geometric: bool) -> Tensor:
    """Return the ratio of whole sequences: the product over tokens, or its T-th root. [T] -> [B].

    Args:
        log_ratios: [T], of ``log_ratio``.
        packing: layout of these tokens.
        geometric: exp(mean) instead of exp(sum).
    """
    return bounded_exp(packing.means(log_ratios) if geometric else packing.sums(log_ratios))
