"""A second copy of an engine's weights on its device, which takes a version while it generates.

SGLang 0.5.23 loads a version into the weights that it generates with, and generates nothing
meanwhile. Here its model has a twin with memory of its own: a thread loads and hashes a version
there, on a stream of its own, and the pause is a copy on the device. It is a part of the
scheduler's process.
"""

import contextvars
import functools
import json
import logging
import mmap
import os
import threading
import time
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slipstream.generators.versions import shadow_state
from slipstream.generators.versions.shadow_state import ShadowReply, ShadowState
from slipstream.weightbus.agent.weight_files import tensor_shapes
from slipstream.weightbus.version.mapped_file import is_sealed, watched
from slipstream.weightbus.version.shared_memory import register, unregister
from slipstream.wire.errors import PublishError

Weights = Iterable[tuple[str, Tensor]]
_log = logging.getLogger(__name__)
_TYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
}
_KEPT_FILES = 3  # number of a learner's slots
_OF_WEIGHTS = {"gemma_weight"}  # buffers that loads write, which no checkpoint has: a norm's 1 + w


class ShadowLoad(NamedTuple):
    """Result of a load into the shadow."""

    load_s: float
    check_s: float
    checksums: Any  # answer of SGLang's weights checker


class MappedFiles:
    """Reads safetensors files through shared mappings; those of a GPU's process stay pinned."""

    def __init__(
        self,
        *,
        pins: bool,
        register: Callable[[int, int], int] = register,
        unregister: Callable[[int], None] = unregister,
    ) -> None:
        """Read files; without ``pins``, for a CPU, each is mapped for one load only."""
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        self._pins, self._register, self._unregister = pins, register, unregister
        self._kept = OrderedDict[tuple[int, int], mmap.mmap]()

    def tensors(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a file by name; they share its memory.

        Raises:
            OSError: the file cannot be opened.
            SafetensorError: it is no whole safetensors file.
        """
        tensor_shapes(path)  # checks header and size
        mapped = self._mapped(path)
        data = memoryview(mapped)
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(bytes(data[8:start])).items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            dtype, shape = _TYPES[entry["dtype"]], entry["shape"]
            found = torch.empty(shape, dtype=dtype)
            if last > first:
                part = data[start + first : start + last]
                found = torch.frombuffer(part, dtype=dtype).view(shape)
            yield name, found

    def _mapped(self, path: Path) -> mmap.mmap:
        # Memory can be pinned if it can be written. Only that is kept: a disk may give the number
        # of a file that is gone to the next one.
        is_kept = self._pins and _is_memory(path)
        with path.open("r+b" if is_kept else "rb") as file:
            status = os.fstat(file.fileno())
            key = status.st_dev, status.st_ino
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            access = mmap.ACCESS_WRITE if is_kept else mmap.ACCESS_READ
            mapped = mmap.mmap(file.fileno(), 0, access=access)
        if is_kept:
            self._pin(mapped)
            self._kept[key] = mapped
            while len(self._kept) > _KEPT_FILES:
                self._kept.popitem(last=False)
        return mapped

    def _pin(self, mapped: mmap.mmap) -> None:
        address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
        if status := self._register(address, len(mapped)):
            _log.warning(
                "versions are loaded from memory that is not pinned: CUDA error %d", status
            )
            return
        weakref.finalize(mapped, self._unregister, address).atexit = False


def _is_memory(path: Path) -> bool:
    """Return whether a file is a learner's or an agent's memory, whose size is sealed."""
    with path.open("rb") as file:
        try:
            return is_sealed(file.fileno())
        except OSError:
            return False


def _text_of(error: BaseException) -> str:
    return str(error) if isinstance(error, PublishError) else f"{type(error).__name__}: {error}"


class Twins:
    """A model and its twin: the same modules, with weights of their own."""

    def __init__(self, live: nn.Module) -> None:
        """Allocate the twin's weights, on the devices of the live ones."""
        with torch.inference_mode(mode=False):  # tensors of that mode do not count their changes
            self._make(live)

    def _make(self, live: nn.Module) -> None:
        twins: dict[int, Any] = {}  # modules and tensors by the id of the live one
        storages: dict[int, torch.UntypedStorage] = {}  # copies by the address of the live one
        modules = list(live.modules())
        for module in modules:
            _refuse_hidden_weights(module)
            twin = twins[id(module)] = object.__new__(type(module))
            twin.__dict__ = dict(vars(module))

        def of(value: Any) -> Any:  # noqa: ANN401 any attribute
            """Return what the twin has in the place of a live value."""
            if id(value) in twins:
                return twins[id(value)]
            if isinstance(value, Tensor):
                copied = torch.Tensor._make_subclass(type(value), _twin_of(value, storages))
                twins[id(value)] = copied
                vars(copied).update({name: of(inner) for name, inner in vars(value).items()})
                return copied
            owner = getattr(value, "__self__", None)
            if isinstance(value, types.MethodType) and id(owner) in twins:
                return types.MethodType(value.__func__, twins[id(owner)])
            return value

        for module in modules:
            twin, shared = twins[id(module)], module._non_persistent_buffers_set - _OF_WEIGHTS
            for name, value in vars(module).items():
                vars(twin)[name] = of(value)
            twin._modules = {name: of(child) for name, child in module._modules.items()}
            twin._parameters = {name: of(value) for name, value in module._parameters.items()}
            twin._buffers = {
                name: value if name in shared else of(value)
                for name, value in module._buffers.items()
            }
        self.twin: nn.Module = twins[id(live)]
        self._pairs = [(module, twins[id(module)]) for module in modules]
        self._untouched = {id(twin): _marks_of(twin) for _, twin in self._pairs}

    def copy(self) -> None:
        """Copy the twin's weights over the live ones, on their device.

        These are parameters, buffers, and of other tensors those that a load has changed: SGLang
        derives them of weights. What it keeps for its own use besides is left alone.

        Raises:
            PublishError: they have other names or shapes; nothing was copied.
        """
        copies: dict[int, tuple[Tensor, Tensor]] = {}
        for live, twin in self._pairs:
            before = self._untouched[id(twin)]
            derived = {name for name, mark in _marks_of(twin).items() if before.get(name) != mark}
            targets, sources = _weights_of(live, derived), _weights_of(twin, derived)
            if _shapes(targets) != _shapes(sources):
                raise PublishError(f"{type(live).__name__} has other weights in its twin")
            for name, target in targets.items():
                if sources[name] is not target:
                    copies[id(target)] = target, sources[name]
        with torch.no_grad():
            torch._foreach_copy_(
                [target for target, _ in copies.values()], [source for _, source in copies.values()]
            )


def _twin_of(live: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    """Return a copy of a tensor; what shares memory with it shares that of the copy, too."""
    storage = live.untyped_storage()
    if not (address := storage.data_ptr()):
        return live.detach().clone()
    if address not in storages:
        storages[address] = storage.clone()  # type: ignore[no-untyped-call]
    place = live.storage_offset(), live.size(), live.stride()
    return torch.empty(0, dtype=live.dtype, device=live.device).set_(storages[address], *place)


def _refuse_hidden_weights(module: nn.Module) -> None:
    """Refuse a module that keeps weights where a twin would share them.

    Raises:
        PublishError: a list or dictionary of it has a parameter.
    """
    for name, value in vars(module).items():
        inner = value.values() if isinstance(value, dict) else value
        is_hidden = isinstance(value, dict | list | tuple) and name != "_parameters"
        if is_hidden and any(isinstance(item, nn.Parameter) for item in inner):
            raise PublishError(f"{type(module).__name__}.{name} has weights")


def _marks_of(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return what changes with any write to a tensor that is no parameter or buffer."""
    own = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return {name: (value.data_ptr(), value._version) for name, value in own.items()}


def _weights_of(module: nn.Module, derived: Set[str]) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module itself, and tensors of these names."""
    found = {name: vars(module).get(name) for name in derived}
    named = found | module._parameters | module._buffers
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


class WeightShadow:
    """Loads versions next to the live weights, and copies them over these."""

    def __init__(
        self,
        live: nn.Module,
        load: Callable[[nn.Module, Weights], None],
        checksums: Callable[[nn.Module], Any],
        *,
        device: torch.device,
    ) -> None:
        """Allocate memory for a second copy of the weights.

        Args:
            live: Model that the engine generates with.
            load: Loads weights into a model as SGLang does.
            checksums: Returns SGLang's checksums of a model.
            device: Device of the weights.
        """
        self._twins = Twins(live)
        self._load, self._checksums, self._device = load, checksums, device
        is_gpu = device.type == "cuda"
        self._files = MappedFiles(pins=is_gpu)
        self._stream = torch.cuda.Stream(device) if is_gpu else None  # type: ignore[no-untyped-call]
        self._state = ShadowState()
        self._loading: Future[ShadowLoad] | None = None
        self.loaded: ShadowLoad | None = None

    def ask(self, folder: Path, version: str) -> ShadowReply:
        """Ask for a version, whose files are in a folder; ask again until it is there or failed."""
        if self._loading is not None and self._loading.done():
            error = self._loading.exception()
            self.loaded = None if error else self._loading.result()
            self._state = shadow_state.ended(self._state, _text_of(error) if error else None)
            self._loading = None
        step = shadow_state.ask(self._state, version)
        self._state = step.state
        if step.begins:
            self._loading = Future()
            run = functools.partial(self._run, self._loading, folder, version)
            threading.Thread(
                target=contextvars.copy_context().run, args=(run,), daemon=True
            ).start()
        return step

    def check(self, version: str) -> None:
        """Check that a version may be copied.

        Raises:
            PublishError: the shadow does not hold all of it.
        """
        shadow_state.check_adoptable(self._state, version)

    def forget(self) -> None:
        """Hold nothing: what was loaded is not what it should be."""
        self._state = ShadowState()

    def adopt(self, version: str) -> None:
        """Copy a version over the live weights; returns when it is done.

        Raises:
            PublishError: the shadow does not hold all of it.
        """
        self.check(version)
        self._twins.copy()
        if self._stream:
            torch.cuda.synchronize(self._device)

    def _run(self, loading: "Future[ShadowLoad]", folder: Path, version: str) -> None:
        try:
            loading.set_result(self._loaded(folder, version))
        except BaseException as error:  # noqa: BLE001 a thread: the scheduler tells it
            loading.set_exception(error)

    def _loaded(self, folder: Path, version: str) -> ShadowLoad:
        with (
            torch.no_grad(),
            torch.cuda.stream(self._stream) if self._stream else nullcontext(),
            watched(folder, version) as difference,
        ):
            if why := difference():
                raise PublishError(why)
            began_s = time.monotonic()
            self._load(self._twins.twin, self._tensors(folder))
            if self._stream:  # a family may load in threads of its own, on other streams
                torch.cuda.synchronize(self._device)
            if why := difference():
                raise PublishError(why)
            loaded_s = time.monotonic()
            checksums = self._checksums(self._twins.twin)
            return ShadowLoad(loaded_s - began_s, time.monotonic() - loaded_s, checksums)

    def _tensors(self, folder: Path) -> Weights:
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise PublishError(f"{folder} holds no weights")
        for path in paths:
            for name, tensor in self._files.tensors(path):
                if self._state.is_unwanted:
                    raise PublishError("another version is wanted")
                yield name, tensor
