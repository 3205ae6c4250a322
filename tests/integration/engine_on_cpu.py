"""Print how far our attention and logits on a CPU are from SGLang's.

As JSON: {case: largest difference}.
"""

import itertools
import json
import os
import sys
from types import SimpleNamespace

import torch

from slipstream.generators.sglang import cpu

VOCABULARY = 2500  # tokens; no multiple of a block
LOGITS = {  # types of the output layer, and whether logits are in float32
    "widened logits": (torch.bfloat16, True),
    "float32 logits": (torch.float32, True),
    "rounded logits": (torch.bfloat16, False),
}
SLOTS, HEADS, KEY_HEADS, SIZE = 400, 4, 2, 8
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
    theirs = Native._run_sdpa_forward_extend
    their_logits = LogitsProcessor._compute_lm_head
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

    printed = {
        f"{name} 0": logits_difference(dtype, in_float32=in_float32)
        for name, (dtype, in_float32) in LOGITS.items()
    }
    for name, pairs in CASES.items():
        for number, order in enumerate(itertools.islice(itertools.permutations(pairs), 3)):
            printed[f"{name} {number}"] = difference(*map(list, zip(*order, strict=True)))
    sys.stdout.write(json.dumps(printed))


if __name__ == "__main__":
    main()
