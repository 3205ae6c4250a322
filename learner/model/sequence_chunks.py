"""Packed sequences cut into chunks of their own, for linear attention.

Shapes: T tokens of B sequences; N chunks of C tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CHUNK = 64  # tokens, C


@dataclass(frozen=True, slots=True)
class Chunks:
    """Sequences in chunks: all first chunks, then all second ones, of the longest ones first."""

    tokens: Tensor  # [N, C] int64, number of each token; T for no token
    places: Tensor  # [T] int64, place of each token among these
    counts: tuple[int, ...]  # first, second and further chunks

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Chunks":
        """Cut B sequences of these lengths, laid end to end."""
        longest_first = sorted(
            (length, start)
            for length, start in zip(lengths, np.cumsum([0, *lengths]).tolist(), strict=False)
            if length
        )[::-1]
        total, rows, counts = sum(lengths), list[np.ndarray](), list[int]()
        for first in range(0, max(lengths, default=0), CHUNK):
            here = [(length, start) for length, start in longest_first if length > first]
            counts.append(len(here))
            for length, start in here:
                row = np.full(CHUNK, total)
                count = min(CHUNK, length - first)
                row[:count] = np.arange(start + first, start + first + count)
                rows.append(row)
        tokens = np.stack(rows) if rows else np.empty((0, CHUNK), np.int64)
        places = np.empty(total + 1, np.int64)
        places[tokens.ravel()] = np.arange(tokens.size)
        return cls(
            torch.from_numpy(tokens).to(device),
            torch.from_numpy(places[:total]).to(device),
            tuple(counts),
        )

    def cut(self, values: Tensor) -> Tensor:
        """Return values of tokens by chunk, 0 for no token: [T, ...] -> [N, C, ...]."""
        padded = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
        return padded[self.tokens]

    def joined(self, values: Tensor) -> Tensor:
        """Return values of chunks by token: [N, C, ...] -> [T, ...]."""
        return values.flatten(0, 1)[self.places]
