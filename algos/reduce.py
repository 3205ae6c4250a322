"""The only reductions of a loss. Dividing by global counts keeps gradient accumulation exact.

Every rule is a sum over tokens of share * loss, where the share depends on the token's sequence
and on counts of the whole minibatch: over all microbatches and ranks. The sum of the microbatches'
losses is therefore the loss of the minibatch, however it was packed and split.

Shapes: T tokens of B sequences.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, where

from slipstream.algos.packing import Packing

Rule = Literal[
    "token-mean",
    "sequence-mean-token-mean",
    "sequence-mean-token-sum",
    "sequence-mean-token-sum-norm",
    "token-sum",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Divisors of a minibatch: counts over all its microbatches and ranks."""

    num_tokens: float
    num_sequences: float  # sequences with at least one token
    length: float = 1.0  # constant of sequence-mean-token-sum-norm (Dr. GRPO), in tokens


def cumulated(values: Tensor) -> Tensor:
    """Return the cumulative sum, [n] -> [n], with the same bits on every rank and each time.

    A GPU adds floats in an order of its own, and torch refuses it under deterministic algorithms:
    they are added on the host.
    """
    return values.cpu().cumsum(0).to(values.device)


def masked_sum(per_token: Tensor, mask: Tensor) -> Tensor:
    """Return the sum over the mask, whatever the values outside it. Shapes [T] -> []."""
    return where(mask, per_token, torch.zeros_like(per_token)).sum()


def reduced(
    per_token: Tensor,
    packing: Packing,
    denominators: Denominators,
    rule: Rule,
    copies: Tensor | None = None,
) -> Tensor:
    """Return this microbatch's share of the global loss. Shapes [T] -> [].

    With L_it the loss of token t of sequence i, |i| its tokens, n tokens and m sequences in the
    whole minibatch, and a constant length C:

        token-mean                      sum_it L_it / n           (DAPO, arXiv 2503.14476, eq. 8)
        sequence-mean-token-mean        sum_i (sum_t L_it / |i|) / m   (GRPO, arXiv 2402.03300)
        sequence-mean-token-sum         sum_it L_it / m
        sequence-mean-token-sum-norm    sum_it L_it / (m C)       (Dr. GRPO, arXiv 2503.20783)
        token-sum                       sum_it L_it

    Args:
        per_token: [T] losses.
        packing: its mask selects the tokens that count, in |i| as well.
        denominators: counts of the whole minibatch, copies as often as they occur.
        rule: one of the above.
        copies: [B], how often each sequence is in the minibatch; once each if None.
    """
    shares = packing.sums(per_token)
    if rule == "sequence-mean-token-mean":
        shares = shares / packing.counts.clamp(min=1)
    if copies is not None:
        shares = where(copies > 0, shares * copies, torch.zeros_like(shares))
    divisor = {
        "token-mean": denominators.num_tokens,
        "sequence-mean-token-mean": denominators.num_sequences,
        "sequence-mean-token-sum": denominators.num_sequences,
        "sequence-mean-token-sum-norm": denominators.num_sequences * denominators.length,
        "token-sum": 1.0,
    }[rule]
    return shares.sum() / max(divisor, 1.0)
