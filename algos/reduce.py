"""The only reductions of a loss. Dividing by global counts keeps gradient accumulation exact.

Every rule is a sum over tokens of share * loss, where the share depends on the token's sequence
and on counts of the whole minibatch: over all microbatches and ranks. The sum of the microbatches'
losses is therefore the loss of the minibatch, however it was packed and split.

Shapes: T tokens of B sequences.
"""

from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor, where

from slipstream.algos.packing import Packing

Rule = Literal[
    "token-mean",
    "group-mean-token-mean",
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
    group_mean: Tensor | None = None  # [B] of group_divisors, which group-mean-token-mean needs

    def of(self, sequences: Tensor) -> Self:
        """Return the divisors of some sequences of the minibatch, by their numbers [B] int64."""
        if self.group_mean is None:
            return self
        return replace(self, group_mean=self.group_mean[sequences])


def group_divisors(tokens: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Return what group-mean-token-mean divides each sequence by: n_g P. [N] -> [N] float64.

    Args:
        tokens: [N], of each sequence, as often as it is in the minibatch; 0 if it is in another.
        groups: [N] int64.
        num_groups: number of groups of the step.
    """
    zeros = torch.zeros(num_groups, dtype=torch.float64, device=tokens.device)
    of_group = zeros.index_add(0, groups, tokens.double())
    return of_group[groups] * (of_group > 0).sum()


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

    With L_it the loss of token t of sequence i, |i| its tokens, n tokens, m sequences and P groups
    in the whole minibatch, n_g of these tokens in group g, and a constant length C:

        token-mean                      sum_it L_it / n           (DAPO, arXiv 2503.14476, eq. 8)
        group-mean-token-mean           sum_g (sum_(i in g) sum_t L_it / n_g) / P
                                                                  (ScaleRL, arXiv 2510.13786)
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

    Raises:
        ValueError: group-mean-token-mean is not given the divisors of groups.
    """
    shares = packing.sums(per_token)
    if rule == "sequence-mean-token-mean":
        shares = shares / packing.counts.clamp(min=1)
    elif rule == "group-mean-token-mean":
        if denominators.group_mean is None:
            raise ValueError("group-mean-token-mean needs Denominators.group_mean, got None")
        shares = shares / denominators.group_mean.to(shares).clamp(min=1)
    if copies is not None:
        shares = where(copies > 0, shares * copies, torch.zeros_like(shares))
    divisor = {
        "token-mean": denominators.num_tokens,
        "group-mean-token-mean": 1.0,
        "sequence-mean-token-mean": denominators.num_sequences,
        "sequence-mean-token-sum": denominators.num_sequences,
        "sequence-mean-token-sum-norm": denominators.num_sequences * denominators.length,
        "token-sum": 1.0,
    }[rule]
    return shares.sum() / max(divisor, 1.0)
