"""Print the hashes of SGLang's GPU kernels for the test's tensors, run by Triton's interpreter."""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # noqa: TID251 Triton reads it while it is imported

import torch
import triton
from sglang.kernels.ops.memory import gpu_tensor_hash as engine

TILE, CHUNK, SEED = 8192, 1024, 0x243F6A88
CASES = ((5, "bfloat16"), (8384, "bfloat16"), (40_000, "float32"))


def tensor(num_elements: int, dtype: str) -> torch.Tensor:
    return (torch.arange(num_elements) / 7).to(getattr(torch, dtype))


def hashed(data: torch.Tensor) -> str:
    """Launch the kernels as gpu_tensor_hash does, which takes tensors on a GPU alone."""
    flat = data.view(torch.uint8)
    words = torch.nn.functional.pad(flat, (0, -len(flat) % 4)).view(torch.uint32)
    sums = torch.empty(triton.cdiv(len(words), TILE), dtype=torch.uint64)
    engine.hash_tiles32_kernel_blocked[(len(sums),)](
        words,
        sums,
        len(words),
        seed1=SEED,
        seed2=((SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF,
        FM_C1=engine.FMIX32_C1,
        FM_C2=engine.FMIX32_C2,
        POS_A=engine.POS_C1,
        POS_B=engine.POS_C2,
        TILE=TILE,
        BLOCK=256,
        USE_CG=False,
    )
    while len(sums) > 1:
        total = torch.empty(triton.cdiv(len(sums), CHUNK), dtype=torch.uint64)
        engine.add_tree_reduce_u64_kernel[(len(total),)](sums, total, len(sums), CHUNK=CHUNK)
        sums = total
    return f"{engine._final_splitmix64(int(sums.item())):016x}"


if __name__ == "__main__":
    sys.stdout.write(json.dumps([hashed(tensor(*case)) for case in CASES]))
