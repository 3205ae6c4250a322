"""SGLang's adapters on a CPU, for batches in which sequences of many adapters alternate.

SGLang 0.5.23 multiplies one run of sequences with the same adapter after the other. Tenants and
versions alternate in a decode step, so runs are as short as a group, and their number makes the
step's time. Here all tokens are multiplied by all adapters of the batch at once, and each keeps the
product with its own: more operations, in two calls. Numbers of another adapter enter as 0 times a
weight, which is 0: what the learner publishes is finite. Remove when SGLang's backend has no loop.

Shapes: T tokens, N adapters, U of them in the batch, I inputs, O outputs, S slices (q, k, v; gate
and up), R greatest rank, r the rank of the batch's adapters. An adapter of a smaller rank r has its
S r rows first; what follows them is left from others.
"""

import importlib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_OPERATORS = "sglang.srt.lora.torch_ops"
_FEW_RUNS = 2  # a call for each is as quick
_MOST_USED = 16  # adapters whose products with all tokens are computed


@dataclass(frozen=True, slots=True)
class _Batch:
    """The adapters of a batch, computed once for all its layers."""

    runs: tuple[Tensor, Tensor, Tensor]  # what they were computed from
    rank: int  # r; 0 if runs are multiplied one after the other
    used: Tensor  # [U]
    slots: Tensor  # number of each token's adapter in ``used``, [T]
    tokens: Tensor  # 0 to T - 1

    def is_of(self, *runs: Tensor) -> bool:
        return all(map(operator.is_, self.runs, runs))


def _batch_of(of_runs: Tensor, lengths: Tensor, ranks: Tensor) -> _Batch:
    used, slots_of_runs = torch.unique(of_runs, return_inverse=True)
    slots = torch.repeat_interleave(slots_of_runs, lengths)
    distinct = set(ranks[used].tolist())
    alternates = len(of_runs) > max(_FEW_RUNS, len(used)) and len(used) <= _MOST_USED
    rank = distinct.pop() if alternates and len(distinct) == 1 else 0
    return _Batch((of_runs, lengths, ranks), rank, used, slots, torch.arange(len(slots)))


def batch_adapters() -> None:
    """Replace the loops over runs; import SGLang's modules first."""
    operators: Any = importlib.import_module(_OPERATORS)
    by_run_a: Callable[..., Tensor] = operators.sgemm_lora_a_control_fwd
    by_run_b: Callable[..., Tensor] = operators.sgemm_lora_b_control_fwd
    known: _Batch | None = None

    def batch(*runs: Tensor) -> _Batch:
        nonlocal known
        if known is None or not known.is_of(*runs):
            known = _batch_of(*runs)
        return known

    def lora_a(
        inputs: Tensor,
        weights: Tensor,
        of_runs: Tensor,
        lengths: Tensor,
        ranks: Tensor,
        scalings: Tensor,
        num_slices: int = 1,
    ) -> Tensor:
        """Return s A x of each token, [T, S R], from inputs [T, I] and weights [N, S R, I]."""
        of = batch(of_runs, lengths, ranks)
        if not of.rank or not weights.numel():
            return by_run_a(inputs, weights, of_runs, lengths, ranks, scalings, num_slices)
        rows = num_slices * of.rank
        chosen = weights[of.used, :rows]
        products = (inputs @ chosen.flatten(0, 1).T).view(len(inputs), len(of.used), rows)
        own = products[of.tokens, of.slots]
        output = inputs.new_zeros(len(inputs), weights.shape[1])
        output[:, :rows] = own * scalings[of.used][of.slots].unsqueeze(-1).to(own.dtype)
        return output

    def lora_b(
        inputs: Tensor,
        weights: Tensor,
        of_runs: Tensor,
        lengths: Tensor,
        ranks: Tensor,
        slice_offsets: Tensor,
        base_output: Tensor | None = None,
    ) -> Tensor:
        """Add B x of each token to the output [T, O]; inputs [T, S R], weights [N, O, R]."""
        of = batch(of_runs, lengths, ranks)
        if not of.rank or not weights.numel():
            return by_run_b(inputs, weights, of_runs, lengths, ranks, slice_offsets, base_output)
        ends: list[Any] = slice_offsets.tolist()
        num_tokens, num_used, rank = len(inputs), len(of.used), of.rank
        output = inputs.new_zeros(num_tokens, ends[-1]) if base_output is None else base_output
        chosen = weights[of.used, :, :rank].permute(1, 0, 2).flatten(1)  # [O, U r]
        num_slices = len(ends) - 1
        # The other adapters' inputs are 0, [T, S, U, r].
        low = inputs.new_zeros(num_tokens, num_slices, num_used, rank)
        low[of.tokens, :, of.slots] = inputs[:, : num_slices * rank].reshape(
            num_tokens, num_slices, rank
        )
        for number, (first, last) in enumerate(pairwise(ends)):
            output[:, first:last].addmm_(low[:, number].flatten(1), chosen[first:last].T)
        return output

    operators.sgemm_lora_a_control_fwd = lora_a
    operators.sgemm_lora_b_control_fwd = lora_b
