"""Print hashes of tensors, and the bytes that ours moves, as Triton's interpreter runs kernels.

Usage: engine_gpu_hash
Each tensor's hash is that of SGLang's kernels, of our kernel, and of our host. Of one tensor that
is on the device in two pieces the bytes are counted that are moved for each byte hashed.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # noqa: TID251 Triton reads it while it is imported

import torch
import triton
from sglang.kernels.ops.memory import gpu_tensor_hash as engine

from slipstream.weightbus.version.gpu_hash import HostTiles, tile_sums
from slipstream.weightbus.version.tensor_bits import Bits, bits_of
from slipstream.weightbus.version.triton_hash import GpuTiles, sums_of
from tests.support.interpreted_kernels import patch_language_once
from tests.support.moved_bytes import MovedBytes, count_kernels

TILE, CHUNK, SEED = 8192, 1024, 0x243F6A88
CPU = torch.device("cpu")
CASES = (
    *((size, "uint8") for size in (1, 2, 3, 4, 7, 32767, 32768, 32769, 98301)),
    *((size, "bfloat16") for size in (5, 8384, 16384, 16385)),
    *((size, "float32") for size in (8191, 8192, 8193, 40_000)),
    *((301, name) for name in ("bool", "int8", "float16", "float8_e4m3fn", "int32", "int64")),
    (4097, "float64"),
)


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


def of_parts(data: Bits, tiles: GpuTiles | HostTiles) -> str:
    """Return our hash of a tensor in three parts."""
    return tile_sums([data[:2], data[2:3], data[3:]], tiles).hash()


def moved_for_each_byte() -> dict[str, float]:
    """Return the bytes moved for each byte hashed, by what moves them."""
    words = torch.arange(40 * TILE, dtype=torch.int32)
    with MovedBytes(is_logits=lambda _tensor: False) as counter:
        count_kernels(counter)
        for first, end in ((0, 15 * TILE + 5), (15 * TILE + 5, 40 * TILE)):
            sums_of(words[first:end], first)
    return {name: count / words.nbytes for (_, name), count in counter.moved.items()}


def main() -> None:
    patch_language_once()
    rows = []
    for case in CASES:
        data = tensor(*case)
        bits = bits_of(data)
        ours = [of_parts(bits, tiles) for tiles in (GpuTiles(CPU, 4 * TILE), HostTiles())]
        rows.append([hashed(data), *ours])
    sys.stdout.write(json.dumps({"hashes": rows, "moved": moved_for_each_byte()}))


if __name__ == "__main__":
    main()
