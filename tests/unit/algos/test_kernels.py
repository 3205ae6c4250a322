"""When a kernel runs, and when torch's operators take its place."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from slipstream.algos.kernels import BeyondKernelError, FusedOperator, replaced_calls
from tests.support.tiny_run import ROOT


@pytest.fixture(autouse=True)
def _none_replaced() -> Iterator[None]:
    replaced_calls()
    yield
    replaced_calls()


with FakeTensorMode():
    GPU = torch.empty(0, device="cuda")


class Doubled:
    """An operator that notes its calls; ``kernel`` is given the number of its call, from 1."""

    def __init__(self, kernel: Callable[[int, Tensor], Tensor], *, where: Tensor = GPU) -> None:
        self.tried = 0
        self.where = where
        self._kernel = kernel
        self.operator = FusedOperator("twice x", kernel=self._run, operators=lambda x: x + x)

    def _run(self, x: Tensor) -> Tensor:
        self.tried += 1
        return self._kernel(self.tried, x)

    def __call__(self, *values: float) -> list[float]:
        x = torch.tensor(values)
        result: list[float] = self.operator(self.where, x).tolist()
        return result


def logged_by(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels run there")  # noqa: TID251 Triton reads it, too
def test_on_a_cpu_operators_are_the_rule():
    doubled = Doubled(lambda _number, x: 3 * x, where=torch.empty(0))
    assert doubled(1.0, 2.0) == [2.0, 4.0]
    assert (doubled.tried, replaced_calls()) == (0, 0)


def test_a_kernel_that_runs_is_not_replaced(caplog: pytest.LogCaptureFixture):
    doubled = Doubled(lambda _number, x: 3 * x)
    assert doubled(1.0) == [3.0]
    assert (replaced_calls(), logged_by(caplog)) == (0, [])


@pytest.mark.parametrize(
    "error",
    [ImportError("No module named 'triton'"), RuntimeError("Failed to find C compiler")],
    ids=["missing", "not-compiled"],
)
def test_a_kernel_that_cannot_run_is_left_and_each_call_counts(
    error: Exception, caplog: pytest.LogCaptureFixture
):
    def kernel(_number: int, _x: Tensor) -> Tensor:
        raise error

    doubled = Doubled(kernel)
    assert [doubled(1.0), doubled(2.0), doubled(3.0)] == [[2.0], [4.0], [6.0]]
    assert doubled.tried == 1
    assert logged_by(caplog) == [
        f"torch's operators compute twice x, without a kernel: {type(error).__name__}: {error}"
    ]
    assert replaced_calls() == 3
    assert replaced_calls() == 0, "counted since the last time"


def test_what_a_kernel_does_not_take_is_replaced_for_that_call(caplog: pytest.LogCaptureFixture):
    def kernel(_number: int, x: Tensor) -> Tensor:
        if len(x) > 1:
            raise BeyondKernelError(f"{len(x)} values, 1 is the most")
        return 3 * x

    doubled = Doubled(kernel)
    results = [doubled(*range(size)) for size in (2, 2, 1, 3)]
    assert results == [[0.0, 2.0], [0.0, 2.0], [0.0], [0.0, 2.0, 4.0]]
    assert doubled(1.0) == [3.0], "by the kernel"
    assert doubled.tried == 5
    assert [line.rpartition(": ")[2] for line in logged_by(caplog)] == [
        "2 values, 1 is the most",
        "3 values, 1 is the most",
    ]
    assert replaced_calls() == 3


def test_a_device_that_is_full_is_no_reason_against_a_kernel():
    def kernel(number: int, x: Tensor) -> Tensor:
        if number == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 3 * x

    doubled = Doubled(kernel)
    with pytest.raises(torch.OutOfMemoryError):
        doubled(1.0)
    assert doubled(1.0) == [3.0]
    assert replaced_calls() == 0


# A kernel with a name that is nowhere, in a module: Triton reads a kernel's source.
PROGRAM = """
import torch, triton, triton.language as tl
from slipstream.algos.kernels import FusedOperator, replaced_calls

@triton.jit
def broken(x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at) + nowhere)

@triton.jit
def whole(x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at) * 3)

def run_by(kernel):
    def run(x):
        y = x.clone()
        kernel[(1,)](y, BLOCK=4)
        return y
    return run

for kernel in (broken, whole):
    double = FusedOperator(kernel.__name__, kernel=run_by(kernel), operators=lambda x: x * 2)
    x = torch.ones(4)
    print(kernel.__name__, double(x, x).tolist(), double(x, x).tolist(), replaced_calls())
"""


def test_a_real_kernel_that_triton_refuses_is_replaced(tmp_path: Path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'src'}"},  # noqa: TID251 handed on
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "broken [2.0, 2.0, 2.0, 2.0] [2.0, 2.0, 2.0, 2.0] 2",
        "whole [3.0, 3.0, 3.0, 3.0] [3.0, 3.0, 3.0, 3.0] 0",
    ], done.stderr
    assert done.stderr.count("torch's operators compute broken, without a kernel: ") == 1
