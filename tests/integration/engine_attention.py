"""Print how far our attention on a CPU is from SGLang's: {case: largest difference} as JSON."""

import itertools
import json
import os
import sys

import torch

from slipstream.generators.sglang import cpu

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
    theirs = Native._run_sdpa_forward_extend
    cpu.extend_without_prefix_queries()
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

    printed = {}
    for name, pairs in CASES.items():
        for number, order in enumerate(itertools.islice(itertools.permutations(pairs), 3)):
            printed[f"{name} {number}"] = difference(*map(list, zip(*order, strict=True)))
    sys.stdout.write(json.dumps(printed))


if __name__ == "__main__":
    main()
