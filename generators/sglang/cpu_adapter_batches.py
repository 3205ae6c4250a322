"""SGLang's adapters on a CPU, for batches in which sequences of many adapters alternate.

SGLang 0.5.23 multiplies one run of sequences with the same adapter after the other. Tenants and
versions alternate in a decode step, so runs are as short as a group, and their number makes the
step's time. Here each token is multiplied by the matrices of its own adapter, all in one call.
Remove when SGLang's torch backend does so.

Shapes: T tokens, N adapters, I inputs, O outputs, S slices (q, k, v or gate, up), R greatest rank.
An adapter of a smaller rank r has its S r rows first; what follows them is left from others.
"""

import importlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_OPERATORS = "sglang.srt.lora.torch_ops"
_FEW_RUNS = 2  # a call for each is as quick
_MOST_NUMBERS = 2**22  # numbers in gathered matrices; prompts have more, and long runs


def batch_adapters() -> None:
    """Replace the loops over runs; import SGLang's modules first."""
    operators: Any = importlib.import_module(_OPERATORS)
    by_run_a, by_run_b = operators.sgemm_lora_a_control_fwd, operators.sgemm_lora_b_control_fwd

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
        if not _alternates(inputs, weights, of_runs):
            by_run: Callable[..., Tensor] = by_run_a
            return by_run(inputs, weights, of_runs, lengths, ranks, scalings, num_slices)
        output = inputs.new_zeros(len(inputs), weights.shape[1])
        for rank, tokens, adapters in _by_rank(of_runs, lengths, ranks):
            rows = num_slices * rank
            products = torch.bmm(weights[adapters, :rows], inputs[tokens].unsqueeze(-1)).squeeze(-1)
            output[tokens, :rows] = products * scalings[adapters].unsqueeze(-1).to(products)
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
        if not _alternates(inputs, weights, of_runs):
            by_run: Callable[..., Tensor] = by_run_b
            return by_run(inputs, weights, of_runs, lengths, ranks, slice_offsets, base_output)
        ends: list[Any] = slice_offsets.tolist()
        output = inputs.new_zeros(len(inputs), ends[-1]) if base_output is None else base_output
        for rank, tokens, adapters in _by_rank(of_runs, lengths, ranks):
            for number, (first, last) in enumerate(pairwise(ends)):
                low = inputs[tokens, number * rank : (number + 1) * rank].unsqueeze(-1)
                products = torch.bmm(weights[adapters, first:last, :rank], low).squeeze(-1)
                output[tokens, first:last] += products
        return output

    operators.sgemm_lora_a_control_fwd = lora_a
    operators.sgemm_lora_b_control_fwd = lora_b


def _alternates(inputs: Tensor, weights: Tensor, of_runs: Tensor) -> bool:
    """Return True if a batch has many short runs, whose matrices fit into the caches."""
    numbers = len(inputs) * weights.shape[1] * weights.shape[2]
    return len(of_runs) > _FEW_RUNS and 0 < numbers <= _MOST_NUMBERS


def _by_rank(
    of_runs: Tensor, lengths: Tensor, ranks: Tensor
) -> list[tuple[int, Tensor | slice, Tensor]]:
    """Return tokens with their adapters, by rank; tokens without an adapter are left out."""
    adapters = torch.repeat_interleave(of_runs, lengths)
    of_tokens = ranks[adapters]
    found = list[tuple[int, Tensor | slice, Tensor]]()
    for rank in torch.unique(of_tokens).tolist():
        if rank == 0:
            continue
        tokens = (of_tokens == rank).nonzero().squeeze(-1)
        everyone = len(tokens) == len(adapters)
        found.append((rank, slice(None) if everyone else tokens, adapters[tokens]))
    return found
