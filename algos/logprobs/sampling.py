"""The distribution of a token: output layer, temperature, barred and kept tokens.

Shapes: T tokens, H hidden size, V rows of output weights over all ranks, V/tp of this rank, c
columns of a chunk.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.algos.logprobs.chunks import PADDED_LOGIT, Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLayer:
    """The last layer of a model on this rank, and its barred and padding tokens."""

    weight: Tensor  # [V/tp, H] rank r holds rows r*V/tp to (r+1)*V/tp
    group: dist.ProcessGroup | None = None  # ranks that the rows are split over
    vocab_size: int | None = None  # rows from here on are padding, with probability 0
    barred_ids: tuple[int, ...] = ()  # tokens with probability 0 where ``barred`` is True
    gradient: Tensor | None = (
        None  # [V/tp, H] float32 that the weight's is added to, not autograd's
    )

    @property
    def split(self) -> dist.ProcessGroup | None:
        """Ranks that share the vocabulary; None if there are no others."""
        return self.group if self.group is not None and self.group.size() > 1 else None

    @property
    def first_row(self) -> int:
        """Token id of this rank's first row."""
        return self.split.rank() * len(self.weight) if self.split is not None else 0


class Kept(NamedTuple):
    """Which tokens a sampler kept (top-k, top-p, min-p); K of them for all T tokens together."""

    is_truncated: Tensor  # [T] bool, False where it left none out
    rows: Tensor  # [K] int64, the token that a kept one is for, 0 to T - 1
    ids: Tensor  # [K] int64

    def before(self) -> "Kept":
        """Return them for the hidden states that choose: one index lower, that of 0 is the last."""
        count = len(self.is_truncated)
        return Kept(self.is_truncated.roll(-1), (self.rows - 1) % max(count, 1), self.ids)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Makes the logits of this rank's columns, alike in both passes."""

    temperature: Tensor | None  # [T]
    barred: Tensor | None  # [T] bool
    barred_columns: tuple[int, ...]  # this rank's
    num_real: int  # columns from here on are padding
    first_row: int
    kept: Kept | None

    @classmethod
    def of(
        cls,
        layer: OutputLayer,
        temperature: Tensor | None,
        barred: Tensor | None,
        kept: Kept | None,
    ) -> Self:
        """Return the sampling of a layer's tokens."""
        first, rows = layer.first_row, len(layer.weight)
        last = first + rows if layer.vocab_size is None else layer.vocab_size
        here = tuple(i - first for i in layer.barred_ids if first <= i < first + rows)
        return cls(temperature, barred, here, min(max(last - first, 0), rows), first, kept)

    def logits(self, hidden: Tensor, weight: Tensor, columns: slice) -> Tensor:
        """Return the logits of some columns before their temperature, in memory of their own.

        Shapes [T, H], [V/tp, H] -> [T, c]. PADDED_LOGIT is in place of what cannot be chosen but
        padding.
        """
        logits = product(hidden, weight[columns].t())
        if self.barred is not None:
            for column in self.barred_columns:
                if columns.start <= column < columns.stop:
                    logits[:, column - columns.start].masked_fill_(self.barred, PADDED_LOGIT)
        if self.kept is not None:
            logits.masked_fill_(self._left_out(self.kept, columns), PADDED_LOGIT)
        return logits

    def chunk(self, logits: Tensor, column: Tensor, columns: slice) -> Chunk:
        """Return the logits of some columns as a chunk; ``column`` is of the target, [T]."""
        return Chunk(logits, column - columns.start, self.temperature, self.num_real_in(columns))

    def num_real_in(self, columns: slice) -> int:
        """Return how many of some columns come before the padding."""
        count: int = min(max(self.num_real - columns.start, 0), columns.stop - columns.start)
        return count

    def _left_out(self, kept: Kept, columns: slice) -> Tensor:
        """Return where a chunk's tokens cannot be chosen, [T, c] bool."""
        size = columns.stop - columns.start
        left_out = kept.is_truncated.unsqueeze(-1).repeat(1, size + 1)  # a column for all others
        column = kept.ids - self.first_row - columns.start
        is_here = (column >= 0) & (column < size)
        left_out[kept.rows, column.where(is_here, size)] = False
        return left_out[:, :size]

    def untempered(self, by_logits: Tensor) -> Tensor:
        """Return a gradient by logits as one by the product before them. Shapes [T]."""
        return by_logits if self.temperature is None else by_logits / self.temperature


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return a matrix product of narrow types in float32: it is never rounded to theirs.

    A logit of 10 in bfloat16 is off by up to 0.03 nats, which is more than a policy moves in a
    step.
    """
    if left.dtype in {torch.float32, torch.float64}:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()  # a CPU has no product of a wider type than its factors
