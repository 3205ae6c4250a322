"""Compiles kernels for an H100 on a machine without a GPU, and launches none.

Usage: compiled_kernels
Prints, by kernel and case, how wide its accesses of memory are (the widths in bits that its code
has for a thread's loads and stores, in order), and the bytes of a thread's registers that do not
fit and are kept in memory.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from slipstream.algos.logprobs import triton_logits
from slipstream.algos.logprobs.chunks import Chunk, LogitGradients
from slipstream.learner.model.kernels import triton_rotary, triton_swiglu
from slipstream.learner.model.kernels.swiglu_form import Form
from slipstream.weightbus.version import triton_hash

_WIDTH = re.compile(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)")
_STACK = re.compile(r"STACK:(\d+)")
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_H100 = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda _device: 0,
)


def resources_of(call: Callable[[], object], folder: Path) -> dict[str, object]:
    """Return widths of accesses and bytes that spill, of all kernels that a call would launch."""
    widths: set[int] = set()
    spilled = 0

    def compiled(kernel: JITFunction, grid: object) -> Callable[..., None]:
        def compile_alone(*args: object, **options: object) -> None:
            nonlocal spilled
            code = kernel.warmup(*args, grid=grid, **options).asm
            found = _WIDTH.findall(code["ptx"])
            widths.update(int(many or 1) * int(bits) for many, bits in found)
            (file := folder / "kernel.cubin").write_bytes(code["cubin"])
            command = [_CUOBJDUMP, "--dump-resource-usage", file]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            spilled += sum(map(int, _STACK.findall(said)))

        return compile_alone

    JITFunction.__getitem__ = compiled  # called as kernel[grid](...)
    call()
    return {"widths": sorted(widths), "spilled": spilled}


LIMITED = Form(1.702, 1.0, 7.0)  # gpt-oss


def main(folder: Path) -> None:
    triton.runtime.driver.set_active(_H100)
    found = {name: resources_of(call, folder) for name, call in cases().items()}
    sys.stdout.write(json.dumps(found))


def cases() -> dict[str, Callable[[], object]]:
    """Return calls of every kernel with shapes of real models."""
    gate_up, gradient, weight = narrow(2, 2 * 8960), narrow(2, 8960), torch.empty(2, 1)
    heads, latent, angles = narrow(2, 12, 256)[..., :128], narrow(2, 16, 192), torch.empty(2, 1, 64)
    of_pairs = angles[..., :32].contiguous()
    turned = triton_rotary.turned
    halves, pairs = {"in_pairs": False, "first": 0}, {"in_pairs": True, "first": 128}
    return {
        "SwiGLU": partial(triton_swiglu.forward, gate_up, None),
        "SwiGLU's gradients": partial(triton_swiglu.backward, gradient, gate_up, None),
        "weighted SwiGLU": partial(triton_swiglu.forward, gate_up, weight),
        "weighted SwiGLU's gradients": partial(triton_swiglu.backward, gradient, gate_up, weight),
        "limited SwiGLU": partial(triton_swiglu.forward, gate_up, None, LIMITED),
        "limited SwiGLU's gradients": partial(
            triton_swiglu.backward, gradient, gate_up, None, LIMITED
        ),
        "rotary embedding": partial(turned, heads, angles, angles, **halves, is_back=False),
        "rotary embedding back": partial(turned, heads, angles, angles, **halves, is_back=True),
        "rotary embedding of pairs": partial(
            turned, latent, of_pairs, of_pairs, **pairs, is_back=False
        ),
        **{f"logits of {columns}": partial(both_of_logits, columns) for columns in (16384, 151936)},
        "logits beside a reference's": partial(both_of_logits, 16384, is_full=True),
        "hash of words": partial(triton_hash.sums_of, torch.empty(16384, dtype=torch.int32), 0),
        "hash from a tile's middle": partial(
            triton_hash.sums_of, torch.empty(16383, dtype=torch.int32), 2**31 + 5
        ),
    }


def both_of_logits(columns: int, *, is_full: bool = False) -> None:
    row = torch.zeros(2)
    optional = row if is_full else None
    rows = LogitGradients(row, row, row, row, row, by_entropy=optional, by_kl=optional)
    chunk = Chunk(
        torch.empty(2, columns),
        torch.zeros(2, dtype=torch.int64),
        temperature=optional,
        num_real=columns,
        others=torch.empty(2, columns) if is_full else None,
        others_real=columns,
    )
    triton_logits.statistics(chunk)
    triton_logits.gradients(chunk, rows, torch.bfloat16)


def narrow(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        main(Path(folder))
