"""Print how far our attention, logits and parts of experts on a CPU are from SGLang's.

As JSON: {case: largest difference}.
"""

import itertools
import json
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch

from slipstream.generators.sglang import cpu, cpu_adapter_batches, cpu_models

VOCABULARY = 2500  # tokens; no multiple of a block
LOGITS = {  # types of the output layer, and whether logits are in float32
    "widened logits": (torch.bfloat16, True),
    "float32 logits": (torch.float32, True),
    "rounded logits": (torch.bfloat16, False),
}
SLOTS, HEADS, KEY_HEADS, SIZE = 400, 4, 2, 8
# Ranks that have the experts, and the experts that a router may choose from.
EXPERTS = {"experts of two ranks": (2, 6), "experts of three ranks": (3, 6), "idle rank": (2, 3)}
# Ranks of adapters (0: none), and the adapters of a batch's sequences with their tokens.
ADAPTERS: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "adapters in turns": ([4, 3, 3, 3], [(3, 1), (1, 1), (2, 3), (3, 1), (1, 2)]),
    "adapters of other ranks": ([4, 0, 2], [(0, 1), (1, 2), (2, 1), (0, 1), (2, 3), (1, 1)]),
    "few adapters": ([4, 2], [(0, 3), (1, 2)]),
}
# tokens that are cached and new ones, of each sequence of a batch
CASES = {
    "prompts": [(0, 5), (0, 5), (0, 7)],
    "turns": [(40, 3), (38, 4), (41, 1)],
    "far apart": [(90, 2), (0, 30), (1, 1), (2, 1)],
    "one": [(60, 6)],
}


def main() -> None:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # noqa: TID251 SGLang reads it while it is imported
    cpu.prepare()
    with cpu.uncompiled():
        from sglang.srt.layers.attention.torch_native_backend import (
            TorchNativeAttnBackend as Native,
        )
        from sglang.srt.layers.logits_processor import LogitsProcessor
        from sglang.srt.layers.moe import MoeRunnerConfig, fused_moe_native
        from sglang.srt.layers.moe.topk import StandardTopKOutput
    theirs = Native._run_sdpa_forward_extend
    their_logits = LogitsProcessor._compute_lm_head
    cpu.take_sinks()
    cpu.extend_without_prefix_queries()
    cpu.widen_output_layer_by_blocks()
    random = torch.Generator().manual_seed(7)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    def difference(cached: list[int], new: list[int]) -> float:
        lengths = [sum(pair) for pair in zip(cached, new, strict=True)]
        table = torch.zeros(len(new), max(lengths), dtype=torch.int32)
        slots = torch.randperm(SLOTS, generator=random).split([*lengths, SLOTS - sum(lengths)])
        for row, part in zip(table, slots, strict=False):
            row[: len(part)] = part
        query = tensor(sum(new), HEADS, SIZE)
        caches = tensor(SLOTS, KEY_HEADS, SIZE), tensor(SLOTS, KEY_HEADS, SIZE)
        of_batch = map(torch.tensor, (lengths, cached, new))
        given = table, torch.arange(len(new)), *of_batch
        backend = Native.__new__(Native)
        found = [
            run(
                backend,
                query,
                torch.full_like(query, torch.nan),
                *caches,
                *given,
                scaling=0.3,
                enable_gqa=True,
                causal=True,
                sliding_window_size=None,
            )
            for run in (theirs, Native._run_sdpa_forward_extend)
        ]
        return float((found[0] - found[1]).abs().max())

    def logits_difference(dtype: torch.dtype, *, in_float32: bool) -> float:
        processor = LogitsProcessor.__new__(LogitsProcessor)
        torch.nn.Module.__init__(processor)
        processor.use_fp32_lm_head, processor.use_fp32_lm_head_output = in_float32, False
        processor.rl_on_policy_target = None
        layer = SimpleNamespace(weight=tensor(VOCABULARY, SIZE).to(dtype), quant_method=None)
        given = processor, tensor(3, SIZE).to(dtype), layer
        wanted, found = their_logits(*given), LogitsProcessor._compute_lm_head(*given)
        if found.dtype != wanted.dtype:
            return float("nan")
        return float((found - wanted).abs().max())

    all_experts = fused_moe_native.moe_forward_native
    cpu_models.leave_out_far_experts(fused_moe_native)
    computing = all_experts, fused_moe_native.moe_forward_native
    topk, config = StandardTopKOutput, MoeRunnerConfig(activation="silu")
    printed = {
        f"{name} 0": logits_difference(dtype, in_float32=in_float32)
        for name, (dtype, in_float32) in LOGITS.items()
    } | {
        f"{name} 0": experts_difference(*sizes, computing, topk, config, random)
        for name, sizes in EXPERTS.items()
    }
    printed |= {f"{name} 0": adapters_difference(*case, random) for name, case in ADAPTERS.items()}
    for name, pairs in CASES.items():
        for number, order in enumerate(itertools.islice(itertools.permutations(pairs), 3)):
            printed[f"{name} {number}"] = difference(*map(list, zip(*order, strict=True)))
    sys.stdout.write(json.dumps(printed))


def adapters_difference(
    ranks: list[int], runs: list[tuple[int, int]], random: torch.Generator
) -> float:
    """Return how far our products with adapters are from SGLang's, of one and of three slices."""
    from sglang.srt.lora import torch_ops

    theirs = torch_ops.sgemm_lora_a_control_fwd, torch_ops.sgemm_lora_b_control_fwd
    cpu_adapter_batches.batch_adapters()
    ours = torch_ops.sgemm_lora_a_control_fwd, torch_ops.sgemm_lora_b_control_fwd
    torch_ops.sgemm_lora_a_control_fwd, torch_ops.sgemm_lora_b_control_fwd = theirs
    of_runs, lengths = (torch.tensor(column) for column in zip(*runs, strict=True))
    num_tokens, most = int(lengths.sum()), max(ranks)
    farthest = 0.0
    for ends in ([0, 6], [0, 6, 10, 14]):
        slices = len(ends) - 1
        inputs = torch.randn(num_tokens, SIZE, generator=random)
        a = torch.randn(len(ranks), slices * most, SIZE, generator=random)
        b = torch.randn(len(ranks), ends[-1], most, generator=random)
        base = torch.randn(num_tokens, ends[-1], generator=random)
        scalings = torch.rand(len(ranks), generator=random)
        found = []
        for down, up in (theirs, ours):
            given = of_runs, lengths, torch.tensor(ranks)
            low = down(inputs, a, *given, scalings, slices)
            found.append(up(low, b, *given, torch.tensor(ends), base.clone()))
        farthest = max(farthest, float((found[0] - found[1]).abs().max()))
        if torch.equal(found[0], base):
            return float("nan")
    return farthest


def experts_difference(
    ranks: int,
    chosen_of: int,
    computing: tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]],
    topk: Callable[..., object],
    config: object,
    random: torch.Generator,
) -> float:
    """Return how far the sum of what ranks compute of six experts is from all of them on one.

    Args:
        ranks: Number of ranks.
        chosen_of: Experts that are chosen from; the others have no token.
        computing: SGLang's function for one rank, and ours.
        topk: Makes SGLang's choice of experts.
        config: SGLang's settings of its experts.
        random: Source of all numbers.
    """
    of_one_rank, of_ranks = computing
    each, inner = 6 // ranks, 5
    tokens, w13, w2 = (
        0.3 * torch.randn(*shape, generator=random)
        for shape in ((50, SIZE), (6, 2 * inner, SIZE), (6, SIZE, inner))
    )
    weights, numbers = torch.rand(50, chosen_of, generator=random).topk(2)
    layer = SimpleNamespace(num_experts=6, w13_weight=w13, w2_weight=w2)
    whole = of_one_rank(layer, tokens, topk(weights, numbers, None), config)
    total = torch.zeros_like(whole)
    for first in range(0, 6, each):
        local = numbers - first
        local[(local < 0) | (local >= each)] = -1
        own = slice(first, first + each)
        layer = SimpleNamespace(num_experts=6, w13_weight=w13[own], w2_weight=w2[own])
        total += of_ranks(layer, tokens, topk(weights, local, None), config)
    return float((total - whole).abs().max())


if __name__ == "__main__":
    main()
