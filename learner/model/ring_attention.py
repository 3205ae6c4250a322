"""Attention between the rings of context parallelism: blocks, joined by their log-sum-exps.

Each ring attends to its own keys, and then, a ring at a time, to those keys of the others that its
queries see (crossings.py); the next ones arrive meanwhile. Outputs of blocks are joined by the
log-sum-exps of their scores (Liu et al., "Ring Attention", arXiv:2310.01889). Keys come from the
rank that has them and not through its neighbors: each goes only to ranks that need it, and its
gradient comes back at once.

Shapes: T tokens of this rank's ring; Q queries and K keys of a block; h query heads, g key and
value heads, d channels of a query, a key and a value.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor
from typing_extensions import override

from slipstream.learner.model.context import TokenSplit
from slipstream.learner.model.crossings import Crossing, Run, crossing
from slipstream.learner.model.cuda_attention import AttentionBounds, has_kernel

# Fewest as the limit of a kernel: with one FlashAttention 2 lays out grouped queries anew.
FEWEST_QUERIES = 2


class Hop(NamedTuple):
    """What this ring's queries see of one ring's keys, and what another ring sees of its own."""

    seen: Crossing
    sent: tuple[Run, ...]  # rows of this ring's keys
    to_ranks: list[int]  # rows that go to each rank of the group; empty: both rings are this one
    from_ranks: list[int]

    def exchange(
        self, rows: Tensor, group: dist.ProcessGroup | None, *, is_back: bool = False
    ) -> Callable[[], Tensor]:
        """Begin to send rows of keys, or back rows of gradients; return what waits for others'."""
        if not self.to_ranks:
            return lambda: rows
        to_ranks, from_ranks = self.to_ranks, self.from_ranks
        if is_back:
            to_ranks, from_ranks = from_ranks, to_ranks
        received = rows.new_empty(sum(from_ranks), *rows.shape[1:])
        work = dist.all_to_all_single(
            received, rows, from_ranks, to_ranks, group=group, async_op=True
        )

        def arrived() -> Tensor:
            work.wait()
            return received

        return arrived


@dataclass(frozen=True)
class Ring:
    """Attention of one rank in a microbatch, the same in all layers."""

    own: AttentionBounds  # sequences within this ring's runs
    hops: tuple[Hop, ...]
    group: dist.ProcessGroup | None  # None: hops are within this ring

    @classmethod
    def of(cls, split: TokenSplit, lengths: Sequence[int], device: torch.device) -> "Ring":
        """Plan the blocks of a microbatch.

        Args:
            split: Split of its tokens, over several rings.
            lengths: Tokens of each of its sequences, padding among them.
            device: Device of the bounds; it is not waited for.
        """
        if split.group is None:
            raise ValueError("one rank has no rings")
        bounds, runs = list(accumulate(lengths, initial=0)), split.runs_of_rings()
        count, parts, here = split.shares.rings, split.shares.parts, split.ring
        sees = [[crossing(bounds, queries, keys) for keys in runs] for queries in runs]
        hops = []
        for distance in range(count):
            # Every rank leaves out a hop in which no ring sees keys.
            if not any(sees[ring][ring - distance].keys for ring in range(count)):
                continue
            after, before = (here + distance) % count, (here - distance) % count
            sent, seen = sees[after][here], sees[here][before]
            to_ranks, from_ranks = ([0] * (split.ranks if distance else 0) for _ in range(2))
            if distance:
                part = split.part
                to_ranks[after * parts + part] = sent.num_keys
                from_ranks[before * parts + part] = seen.num_keys
            hops.append(Hop(seen, sent.keys, to_ranks, from_ranks))
        pieces = [
            min(stop, end) - max(start, first)
            for first, end in runs[here]
            for start, stop in pairwise(bounds)
            if max(start, first) < min(stop, end)
        ]
        ends = torch.tensor([0, *accumulate(pieces)], dtype=torch.int32)
        ends = ends.to(device, non_blocking=True)
        longest = max(FEWEST_QUERIES, *pieces)
        return cls(AttentionBounds(ends, ends, longest, longest), tuple(hops), split.group)


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ring: Ring,
    scale: float,
    *,
    by_kernel: bool | None = None,
) -> Tensor:
    """Return causal attention [T, h, v] over all rings, of this rank's ring.

    Args:
        query: queries of the ring's tokens, [T, h, d].
        key: their keys, [T, g, d].
        value: their values, [T, g, v]; v is at most d.
        ring: blocks of the microbatch.
        scale: factor of the scores.
        by_kernel: True if FlashAttention computes blocks; None where it can.
    """
    width, kernel = value.size(-1), has_kernel(query) if by_kernel is None else by_kernel
    if width < query.size(-1):  # kernels take values as wide as queries
        value = F.pad(value, (0, query.size(-1) - width))
    output: Tensor = _RingAttention.apply(query, key, value, ring, Blocks(scale, kernel))  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return output[..., :width]


class Blocks(NamedTuple):
    """Computes blocks, by FlashAttention's kernels or in plain torch."""

    scale: float  # factor of the scores
    by_kernel: bool
    window: int | None = None  # tokens that a query of a causal block sees; None is all

    def _of_kernel(self, *, is_causal: bool) -> tuple[bool, dict[str, float | int]]:
        """Return whether a kernel sees all keys before a query, and its other options."""
        if self.window is None or not is_causal:
            return is_causal, {"scale": self.scale}
        window = {"window_size_left": self.window - 1, "window_size_right": 0}
        return False, {"scale": self.scale, **window}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, bounds: AttentionBounds, *, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Return attention [Q, h, d] and the log-sum-exps of scores, [Q, h] in float32 at least."""
        if self.by_kernel:
            of_all, options = self._of_kernel(is_causal=is_causal)
            output, sums, *_ = torch.ops.aten._flash_attention_forward(  # varlen_attn's
                query, key, value, *bounds, 0.0, of_all, return_debug_mask=False, **options
            )
            return output, sums.T.contiguous()
        outputs, of_sequences = [query[:0]], [_wide(query[:0, :, 0])]
        for rows, keys in _sequences(bounds):
            scores = self._scores(query[rows], key[keys], is_causal=is_causal)
            sums = scores.logsumexp(-1)
            shares = (scores - sums[..., None]).exp()
            mixed = torch.einsum("gnqk,kgd->qgnd", shares, _wide(value[keys]))
            outputs.append(mixed.flatten(1, 2).to(query.dtype))
            of_sequences.append(sums.flatten(0, 1).T)
        return torch.cat(outputs), torch.cat(of_sequences)

    def gradients(
        self,
        asked: Sequence[Tensor],
        key: Tensor,
        value: Tensor,
        bounds: AttentionBounds,
        *,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a block's gradients of queries [Q, h, d], keys [K, g, d] and values [K, g, d].

        Args:
            asked: gradients of outputs, queries and outputs, [Q, h, d] each, and log-sum-exps,
                [Q, h]; outputs and log-sum-exps are those over all blocks.
            key: keys of the block.
            value: values of the block.
            bounds: bounds of its sequences.
            is_causal: True if a query sees only the keys before it, and its own.
        """
        grad, query, output, sums = asked
        if self.by_kernel:
            unused = query.new_empty(0)
            no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
            of_all, options = self._of_kernel(is_causal=is_causal)
            by_kernel: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
                *(grad, query, key, value, output, sums.T.contiguous(), *bounds, 0.0, of_all),
                *(no_dropout, unused),
                **options,
            )
            return by_kernel
        of_query, of_key, of_value = (torch.zeros_like(t) for t in (query, key, value))
        for rows, keys in _sequences(bounds):
            groups = key.size(1)
            scores = self._scores(query[rows], key[keys], is_causal=is_causal)
            g, q, o = (_grouped(t[rows], groups) for t in (grad, query, output))
            k, v = _wide(key[keys]), _wide(value[keys])
            shares = (scores - sums[rows].T.reshape(*scores.shape[:3], 1)).exp()
            of_value[keys] = torch.einsum("gnqk,qgnd->kgd", shares, g).to(value.dtype)
            of_shares = torch.einsum("qgnd,kgd->gnqk", g, v)
            mean = (g * o).sum(-1).permute(1, 2, 0)[..., None]
            of_scores = shares * (of_shares - mean) * self.scale
            from_keys = torch.einsum("gnqk,kgd->qgnd", of_scores, k)
            of_query[rows] = from_keys.flatten(1, 2).to(query.dtype)
            of_key[keys] = torch.einsum("gnqk,qgnd->kgd", of_scores, q).to(key.dtype)
        return of_query, of_key, of_value

    def _scores(self, query: Tensor, key: Tensor, *, is_causal: bool) -> Tensor:
        """Return scores [g, h/g, Q, K] of a sequence, -inf where a query does not see a key."""
        grouped = _grouped(query, key.size(1))
        scores = torch.einsum("qgnd,kgd->gnqk", grouped, _wide(key)) * self.scale
        if not is_causal:
            return scores
        last = len(key) - len(query)  # key of the first query
        is_seen = torch.ones_like(scores[0, 0], dtype=torch.bool).tril(last)
        if self.window is not None:
            is_seen = is_seen.triu(last + 1 - self.window)
        return scores.masked_fill(~is_seen, -torch.inf)


class _RingAttention(torch.autograd.Function):
    """Blocks are summed in float32 at least, in the order of hops."""

    @staticmethod
    @override
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ring: Ring,
        blocks: Blocks,
    ) -> Tensor:
        own, sums = blocks.attend(query, key, value, ring.own, is_causal=True)
        output = _wide(own)
        for hop, keys, values in _blocks(key, value, ring):
            if hop.seen.keys:
                queries = _taken(query, hop.seen.queries)
                bounds = _each_to_each(queries, keys)
                more = blocks.attend(queries, keys, values, bounds, is_causal=False)
                _join(output, sums, hop.seen.queries, *more)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.of = ring, blocks  # type: ignore[attr-defined]  # torch's way
        return output

    @staticmethod
    @override
    def backward(
        ctx: torch.autograd.function.BackwardCFunction, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, output, sums = ctx.saved_tensors  # type: ignore[misc]  # torch's way
        ring, blocks = ctx.of  # type: ignore[attr-defined]
        asked = grad.contiguous(), query, output, sums
        own = blocks.gradients(asked, key, value, ring.own, is_causal=True)
        of_query, of_key, of_value = (_wide(tensor) for tensor in own)
        returned = []
        for hop, keys, values in _blocks(key, value, ring):
            rows = keys.new_empty(0, 2, *keys.shape[1:])
            if hop.seen.keys:
                part = tuple(_taken(tensor, hop.seen.queries) for tensor in asked)
                bounds = _each_to_each(part[0], keys)
                queries, *of_keys = blocks.gradients(part, keys, values, bounds, is_causal=False)
                _add(of_query, hop.seen.queries, queries)
                rows = torch.stack(of_keys, dim=1)
            returned.append((hop.sent, hop.exchange(rows, ring.group, is_back=True)))
        for sent, arrived in returned:
            for total, rows in zip((of_key, of_value), arrived().unbind(1), strict=True):
                _add(total, sent, rows)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None


def _blocks(key: Tensor, value: Tensor, ring: Ring) -> Iterator[tuple[Hop, Tensor, Tensor]]:
    """Yield each hop's keys and values, [K, g, d] each; those of the next one are on their way."""

    def begun(hop: Hop) -> tuple[Hop, Callable[[], Tensor]]:
        rows = torch.stack([_taken(tensor, hop.sent) for tensor in (key, value)], dim=1)
        return hop, hop.exchange(rows, ring.group)

    under_way = map(begun, ring.hops)
    following = next(under_way, None)
    while following is not None:
        hop, arrived = following
        rows = arrived()
        following = next(under_way, None)
        yield hop, rows[:, 0].contiguous(), rows[:, 1].contiguous()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _taken(tensor: Tensor, runs: Sequence[Run]) -> Tensor:
    return torch.cat([tensor[:0], *(tensor[first:end] for first, end in runs)])


def _add(total: Tensor, runs: Sequence[Run], rows: Tensor) -> None:
    for (first, end), part in zip(runs, _divided(rows, runs), strict=True):
        total[first:end] += part


def _divided(rows: Tensor, runs: Sequence[Run]) -> Sequence[Tensor]:
    return torch.split(rows, [end - first for first, end in runs])


def _join(
    output: Tensor, sums: Tensor, runs: Sequence[Run], more: Tensor, more_sums: Tensor
) -> None:
    """Join the outputs [Q, h, d] of a block with those of the blocks before, in place."""
    parts = zip(runs, _divided(more, runs), _divided(more_sums, runs), strict=True)
    for (first, end), rows, their_sums in parts:
        here = sums[first:end]
        joined = torch.logaddexp(here, their_sums)
        kept, added = ((part - joined).exp()[..., None] for part in (here, their_sums))
        output[first:end] = output[first:end] * kept + rows * added
        sums[first:end] = joined


def _each_to_each(queries: Tensor, keys: Tensor) -> AttentionBounds:
    """Return bounds with which all queries see all keys; the host waits for nothing."""

    def ends(count: int) -> Tensor:
        return torch.arange(0, count + 1, count, dtype=torch.int32, device=queries.device)

    most = max(FEWEST_QUERIES, len(queries))
    return AttentionBounds(ends(len(queries)), ends(len(keys)), most, len(keys))


def _grouped(rows: Tensor, groups: int) -> Tensor:
    """Return rows [Q, h, d] as [Q, g, h/g, d]."""
    return _wide(rows).view(len(rows), groups, -1, rows.size(-1))


def _sequences(bounds: AttentionBounds) -> Iterator[tuple[slice, slice]]:
    """Yield the rows of queries and keys of each sequence."""
    ends = pairwise(zip(bounds.queries.tolist(), bounds.keys.tolist(), strict=True))
    for (first, first_key), (end, end_key) in ends:
        if first < end:
            yield slice(first, end), slice(first_key, end_key)
