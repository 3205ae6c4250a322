"""Attention over several rings, each a thread, against attention of one rank."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from threading import Barrier
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.learner.model.context import TokenSplit
from slipstream.learner.model.cuda_attention import AttentionBounds
from slipstream.learner.model.ring_attention import Ring, ring_attention
from slipstream.learner.parallel import HeadShares
from tests.support.bounded_attention import bounded_attention

SCALE = 0.3
ROWS = {"one sequence": [29], "odd ones": [7, 1, 13, 8, 2], "one token each": [1] * 12, "few": [3]}


class Group:
    """A group whose ranks are threads; a message of no rows is none, as between GPUs."""

    def __init__(self, ranks: int) -> None:
        self._all_here = Barrier(ranks, timeout=60)
        self._sent: dict[int, list[Tensor]] = {}
        self.num_messages = 0

    def exchange(
        self, rank: int, received: Tensor, sent: Tensor, from_ranks: list[int], to_ranks: list[int]
    ) -> Callable[[], object]:
        """Return what fills ``received``, which nobody may read before."""
        received.fill_(torch.nan)
        self._sent[rank] = list(torch.split(sent, to_ranks))
        self.num_messages += sum(count > 0 for count in to_ranks)
        self._all_here.wait()
        parts = [self._sent[other][rank] for other in sorted(self._sent)]
        assert [len(part) for part in parts] == from_ranks
        self._all_here.wait()
        return lambda: received.copy_(torch.cat(parts))


def bounds_of(lengths: Sequence[int]) -> AttentionBounds:
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return AttentionBounds(ends, ends, max(lengths), max(lengths))


class Rings:
    """Ranks that each hold all heads of a part of the tokens."""

    def __init__(self, rings: int, lengths: list[int]) -> None:
        self._group = Group(rings)
        self.splits = [
            TokenSplit.of(
                sum(lengths),
                rank=rank,
                shares=HeadShares(1, rings),
                group=cast("Any", SimpleNamespace(of=self._group, rank=rank)),
            )
            for rank in range(rings)
        ]
        missing = self.splits[0].padded - sum(lengths)
        self.lengths = [*lengths, missing] if missing else lengths

    @property
    def num_messages(self) -> int:
        """Number of messages between two ranks, so far."""
        return self._group.num_messages

    def of_each(self, work: Callable[[TokenSplit], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.splits)) as threads:
            return list(threads.map(work, self.splits))


@pytest.fixture
def between_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_to_all_single(
        received: Tensor,
        sent: Tensor,
        from_ranks: list[int],
        to_ranks: list[int],
        *,
        group: Any,  # noqa: ANN401 of a thread
        async_op: bool,
    ) -> Any:  # noqa: ANN401 torch's handle
        assert async_op, "keys arrive while a block is computed"
        arrives = group.of.exchange(group.rank, received, sent, from_ranks, to_ranks)
        return SimpleNamespace(wait=arrives)

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)


@pytest.fixture
def kernels() -> Iterator[None]:
    """Give a CPU torch's operators for a GPU, by its own for a sequence."""
    aten = torch.ops.aten

    def sequences(bounds: tuple[Tensor, Tensor]) -> Iterator[tuple[slice, slice]]:
        for (q, k), (q_end, k_end) in pairwise(zip(*(b.tolist() for b in bounds), strict=True)):
            if q < q_end:
                yield slice(q, q_end), slice(k, k_end)

    def heads_first(tensor: Tensor, rows: slice) -> Tensor:
        return tensor[rows].transpose(0, 1)[None]

    def forward(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, _max_k: int,
        dropout: float, is_causal: bool, return_debug_mask: bool, *, scale: float, **_rest: object,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert (dropout, return_debug_mask) == (0.0, False)
        assert max_q > 1, "FlashAttention 2 would lay out grouped queries anew"
        assert cu_q.diff().min() > 0, "a sequence without queries costs a place in its buffers"
        output, sums = torch.zeros_like(q), torch.zeros(q.size(1), len(q))
        for rows, keys in sequences((cu_q, cu_k)):
            assert not is_causal or rows == keys
            made = aten._scaled_dot_product_flash_attention_for_cpu(
                *(heads_first(q, rows), heads_first(k, keys), heads_first(v, keys)),
                is_causal=is_causal,
                scale=scale,
            )
            output[rows], sums[:, rows] = made[0][0].transpose(0, 1), made[1][0]
        return output, sums, q.new_empty(0), q.new_empty(0), q.new_empty(0)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, cu_q: Tensor,
        cu_k: Tensor, _max_q: int, _max_k: int, dropout: float, is_causal: bool, *_unused: Tensor,
        scale: float, **_rest: object,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert dropout == 0.0
        totals = [torch.zeros_like(tensor) for tensor in (q, k, v)]
        for rows, keys in sequences((cu_q, cu_k)):
            made = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                heads_first(grad, rows),
                *(heads_first(q, rows), heads_first(k, keys), heads_first(v, keys)),
                *(heads_first(out, rows), sums[:, rows][None], 0.0, is_causal),
                scale=scale,
            )
            for total, part, where in zip(totals, made, (rows, keys, keys), strict=True):
                total[where] = part[0].transpose(0, 1)
        return tuple(totals)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield
    library._destroy()


def compared(
    rings: Rings, dtype: torch.dtype, *, values: int = 8, by_kernel: bool = False
) -> float:
    """Return how far rings are from one rank, relative to the largest number of each kind."""
    count, draw = sum(rings.lengths), torch.Generator().manual_seed(1)
    sizes = [(count, 4, 8), (count, 2, 8), (count, 2, values), (count, 4, values)]
    *inputs, weights = (torch.randn(size, generator=draw).to(dtype) for size in sizes)

    def of_rank(split: TokenSplit) -> tuple[Tensor, ...]:
        tokens = torch.cat([torch.arange(*run) for run in split.runs])
        mine = [tensor[tokens].requires_grad_() for tensor in inputs]
        ring = Ring.of(split, rings.lengths, torch.device("cpu"))
        output = ring_attention(mine[0], mine[1], mine[2], ring, SCALE, by_kernel=by_kernel)
        grads = torch.autograd.grad((output * weights[tokens]).sum(), mine)
        return tokens, output.detach(), *grads

    whole = [tensor.float().requires_grad_() for tensor in inputs]
    bounds = bounds_of(rings.lengths)
    output = bounded_attention(whole[0], whole[1], whole[2], bounds, SCALE)
    grads = torch.autograd.grad((output * weights.float()).sum(), whole)
    tokens, *ours = (torch.cat(parts) for parts in zip(*rings.of_each(of_rank), strict=True))
    assert sorted(tokens.tolist()) == list(range(count))
    pairs = zip(ours, (output.detach(), *grads), strict=True)
    return max(
        float((a.float() - b[tokens]).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in pairs
    )


@pytest.mark.usefixtures("between_threads")
@pytest.mark.parametrize("rings", [2, 3, 4])
@pytest.mark.parametrize("name", ROWS)
def test_rings_compute_what_one_rank_computes(name: str, rings: int):
    assert compared(Rings(rings, ROWS[name]), torch.float32) < 2e-6
    assert compared(Rings(rings, ROWS[name]), torch.float32, values=6) < 2e-6, "as latent heads"


@pytest.mark.usefixtures("between_threads", "kernels")
@pytest.mark.parametrize("name", ROWS)
def test_rings_compute_by_the_kernels_of_a_gpu(name: str):
    assert compared(Rings(3, ROWS[name]), torch.float32, by_kernel=True) < 2e-6
    assert compared(Rings(3, ROWS[name]), torch.bfloat16, values=6, by_kernel=True) < 2e-2


@pytest.mark.usefixtures("between_threads")
def test_keys_go_only_to_ranks_that_need_them():
    alone = Rings(2, [4, 4, 4, 4])
    compared(alone, torch.float32)
    assert alone.num_messages == 0, "no sequence is on two rings"
    crossed = Rings(2, [6, 4, 6])
    compared(crossed, torch.float32)
    # Keys of the first ring to the second, and of the second's last run to the first; with
    # gradients twice, and back.
    assert crossed.num_messages == 2 * 3
