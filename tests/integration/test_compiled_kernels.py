"""Triton's kernels compile for a GPU: Triton and its assembler need none.

A launch is caught, its arguments are given types as Triton does, and the kernel is compiled for
them.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from slipstream.algos.logprobs import logits
from slipstream.algos.logprobs.logits import Chunk, LogitGradients

pytestmark = pytest.mark.integration
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
HOPPER = GPUTarget("cuda", 90, 32)
TOKENS = 48


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return the resources of each kernel launched, which is compiled and does not run."""
    resources: list[str] = []

    def run(kernel: JITFunction, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 of Triton
        options = {"num_warps": kwargs.pop("num_warps", 4)}
        given = kernel.signature.bind(
            *args, **{k: v for k, v in kwargs.items() if k in kernel.arg_names}
        )
        names = kernel.arg_names
        constants = {p.name for p in kernel.params if p.is_constexpr}
        constants |= {name for name, value in given.arguments.items() if value is None}
        types = {
            name: "constexpr" if name in constants else mangle_type(given.arguments[name])
            for name in names
        }
        divisible = [
            (place,)
            for place, name in enumerate(names)
            if name not in constants and _is_divisible(given.arguments[name])
        ]
        source = ASTSource(
            kernel,
            types,
            {name: given.arguments[name] for name in constants},
            {place: [["tt.divisibility", 16]] for place in divisible},
        )
        binary = triton.compile(source, target=HOPPER, options=options).asm["cubin"]
        (file := tmp_path / "kernel.cubin").write_bytes(binary)
        command = [CUOBJDUMP, "--dump-resource-usage", file]
        resources.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    monkeypatch.setattr(JITFunction, "run", run)
    return resources


def _is_divisible(value: object) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)


def registers(resources: str) -> int:
    """Return the registers of a thread, none of which is kept in memory."""
    (found,) = re.findall(r"REG:(\d+) STACK:(\d+)", resources)
    assert found[1] == "0", resources
    return int(found[0])


@pytest.mark.parametrize("columns", [16384, 151_936 % 16384, 1000])
@pytest.mark.parametrize("is_full", [False, True])
def test_logits(is_full: bool, columns: int, compiled: list[str]):
    chunk = Chunk(
        torch.empty(TOKENS, columns),
        torch.zeros(TOKENS, dtype=torch.int64),
        torch.ones(TOKENS) if is_full else None,
        num_real=columns - is_full,
        others=torch.empty(TOKENS, columns) if is_full else None,
        others_real=columns,
    )
    row = torch.zeros(TOKENS)
    rows = LogitGradients(
        row, row, row, row, row, row if is_full else None, row if is_full else None
    )
    logits.statistics.kernel(chunk)
    logits.gradients.kernel(chunk, rows, torch.bfloat16)
    assert len(compiled) == 2
    assert all(registers(one) <= 128 for one in compiled)
