"""Prompts that several trajectories of a microbatch begin with: their states are computed once.

Siblings of a group begin with the same tokens at the same positions, so with the same states in
every layer. The first of them computes the prompt; attention gives its keys and values to all.

Shapes: T tokens of B trajectories, U of them computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

_LEAST_SAVED = 0.05  # share of a microbatch's tokens that gathering keys and values is worth


def is_worth_sharing(num_saved: int, num_tokens: int) -> bool:
    """Return True if so many of a microbatch's tokens are computed once instead of again."""
    return num_saved >= max(_LEAST_SAVED * num_tokens, 1)


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """Tokens of a microbatch that are computed, and where the others find their states."""

    computed: Tensor  # [U] int64, tokens that are computed, in order
    places: Tensor  # [T] int64, place of each token's state among these
    cu_queries: Tensor  # [S + 1] int32, bounds of each sequence's computed tokens, its last ones
    max_queries: int

    @classmethod
    def of(
        cls, lengths: Sequence[int], same_as: Sequence[tuple[int, int]], device: torch.device
    ) -> "SharedPrompts | None":
        """Return the sharing of sequences laid end to end; None if it is not worth it.

        Args:
            lengths: Tokens of each sequence.
            same_as: Number of the first tokens of each sequence that another one computes, and that
                one; 0 tokens if it computes all.
            device: Device of the tensors.
        """
        starts = np.cumsum([0, *lengths])
        saved = [count for count, _ in same_as]
        if not is_worth_sharing(sum(saved), int(starts[-1])):
            return None
        source = np.arange(starts[-1])
        for start, (count, other) in zip(starts.tolist(), same_as, strict=False):
            source[start : start + count] = np.arange(starts[other], starts[other] + count)
        computed = np.flatnonzero(source == np.arange(starts[-1]))
        queries = np.array(lengths) - saved
        bounds = np.cumsum([0, *queries], dtype=np.int32)
        return cls(
            torch.from_numpy(computed).to(device),
            torch.from_numpy(np.searchsorted(computed, source)).to(device),
            torch.from_numpy(bounds).to(device),
            int(queries.max()),
        )

    def of_all(self, values: Tensor) -> Tensor:
        """Return values [U, ...] of the computed tokens for all tokens, [T, ...]."""
        every: Tensor = _Spread.apply(values, self.places)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
        return every

    def padded(self, count: int) -> "SharedPrompts":
        """Return the same with a sequence of so many tokens of padding after the others."""
        first, number = len(self.places), len(self.computed)
        more = torch.arange(count, device=self.places.device)
        return SharedPrompts(
            torch.cat([self.computed, first + more]),
            torch.cat([self.places, number + more]),
            torch.cat([self.cu_queries, self.cu_queries[-1:] + count]),
            max(self.max_queries, count),
        )


class _Spread(torch.autograd.Function):
    """Rows at places; the gradient of a row is summed over its places in float32."""

    @staticmethod
    @override
    def forward(ctx: torch.autograd.function.FunctionCtx, values: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.count = len(values)  # type: ignore[attr-defined]  # torch's way
        return values.index_select(0, places)

    @staticmethod
    @override
    def backward(
        ctx: torch.autograd.function.BackwardCFunction, grad: Tensor
    ) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        count: int = ctx.count  # type: ignore[attr-defined]
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(count, *grad.shape[1:], dtype=wide, device=grad.device)
        return total.index_add_(0, places, grad.to(wide)).to(grad.dtype), None
