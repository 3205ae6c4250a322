"""Gives a real SGLang the pace of a device: Python runs this where PYTHONPATH has this folder.

Each decode step takes at least ``PACED_BASE_S`` and ``PACED_SEQUENCE_S`` for each of its sequences;
the rest of it is slept, so that several engines share few cores as if each had a device.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "sglang.srt.model_executor.model_runner"
_BASE_S = float(os.environ.get("PACED_BASE_S", "0"))  # noqa: TID251
_SEQUENCE_S = float(os.environ.get("PACED_SEQUENCE_S", "0"))  # noqa: TID251


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, whose forward passes it slows down."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def loaded(module: ModuleType) -> None:
            load(module)
            module.ModelRunner.forward = paced(module.ModelRunner.forward)

        spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


def paced(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward pass that takes its time."""

    def slow(runner: object, batch: Any, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        began = time.perf_counter()
        result = forward(runner, batch, *arguments, **options)
        if batch.forward_mode.is_decode():
            least_s = _BASE_S + _SEQUENCE_S * batch.batch_size
            time.sleep(max(0.0, began + least_s - time.perf_counter()))
        return result

    return slow


if _BASE_S or _SEQUENCE_S:
    sys.meta_path.insert(0, _Finder())
