"""A plugin of pytest for TRITON_INTERPRET=1: kernels run by Triton's interpreter, all of them."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from slipstream.algos.kernels import replaced_calls


def pytest_configure() -> None:
    compute_as_a_gpu()
    patch_language_once()


def compute_as_a_gpu() -> None:
    """Have the interpreter round float32 to bfloat16 to the nearest: it would round towards 0.

    And have the larger of a number and of what is none be the number, but where a kernel asks.
    """
    builder: Any = interpreter.InterpreterBuilder
    builder.create_maxnumf = lambda self, left, right: self.binary_op(left, right, np.fmax)
    cast = builder.cast_impl

    def cast_impl(self: object, source: Any, to: tl.dtype) -> object:  # noqa: ANN401 of Triton
        if source.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return cast(self, source, to)
        wide = torch.from_numpy(np.ascontiguousarray(source.data, np.float32))
        narrow = wide.bfloat16().view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(narrow, to.scalar)

    builder.cast_impl = cast_impl


def patch_language_once() -> None:
    """Put the interpreter's functions in Triton's language for good.

    It would do so again in each call of a function, which takes most of its time.
    """
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda _function: interpreter._LangPatchScope()


@pytest.fixture(autouse=True)
def _no_kernel_is_replaced() -> Iterator[None]:
    replaced_calls()
    yield
    assert replaced_calls() == 0
