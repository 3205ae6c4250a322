"""Context parallelism: the tokens of a microbatch divided over ranks, and their attention.

Every rank knows all token ids; it embeds and transforms its own share of the tokens. For attention
the ranks exchange heads for tokens (Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509): each
rank then has all tokens of its share of the heads, and one causal call over whole sequences does
the rest. If the ranks do not divide the heads, groups of ranks share them, and the keys and values
of all tokens are sent to each group, as in training Llama 3 (arXiv:2407.21783, 3.3.2). A group's
tokens are then two pieces, one from the front and one from the back, so that all groups attend to
about as many keys.

A token's share depends only on its number in the microbatch: no sequence needs padding, only the
microbatch does.

Shapes: T tokens of B sequences, T' with padding, c ranks: u have different heads and r = c / u
share them; h query heads, g key and value heads, d channels per head.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override


@dataclass(frozen=True, slots=True)
class HeadShares:
    """Division of heads over c ranks (u ways), with sharing (r ways); rank = ring * u + part."""

    parts: int  # u
    rings: int  # r

    @classmethod
    def of(cls, *, ranks: int, heads: int, groups: int) -> "HeadShares":
        """Return the division with the most different heads.

        A rank's queries need their keys: either each rank has whole groups of heads, or several
        ranks have a copy of one group's keys.

        Args:
            ranks: c.
            heads: query heads of one tensor-parallel rank.
            groups: key and value heads of the same rank.
        """
        fitting = [
            parts
            for parts in range(1, ranks + 1)
            if ranks % parts == heads % parts == 0 and (groups % parts == 0 or parts % groups == 0)
        ]
        return cls(fitting[-1], ranks // fitting[-1])


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """Tokens of a padded microbatch on each rank. ``rank`` is a rank of ``group``."""

    count: int  # T
    padded: int  # T'
    rank: int = 0
    shares: HeadShares = HeadShares(1, 1)
    group: dist.ProcessGroup | None = None  # None: all tokens are here

    @property
    def ranks(self) -> int:
        """Ranks that the tokens are divided over."""
        return self.shares.parts * self.shares.rings

    def order(self, device: torch.device) -> Tensor | None:
        """Return the token at each place when all ranks' tokens are laid end to end, [T'].

        None if the tokens are in order already.
        """
        rings = self.shares.rings
        if rings == 1:
            return None
        pieces = torch.arange(self.padded, device=device).chunk(2 * rings)
        return torch.cat([pieces[i] for ring in range(rings) for i in (ring, 2 * rings - 1 - ring)])

    def mine(self, values: Tensor, fill: float = 0) -> Tensor:
        """Return this rank's share of one value per token, [T] -> [T'/c]; padding is ``fill``."""
        if self.group is None:
            return values
        values = torch.nn.functional.pad(values, (0, self.padded - self.count), value=fill)
        order = self.order(values.device)
        if order is not None:
            values = values[order]
        return values.chunk(self.ranks)[self.rank]

    def whole(self, mine: Tensor) -> Tensor:
        """Return the values of all tokens, [..., T'/c] -> [..., T], equal on all ranks.

        Every rank must compute the same from them: the gradient of its own share goes back to it.
        """
        if self.group is None:
            return mine
        every: Tensor = _Gather.apply(mine, self.rank, self.group)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
        order = self.order(mine.device)
        if order is not None:
            every = every[..., order.argsort()]
        return every[..., : self.count]

    def pieces(self) -> list[tuple[int, int]]:
        """Return first and last token (exclusive) of each run of tokens of this rank's ring.

        The order is that of ``queries``.
        """
        rings = self.shares.rings
        if rings == 1:
            return [(0, self.padded)]
        ring, length = self.rank // self.shares.parts, self.padded // (2 * rings)
        return [(i * length, (i + 1) * length) for i in (ring, 2 * rings - 1 - ring)]

    def queries(self, mine: Tensor) -> Tensor:
        """Exchange heads for the tokens of this ring. [T'/c, h, d] -> [T'/r, h/u, d]."""
        if self.group is None:
            return mine
        return self._of_ring(mine.chunk(self.shares.parts, dim=1))

    def keys(self, mine: Tensor) -> Tensor:
        """Exchange heads for all tokens, in their order. [T'/c, g, d] -> [T', max(1, g/u), d]."""
        if self.group is None:
            return mine
        parts, rings = self.shares.parts, self.shares.rings
        if parts > mine.size(1):
            mine = mine.repeat_interleave(parts // mine.size(1), dim=1)
        by_part = torch.stack(mine.chunk(parts, dim=1))  # [u, T'/c, g/u, d]
        sent = by_part.repeat(rings, *[1] * mine.dim()).flatten(0, 1)
        rows = [len(mine)] * self.ranks
        everywhere = _exchanged(sent, rows, rows, self.group)
        order = self.order(mine.device)
        return everywhere if order is None else everywhere[order.argsort()]

    def returned(self, outputs: Tensor) -> Tensor:
        """Undo ``queries``: [T'/r, h/u, d] -> [T'/c, h, d]."""
        if self.group is None:
            return outputs
        return torch.cat(
            self._of_ring(outputs.chunk(self.shares.parts)).chunk(self.shares.parts), 1
        )

    def _of_ring(self, sent: tuple[Tensor, ...]) -> Tensor:
        """Send the i-th tensor to part i of this ring; return what each part sent, in order."""
        parts, ring = self.shares.parts, self.rank // self.shares.parts
        rows = [0] * self.ranks
        rows[ring * parts : (ring + 1) * parts] = [len(sent[0])] * parts
        if self.group is None:
            raise ValueError("nothing is divided")
        return _exchanged(torch.cat(sent), rows, rows, self.group)


class _Gather(torch.autograd.Function):
    """All ranks' values along the last dimension; backward, this rank's part of the gradient."""

    @staticmethod
    @override
    def forward(
        ctx: torch.autograd.function.FunctionCtx, mine: Tensor, rank: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.rank = rank  # type: ignore[attr-defined]  # torch's way
        ctx.size = mine.size(-1)  # type: ignore[attr-defined]
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(parts, mine.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    @override
    def backward(
        ctx: torch.autograd.function.BackwardCFunction, grad: Tensor
    ) -> tuple[Tensor, None, None]:
        size: int = ctx.size  # type: ignore[attr-defined]
        start: int = ctx.rank * size  # type: ignore[attr-defined]
        return grad[..., start : start + size], None, None


class _Exchange(torch.autograd.Function):
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


def _exchanged(
    sent: Tensor, to_ranks: list[int], from_ranks: list[int], group: dist.ProcessGroup
) -> Tensor:
    received: Tensor = _Exchange.apply(sent, to_ranks, from_ranks, group)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return received


def _all_to_all(
    sent: Tensor, to_ranks: list[int], from_ranks: list[int], group: dist.ProcessGroup
) -> Tensor:
    received = sent.new_empty(sum(from_ranks), *sent.shape[1:])
    dist.all_to_all_single(received, sent.contiguous(), from_ranks, to_ranks, group=group)
    return received
