"""Bounds of the sequences among packed tokens, and the mask of the policy's tokens.

Shapes: T tokens of B sequences laid end to end.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """The layout of one microbatch. Nothing outside the mask enters a sum.

    Raises:
        ValueError: mask and sequence do not fit together.
    """

    mask: Tensor  # [T] bool, the tokens that count
    sequence: Tensor  # [T] int64, the sequence of each token, not decreasing
    num_sequences: int

    def __post_init__(self) -> None:
        """Reject a layout that no function could use."""
        if self.mask.dtype != torch.bool or self.mask.dim() != 1:
            raise ValueError(
                f"mask must be [T] bool, got {tuple(self.mask.shape)} {self.mask.dtype}"
            )
        if self.sequence.shape != self.mask.shape:
            raise ValueError(
                f"sequence has shape {tuple(self.sequence.shape)}, expected "
                f"{tuple(self.mask.shape)} as the mask"
            )

    @classmethod
    def of(cls, mask: Tensor, cu_seqlens: Tensor) -> Self:
        """Return the layout in which sequence i holds cu_seqlens[i] to cu_seqlens[i + 1].

        Args:
            mask: [T] bool.
            cu_seqlens: [B + 1] int.
        """
        lengths = cu_seqlens.diff().long()
        numbers = torch.arange(len(lengths), device=mask.device)
        sequence = numbers.repeat_interleave(lengths.to(mask.device), output_size=len(mask))
        return cls(mask, sequence, len(lengths))

    def only(self, keep: Tensor) -> Self:
        """Return the same layout with fewer tokens in the mask. keep is [T] bool."""
        return type(self)(self.mask & keep, self.sequence, self.num_sequences)

    def present(self, copies: Tensor | None) -> Tensor:
        """Return the masked-in tokens of sequences that are there at least once, [T] bool.

        Args:
            copies: [B], how often each sequence is there; once each if None.
        """
        return self.mask if copies is None else self.mask & (self.spread(copies) > 0)

    @property
    def counts(self) -> Tensor:
        """Number of masked-in tokens of each sequence, [B] int64."""
        return self._added(self.mask.long())

    def sums(self, per_token: Tensor) -> Tensor:
        """Return the sum over each sequence's mask. Shapes [T] -> [B]."""
        return self._added(torch.where(self.mask, per_token, torch.zeros_like(per_token)))

    def means(self, per_token: Tensor) -> Tensor:
        """Return the mean over each sequence's mask, 0.0 where it is empty. Shapes [T] -> [B]."""
        return self.sums(per_token) / self.counts.clamp(min=1)

    def largest(self, per_token: Tensor) -> Tensor:
        """Return the maximum over each sequence's mask, -inf where it is empty. [T] -> [B]."""
        least = torch.full_like(per_token, -torch.inf)
        at = torch.full((self.num_sequences,), -torch.inf, dtype=per_token.dtype)
        return at.to(per_token.device).scatter_reduce(
            0, self.sequence, torch.where(self.mask, per_token, least), "amax"
        )

    def spread(self, per_sequence: Tensor) -> Tensor:
        """Return each sequence's value at all of its tokens. Shapes [B] -> [T]."""
        return per_sequence[self.sequence]

    @property
    def is_last(self) -> Tensor:
        """True at the last masked-in token of each sequence, [T] bool."""
        positions = torch.arange(len(self.mask), device=self.mask.device)
        last = torch.full((self.num_sequences,), -1, device=self.mask.device).scatter_reduce(
            0, self.sequence, torch.where(self.mask, positions, -1), "amax"
        )
        return self.mask & (positions == last[self.sequence])

    @property
    def starts_turn(self) -> Tensor:
        """True at the first token of each turn, [T] bool.

        Context precedes every turn, so that a turn is a run of masked-in tokens.
        """
        goes_on = torch.zeros_like(self.mask)
        goes_on[1:] = self.mask[:-1] & (self.sequence[1:] == self.sequence[:-1])
        return self.mask & ~goes_on

    @property
    def ends_turn(self) -> Tensor:
        """True at the last token of each turn, [T] bool."""
        goes_on = torch.zeros_like(self.mask)
        goes_on[:-1] = self.mask[1:] & (self.sequence[1:] == self.sequence[:-1])
        return self.mask & ~goes_on

    @property
    def turns(self) -> Self:
        """The layout in which each turn is a sequence; context belongs to the turn before it."""
        starts = self.starts_turn.long()
        number = (starts.cumsum(0) - 1).clamp(min=0)
        return type(self)(self.mask, number, max(1, int(starts.sum())))

    def _added(self, values: Tensor) -> Tensor:
        zeros = torch.zeros(self.num_sequences, dtype=values.dtype, device=values.device)
        return zeros.index_add(0, self.sequence, values)
