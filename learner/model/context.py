"""Context parallelism: the tokens of a microbatch divided over ranks, and their attention.

Every rank knows all token ids; it embeds and transforms its own share of the tokens. For attention
the ranks exchange heads for tokens (Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509): each
rank then has all tokens of its share of the heads, and one causal call over whole sequences does
the rest. If the ranks do not divide the heads, they form rings: heads are exchanged within a ring,
and keys and values that another ring's queries see are sent to it (ring_attention.py). A ring's
tokens are then two runs, one from the front and one from the back, so that all rings attend to
about as many keys.

Shares differ by a unit at most, which is a token, or one for each rank of sequence parallelism: no
sequence is padded, and a microbatch only to whole units, one for each rank.

Shapes: T tokens of B sequences, T' with padding, T'/c or a unit more of a rank; c ranks: u have
different heads and r = c / u share them; h query heads, g key and value heads, d channels of a
query and a key, v of a value.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from slipstream.learner.parallel import HeadShares

_UNDIVIDED = HeadShares(1, 1)


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """Tokens of a padded microbatch on each rank. ``rank`` is a rank of ``group``."""

    count: int  # T
    padded: int  # T', whole units
    rank: int = 0
    shares: HeadShares = _UNDIVIDED
    group: dist.ProcessGroup | None = None  # None: all tokens are here
    unit: int = 1  # tokens that stay together: ranks of sequence parallelism divide them

    @classmethod
    def of(
        cls,
        count: int,
        *,
        unit: int = 1,
        rank: int = 0,
        shares: HeadShares = _UNDIVIDED,
        group: dist.ProcessGroup | None = None,
    ) -> "TokenSplit":
        """Return the split of ``count`` tokens; each rank has a token, and one of each run.

        What is missing to that is padded.
        """
        ranks = shares.parts * shares.rings
        least = ranks * unit * (2 if shares.rings > 1 else 1)
        return cls(count, max(count + -count % unit, least), rank, shares, group, unit)

    @property
    def ranks(self) -> int:
        """Ranks that the tokens are divided over."""
        return self.shares.parts * self.shares.rings

    @property
    def ring(self) -> int:
        """Number of this rank's ring."""
        return self.rank // self.shares.parts

    @property
    def part(self) -> int:
        """Number of this rank's heads among those of its ring."""
        return self.rank % self.shares.parts

    @property
    def peers(self) -> slice:
        """Ranks of this rank's ring."""
        return slice(self.ring * self.shares.parts, (self.ring + 1) * self.shares.parts)

    @property
    def rows(self) -> list[int]:
        """Number of tokens of each rank."""
        least, more = divmod(self.padded // self.unit, self.ranks)
        return [(least + (rank < more)) * self.unit for rank in range(self.ranks)]

    def runs_of_rings(self) -> list[list[tuple[int, int]]]:
        """First and last token (exclusive) of each run of tokens of each ring, in its order."""
        rows, parts, rings = self.rows, self.shares.parts, self.shares.rings
        if rings == 1:
            return [[(0, self.padded)]]
        counts = [sum(rows[ring * parts : (ring + 1) * parts]) for ring in range(rings)]
        lengths = [(count + 1) // 2 for count in counts]
        lengths += [count // 2 for count in reversed(counts)]
        runs = list(pairwise(accumulate(lengths, initial=0)))
        return [[runs[ring], runs[-1 - ring]] for ring in range(rings)]

    @property
    def exchange_sizes(self) -> tuple[list[int], list[int]]:
        """Tokens that go to each rank of the group for other heads, and come from each."""
        rows, to_ranks, from_ranks = self.rows, [0] * self.ranks, [0] * self.ranks
        to_ranks[self.peers] = [rows[self.rank]] * self.shares.parts
        from_ranks[self.peers] = rows[self.peers]
        return to_ranks, from_ranks

    @property
    def runs(self) -> list[tuple[int, int]]:
        """First and last token (exclusive) of each run of this rank's tokens, in their order."""
        rows = self.rows
        first = sum(rows[self.peers.start : self.rank])  # place among those of the ring
        end, at, found = first + rows[self.rank], 0, []
        for start, stop in self.runs_of_rings()[self.ring]:
            begins, ends = max(first - at, 0), min(end - at, stop - start)
            if begins < ends:
                found.append((start + begins, start + ends))
            at += stop - start
        return found

    def order(self, device: torch.device) -> Tensor | None:
        """Return the token at each place when all ranks' tokens are laid end to end, [T'].

        None if the tokens are in order already.
        """
        if self.shares.rings == 1:
            return None
        runs = [run for of_ring in self.runs_of_rings() for run in of_ring]
        return torch.cat([torch.arange(*run, device=device) for run in runs])

    def mine(self, values: Tensor, fill: float = 0) -> Tensor:
        """Return this rank's share of one value per token, [T] -> [T'/c]; padding is ``fill``."""
        if self.group is None:
            return values
        values = torch.nn.functional.pad(values, (0, self.padded - self.count), value=fill)
        return _joined([values[first:end] for first, end in self.runs])

    def whole(self, mine: Tensor) -> Tensor:
        """Return the values of all tokens, [..., T'/c] -> [..., T], equal on all ranks.

        Every rank must compute the same from them: the gradient of its own share goes back to it.
        """
        if self.group is None:
            return mine
        every: Tensor = _Gather.apply(mine, self.rows, self.rank, self.group)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
        order = self.order(mine.device)
        if order is not None:
            every = every[..., order.argsort()]
        return every[..., : self.count]

    def exchanged(self, *heads: Tensor) -> tuple[Tensor, ...]:
        """Exchange heads for tokens in this rank's ring, all in one message to each rank.

        Queries, keys and values are then those of the ring's tokens, in the order of its runs:
        [T'/c, h, d] -> [T'/r, h/u, d], and [T'/c, g, d] -> [T'/r, max(1, g/u), d]. The results may
        be parts of one tensor.
        """
        if self.shares.parts == 1:
            return heads
        return _Exchange.apply(self, *heads)  # type: ignore[no-any-return, no-untyped-call]  # torch leaves apply untyped

    def returned(self, outputs: Tensor) -> Tensor:
        """Send attention's outputs back to the tokens' ranks: [T'/r, h/u, v] -> [T'/c, h, v]."""
        if self.shares.parts == 1:
            return outputs
        from_ranks, to_ranks = self.exchange_sizes
        by_part: Tensor = _Return.apply(outputs, to_ranks, from_ranks, self.group)  # type: ignore[no-untyped-call]
        mine = by_part.view(self.shares.parts, -1, *by_part.shape[1:])
        return mine.transpose(0, 1).flatten(1, 2)


class _Gather(torch.autograd.Function):
    """All ranks' values along the last dimension; backward, this rank's part of the gradient."""

    @staticmethod
    @override
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        mine: Tensor,
        rows: list[int],
        rank: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.part = sum(rows[:rank]), rows[rank]  # type: ignore[attr-defined]  # torch's way
        # A group gathers equal parts: of a number of each token, padding costs nothing.
        mine = torch.nn.functional.pad(mine, (0, max(rows) - rows[rank]))
        parts = [torch.empty_like(mine) for _ in rows]
        dist.all_gather(parts, mine.contiguous(), group=group)
        return torch.cat([part[..., :n] for part, n in zip(parts, rows, strict=True)], dim=-1)

    @staticmethod
    @override
    def backward(
        ctx: torch.autograd.function.BackwardCFunction, grad: Tensor
    ) -> tuple[Tensor, None, None, None]:
        start, size = ctx.part  # type: ignore[attr-defined]
        return grad.narrow(-1, start, size), None, None, None


class _Exchange(torch.autograd.Function):
    """Queries, keys and values for ``TokenSplit.exchanged``: one exchange in each direction."""

    @staticmethod
    @override
    def forward(
        ctx: torch.autograd.function.FunctionCtx, split: TokenSplit, *heads: Tensor
    ) -> tuple[Tensor, ...]:
        parts = split.shares.parts
        copies = [max(parts // t.size(1), 1) for t in heads]
        by_part = [
            (t.repeat_interleave(n, dim=1) if n > 1 else t)
            .reshape(len(t), parts, -1, t.size(-1))
            .transpose(0, 1)
            for t, n in zip(heads, copies, strict=True)
        ]
        kinds = [tuple(t.shape[2:]) for t in by_part]  # heads of a part, channels
        widths = [prod(kind) for kind in kinds]
        ctx.of = split, copies, kinds, widths  # type: ignore[attr-defined]  # torch's way
        every = torch.cat([t.flatten(2) for t in by_part], dim=-1)  # [u, T'/c, all widths]
        received = _all_to_all(every.flatten(0, 1), *split.exchange_sizes, split.group)
        return tuple(
            t.view(len(t), *kind)
            for t, kind in zip(torch.split(received, widths, 1), kinds, strict=True)
        )

    @staticmethod
    @override
    def backward(
        ctx: torch.autograd.function.BackwardCFunction, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        split, copies, kinds, widths = ctx.of  # type: ignore[attr-defined]
        to_ranks, from_ranks = split.exchange_sizes
        sent = torch.cat([grad.flatten(1) for grad in grads], dim=1)
        received = _all_to_all(sent, from_ranks, to_ranks, split.group)
        by_part = received.view(split.shares.parts, -1, sum(widths))
        given = (
            t.reshape(*t.shape[:2], *kind).transpose(0, 1).flatten(1, 2)
            for t, kind in zip(torch.split(by_part, widths, -1), kinds, strict=True)
        )
        return None, *(
            t if n == 1 else t.view(len(t), -1, n, t.size(-1)).sum(2)
            for t, n in zip(given, copies, strict=True)
        )


def _joined(several: list[Tensor]) -> Tensor:
    return several[0] if len(several) == 1 else torch.cat(several)


class _Return(torch.autograd.Function):
    """Rows to and from every rank of a group; the backward pass returns them."""

    @staticmethod
    @override
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        sent: Tensor,
        to_ranks: list[int],
        from_ranks: list[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.rows = to_ranks, from_ranks  # type: ignore[attr-defined]  # torch's way
        ctx.group = group  # type: ignore[attr-defined]
        return _all_to_all(sent, to_ranks, from_ranks, group)

    @staticmethod
    @override
    def backward(
        ctx: torch.autograd.function.BackwardCFunction, grad: Tensor
    ) -> tuple[Tensor, None, None, None]:
        to_ranks, from_ranks = ctx.rows  # type: ignore[attr-defined]
        group: dist.ProcessGroup = ctx.group  # type: ignore[attr-defined]
        return _all_to_all(grad, from_ranks, to_ranks, group), None, None, None


def _all_to_all(
    sent: Tensor, to_ranks: list[int], from_ranks: list[int], group: dist.ProcessGroup | None
) -> Tensor:
    """Exchange rows of the first dimension."""
    received = sent.new_empty(sum(from_ranks), *sent.shape[1:])
    dist.all_to_all_single(received, sent.contiguous(), from_ranks, to_ranks, group=group)
    return received
