"""Compiles kernels for an H100 on a machine without a GPU, and launches none.

Usage: compiled_kernels
Prints, by kernel and case, how wide its accesses of memory are: the widths in bits that its code
has for a thread's loads and stores, in order.
"""

import json
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from slipstream.learner.model.kernels import triton_rotary, triton_swiglu

_WIDTH = re.compile(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)")
_H100 = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda _device: 0,
)


def widths_of(call: Callable[[], object]) -> list[int]:
    """Return the widths of the accesses in the code of all kernels that a call would launch."""
    widths: set[int] = set()

    def compiled(kernel: JITFunction, grid: object) -> Callable[..., None]:
        def compile_alone(*args: object, **options: object) -> None:
            code = kernel.warmup(*args, grid=grid, **options).asm["ptx"]
            widths.update(int(many or 1) * int(bits) for many, bits in _WIDTH.findall(code))

        return compile_alone

    JITFunction.__getitem__ = compiled  # called as kernel[grid](...)
    call()
    return sorted(widths)


def main() -> None:
    triton.runtime.driver.set_active(_H100)
    sys.stdout.write(json.dumps({name: widths_of(call) for name, call in cases().items()}))


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
        "rotary embedding": partial(turned, heads, angles, angles, **halves, is_back=False),
        "rotary embedding back": partial(turned, heads, angles, angles, **halves, is_back=True),
        "rotary embedding of pairs": partial(
            turned, latent, of_pairs, of_pairs, **pairs, is_back=False
        ),
    }


def narrow(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        main()
