"""Stage 1: attention and rotary embedding of packed sequences against those of each sequence."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor
from torch.nn import attention

from benchmarks.device.report import ON_A_CPU, Report, Skipped, run_stage
from slipstream.learner.model.crossings import Crossing
from slipstream.learner.model.cuda_attention import (
    AttentionBounds,
    choose_attention,
    cuda_attention,
    has_flash_4,
)
from slipstream.learner.model.grouped_attention import group_by_length, grouped_attention
from slipstream.learner.model.ring_attention import Hop, Ring, ring_attention
from slipstream.learner.model.rotary import Rotary
from slipstream.wire.models.hf_config import HfConfig

_OFF_BF16 = 2e-2  # relative to the largest value
_OFF_F32 = 1e-5
_OFF_ROTARY = 1e-4  # angles of hundreds of radians are rounded to float32
_HEADS = ((8, 8), (16, 4))  # of queries, of keys
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Alone:
    """A group of one rank for Megatron's rotary embedding."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def work(report: Report, _out: Path) -> None:
    with report.part("rotary"):
        _compare_rotary(report)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    lengths = [1, 2, 127, 128, 129, 777, 2048, 128] if on_gpu else [1, 2, 31, 32, 33, 32, 7]
    for channels in (64, 128):
        for heads, groups in _HEADS:
            name = f"d{channels} h{heads} g{groups}"
            with report.part(f"grouped float32 {name}"):
                _compare_grouped(report, name, device, lengths, (heads, groups, channels))
            with report.part(f"blocks {name}"):
                _compare_blocks(report, name, device, (heads, groups, channels))
            if not on_gpu:
                report.skip(f"varlen bfloat16 {name}", ON_A_CPU)
                continue
            with report.part(f"varlen bfloat16 {name}"):
                _compare_varlen(report, name, device, lengths, (heads, groups, channels))
            with report.part(f"FlashAttention 4 {name}"):
                _compare_flash_4(report, name, device, lengths, (heads, groups, channels))


def _compare_rotary(report: Report) -> None:
    """Turn queries by position id, all at once, and as Megatron does, a sequence at a time."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    lengths, channels = ([512] * 64, 128) if on_gpu else ([64] * 16, 32)
    bounds, longest = _bounds(lengths, device), max(lengths)
    frequencies = 1e6 ** -(torch.arange(0, channels, 2, device=device) / channels)
    queries = torch.randn(sum(lengths), 8, channels, generator=torch.Generator().manual_seed(1))
    queries = queries.to(device)
    angles = torch.arange(longest, device=device)[:, None] * frequencies
    doubled = torch.cat([angles, angles], dim=-1)[:, None, None]
    position_ids = torch.cat([torch.arange(length, device=device) for length in lengths])

    def at_once() -> Tensor:
        return Rotary(frequencies).at(position_ids).turned(queries)

    def one_by_one() -> Tensor:
        turned: Tensor = _apply_rotary_pos_emb_thd(queries, bounds, doubled, cp_group=_Alone())
        return turned

    report.at_most("rotary", _off([at_once()], [one_by_one()]), "relative", needs=_OFF_ROTARY)
    seconds = {"at once": _fastest(at_once), "a sequence at a time": _fastest(one_by_one)}
    report.fact(f"rotary of {len(lengths)} sequences, ms", seconds)


def _fastest(turn: Callable[[], Tensor]) -> float:
    """Return the milliseconds of the fastest of ten calls."""
    found = []
    for _ in range(10):
        began_s = time.monotonic()
        turn()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(1e3 * (time.monotonic() - began_s))
    return round(min(found), 3)


def _compare_grouped(
    report: Report,
    name: str,
    device: torch.device,
    lengths: Sequence[int],
    shape: tuple[int, int, int],
) -> None:
    bounds = _bounds(lengths, device)
    inputs = _inputs(sum(lengths), shape, device, torch.float32)
    groups, scale = group_by_length(bounds), shape[-1] ** -0.5
    found = _with_gradients(lambda q, k, v: grouped_attention(q, k, v, groups, scale), inputs)
    right = _with_gradients(_plain(lengths, scale), inputs)
    report.at_most(f"grouped float32 {name}", _off(found, right), "relative", needs=_OFF_F32)


def _compare_varlen(
    report: Report,
    name: str,
    device: torch.device,
    lengths: Sequence[int],
    shape: tuple[int, int, int],
) -> None:
    bounds, longest, scale = _bounds(lengths, device), max(lengths), shape[-1] ** -0.5
    inputs = _inputs(sum(lengths), shape, device, torch.bfloat16)

    def varlen(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return cuda_attention(
            query, key, value, AttentionBounds(bounds, bounds, longest, longest), scale
        )

    found = _with_gradients(varlen, inputs)
    right = _with_gradients(_plain(lengths, scale), [one.float() for one in inputs])
    report.at_most(f"varlen bfloat16 {name}", _off(found, right), "relative", needs=_OFF_BF16)
    torch.use_deterministic_algorithms(True)
    try:
        once, again = (_with_gradients(varlen, inputs) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    same = all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    report.holds(f"varlen bfloat16 {name} twice, same bits", same)


def _compare_blocks(
    report: Report, name: str, device: torch.device, shape: tuple[int, int, int]
) -> None:
    """Compute a sequence in blocks of a ring, by the kernels of this device, and as a whole."""
    tokens, cut = (4096, 1777) if device.type == "cuda" else (96, 41)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs, scale = _inputs(tokens, shape, device, dtype), shape[-1] ** -0.5
    ends, longest = _bounds([cut, tokens - cut], device), max(cut, tokens - cut)
    # The second run's queries see all keys of the first.
    hop = Hop(Crossing(((cut, tokens),), ((0, cut),)), ((0, cut),), [], [])
    ring = Ring(AttentionBounds(ends, ends, longest, longest), (hop,), None)

    def in_blocks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ring_attention(query, key, value, ring, scale)

    found = _with_gradients(in_blocks, inputs)
    right = _with_gradients(_plain([tokens], scale), [tensor.float() for tensor in inputs])
    needs = _OFF_BF16 if dtype is torch.bfloat16 else _OFF_F32
    report.at_most(f"blocks {name}", _off(found, right), "relative", needs=needs)


def _compare_flash_4(
    report: Report,
    name: str,
    device: torch.device,
    lengths: Sequence[int],
    shape: tuple[int, int, int],
) -> None:
    """Compare FlashAttention 4 as torch's own kernel was, where it takes such heads."""
    heads, groups, channels = shape
    hf = HfConfig(
        model_type="qwen2",
        vocab_size=1,
        hidden_size=heads * channels,
        intermediate_size=1,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=channels,
    )
    report.fact(f"attention {name}", choose_attention(hf, device, torch.bfloat16))
    if not has_flash_4():
        raise Skipped("another kernel runs")
    try:
        _compare_varlen(report, f"FlashAttention 4 {name}", device, lengths, shape)
    finally:
        attention.restore_flash_attention_impl()


def _bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def _inputs(
    tokens: int, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """Return queries, keys, values, and the gradient of the output."""
    heads, groups, channels = shape
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(tokens, count, channels, generator=generator).to(device, dtype)
        for count in (heads, groups, groups, heads)
    ]


def _plain(lengths: Sequence[int], scale: float) -> Attention:
    """Return attention as one would write it down: one call per sequence, heads repeated."""
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        times = query.size(1) // key.size(1)
        key, value = (one.repeat_interleave(times, 1) for one in (key, value))
        parts = []
        for start, end in pairwise(ends):
            q, k, v = (one[start:end].transpose(0, 1).unsqueeze(0) for one in (query, key, value))
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
            parts.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(parts)

    return attend


def _with_gradients(attention: Attention, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of queries, keys and values."""
    *leaves, grad = (one.detach().clone() for one in inputs)
    for leaf in leaves:
        leaf.requires_grad_(requires_grad=True)
    output = attention(*leaves)
    output.backward(grad)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _off(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the largest value of its tensor."""
    pairs = zip(found, right, strict=True)
    return max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in pairs)


if __name__ == "__main__":
    run_stage("attention", work)
