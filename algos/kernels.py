"""Triton kernels, and torch's operators in their place where they cannot run.

A kernel runs on a GPU, and on a CPU under Triton's interpreter (TRITON_INTERPRET=1). On a CPU
without it torch's operators are the rule. On a GPU they replace a kernel that cannot be compiled,
or that does not take a shape: one line of the log says so, and each call is counted.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # noqa: TID251 Triton reads it, too
_OF_THE_DEVICE = (torch.OutOfMemoryError, torch.AcceleratorError)  # a kernel that ran and failed
_replaced: Counter[str] = Counter()  # calls that torch's operators computed, by name of operator
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class BeyondKernelError(ValueError):
    """A kernel does not take such arguments; the message names them."""


class FusedOperator(Generic[_Given, _Result]):
    """One operator with two forms: a Triton kernel, and torch's operators."""

    def __init__(
        self, name: str, *, kernel: Callable[_Given, _Result], operators: Callable[_Given, _Result]
    ) -> None:
        """Take the two forms, of the same arguments and results.

        ``kernel`` imports Triton when it is called, and raises BeyondKernelError before it writes
        anything. ``name`` is of what is computed, for the log.
        """
        self.name = name
        self.kernel = kernel
        self.operators = operators
        self._cannot_run = ""
        self._told: set[str] = set()

    def __call__(self, where: Tensor, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        """Compute the result on the device of ``where``."""
        if not runs_kernels(where):
            return self.operators(*args, **kwargs)
        if not self._cannot_run:
            try:
                return self.kernel(*args, **kwargs)
            except _OF_THE_DEVICE:
                raise
            except BeyondKernelError as error:
                self._tell(str(error))
            except Exception as error:  # noqa: BLE001 of Triton, its compiler, or the C compiler
                self._cannot_run = f"{type(error).__name__}: {error}"
                self._tell(self._cannot_run)
        _replaced[self.name] += 1
        return self.operators(*args, **kwargs)

    def _tell(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            _log.warning("torch's operators compute %s, without a kernel: %s", self.name, why)


def runs_kernels(where: Tensor) -> bool:
    """Return True where kernels are the rule: on a GPU, or under Triton's interpreter."""
    return (where.is_cuda or _IS_INTERPRETED) and not torch.compiler.is_compiling()


def replaced_calls() -> int:
    """Return how many calls went without their kernel since the last time, and begin again."""
    calls = _replaced.total()
    _replaced.clear()
    return calls
