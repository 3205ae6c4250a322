"""Lets unmodified megatron-core run on a machine without CUDA.

megatron-core <= 0.19 uses CUDA devices, streams and random states without checking that there are
any (upstream has no switch for this). Four layers replace them:

1. the functions of torch.cuda called there become their CPU equivalents or do nothing;
2. a function mode sends ``device="cuda"`` to the CPU, makes ``Tensor.cuda()`` return its tensor
   and drops pinned memory; it acts on the thread that installed it;
3. the mixture-of-experts kernels that 0.18 and later import from triton get a stand-in that
   refuses to be called, if triton is absent;
4. ``torch.compile`` does nothing while megatron.core is imported: it decorates fused kernels that
   no model on a CPU calls, and loading the compiler for them would cost every process three
   seconds.

Remove this when megatron-core runs on gloo by itself.
"""

import contextlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

CPU = torch.device("cpu")
_MODULES_BOUND_AT_IMPORT = "megatron.core.tensor_parallel.random"
_TRITON_ONLY = "megatron.core.transformer.moe.ops.paged_stash"
_MARK = "_slipstream_cpu_mode"


def install() -> None:
    """Install the shim; a second call does nothing.

    Raises:
        RuntimeError: megatron.core was imported before, and holds the functions replaced here.
    """
    if hasattr(torch.cuda, _MARK):
        return
    if _MODULES_BOUND_AT_IMPORT in sys.modules:
        raise RuntimeError(
            "slipstream.learner.model.device.prepare() must run before megatron.core is imported; "
            f"{_MODULES_BOUND_AT_IMPORT} is imported already"
        )
    if importlib.util.find_spec("triton") is None:
        sys.modules.setdefault(_TRITON_ONLY, _refusing_module(_TRITON_ONLY))
    for name, replacement in _replacements().items():
        setattr(torch.cuda, name, replacement)
    for name in ("get_rng_state", "set_rng_state"):
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    torch.nn.Module.cuda = _itself  # type: ignore[method-assign,assignment]  # the point of it
    mode = _CudaToCpu()
    mode.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    setattr(torch.cuda, _MARK, mode)
    compiler, torch.compile = torch.compile, _uncompiled  # type: ignore[assignment]
    try:
        importlib.import_module("megatron.core")  # it keeps the replacements for all its modules
    finally:
        torch.compile = compiler


def _uncompiled(function: object = None, **_options: object) -> object:
    """Return a function unchanged, also as a decorator with options."""
    return function if function is not None else lambda decorated: decorated


class _CudaToCpu(TorchFunctionMode):
    """Sends work meant for a CUDA device to the CPU."""

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func is torch.Tensor.cuda:
            return args[0]
        named = dict(kwargs) if kwargs else {}
        if _is_cuda(named.get("device")):
            named["device"] = CPU
        if named.get("pin_memory"):
            named["pin_memory"] = False
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        result = func(*args, **named)
        if func is torch.Tensor.type and len(args) == 1 and not named:
            # Megatron's optimizer compares the types of parameters with torch.cuda.FloatTensor.
            caller: str = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("megatron.core.optimizer"):
                return result.replace("torch.", "torch.cuda.", 1)
        return result


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _Event:
    """A CUDA event on a device where all work is done already."""

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...

    def record(self, *_args: object) -> None: ...

    def wait(self, *_args: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: object) -> float:
        return 0.0


class _Stream:
    """A CUDA stream on a device with no queue."""

    cuda_stream = 0

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_args: object) -> None: ...

    def wait_stream(self, *_args: object) -> None: ...

    def wait_event(self, *_args: object) -> None: ...

    def record_event(self, *_args: object) -> _Event:
        return _Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Properties:
    name = "cpu"
    major = minor = total_memory = 0
    multi_processor_count = 1


class _Generators:
    """torch.cuda.default_generators, with one generator for all devices."""

    def __getitem__(self, _index: int) -> torch.Generator:
        return torch.default_generator


def _replacements() -> dict[str, object]:
    """Return the CPU stand-ins for names in torch.cuda."""
    return {
        "current_device": lambda: CPU,
        "set_device": _answering(None),
        "synchronize": _answering(None),
        "empty_cache": _answering(None),
        "get_rng_state": lambda *_args, **_kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *_args, **_kwargs: torch.set_rng_state(state),
        "default_generators": _Generators(),
        "_lazy_call": lambda call, **_kwargs: call(),
        # Not torch.manual_seed: that one calls back into torch.cuda.
        "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
        "get_device_capability": lambda *_args: (0, 0),
        "get_device_properties": lambda *_args: _Properties(),
        "memory_allocated": _answering(0),
        "max_memory_allocated": _answering(0),
        "memory_reserved": _answering(0),
        "current_stream": lambda *_args: _Stream(),
        "default_stream": lambda *_args: _Stream(),
        "stream": lambda _stream: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": _Event,
        "is_current_stream_capturing": _answering(False),
    }


def _answering(value: object) -> Callable[..., object]:
    """Return a new function: torch's compiler refuses one function under two names."""
    return lambda *_args, **_kwargs: value


def _itself(module: torch.nn.Module, *_args: object, **_kwargs: object) -> torch.nn.Module:
    return module


def _refusing_module(name: str) -> types.ModuleType:
    """Return a module that has every name, as a function that refuses to be called."""

    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise RuntimeError(f"{name} needs triton, which this machine does not have")

    def find(attribute: str) -> Callable[..., NoReturn]:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return refuse

    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__getattr__ = find  # type: ignore[method-assign]  # PEP 562
    return module
