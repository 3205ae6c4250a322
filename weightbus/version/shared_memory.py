"""Shared memory: the learner writes versions into it, the relay and engines of its host read them.

It has no name in any file system: other processes find it through the descriptors of the process
that made it. The kernel frees it when the last process that has mapped it ends, however it ends.

Each slot is a safetensors file, so an engine loads from it as from any other. The header's label
says which version the slot holds whole: it is taken out before a byte of the slot changes. A reader
that finds the same label before and after has read that version, however late it came.
"""

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor

from slipstream.weightbus.version.layout import safetensors_header
from slipstream.weightbus.version.mapped_file import SEALS, write_label
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.versions import PolicyVersion

_SEALS = SEALS | fcntl.F_SEAL_SEAL


def register(address: int, num_bytes: int) -> int:
    """Pin memory of this process; return CUDA's status, 0 on success."""
    return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))  # type: ignore[no-untyped-call]


def unregister(address: int) -> None:
    """Unpin memory."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class SharedSlots:
    """Slots of one layout, for a version each. Pages cost memory once they are written."""

    def __init__(self, descriptors: Sequence[int], layout: WeightManifest) -> None:
        """Map the memory behind these descriptors, one per slot, which are closed with this."""
        self._descriptors = list(descriptors)
        self._start = len(safetensors_header(layout, label=""))
        size = self._start + layout.num_bytes
        self._mapped = [mmap.mmap(descriptor, size) for descriptor in descriptors]
        self._bytes = [torch.frombuffer(mapped, dtype=torch.uint8) for mapped in self._mapped]
        self._pinning = threading.Lock()
        self._is_pinned = False

    @classmethod
    def make(cls, layout: WeightManifest, *, num_slots: int) -> Self:
        """Allocate the memory; its size cannot change any more."""
        header = safetensors_header(layout, label="")
        descriptors = []
        for index in range(num_slots):
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            descriptor = os.memfd_create(f"slipstream-weights-{index}", flags)
            descriptors.append(descriptor)
            os.ftruncate(descriptor, len(header) + layout.num_bytes)
            os.pwrite(descriptor, header, 0)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return cls(descriptors, layout)

    @classmethod
    def open(cls, paths: Sequence[str], layout: WeightManifest) -> Self:
        """Map the memory of another process.

        Raises:
            PublishError: that process is gone, or its memory has another size, or can get one.
        """
        descriptors = list[int]()
        try:
            for path in paths:
                descriptors.append(_opened(path, layout))
        except PublishError:
            _close(descriptors)
            raise
        return cls(descriptors, layout)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the slots for other processes of this user, valid while this process lives."""
        return tuple(f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in self._descriptors)

    def is_at(self, paths: Sequence[str]) -> bool:
        """True if paths lead to this very memory; process ids are reused."""
        try:
            return len(paths) == len(self._descriptors) and all(
                os.path.samestat(os.stat(path), os.fstat(descriptor))  # noqa: PTH116
                for path, descriptor in zip(paths, self._descriptors, strict=True)
            )
        except OSError:
            return False

    def slot(self, index: int) -> Tensor:
        """Return a slot. Shape [layout.num_bytes], uint8; shares the memory."""
        return self._bytes[index][self._start :]

    def label(self, index: int, version: PolicyVersion | None) -> None:
        """Say which version a slot holds whole; None before a byte of it changes."""
        write_label(self._descriptors[index], version.label if version is not None else "")

    @contextmanager
    def writing(self, index: int, version: PolicyVersion) -> Iterator[Tensor]:
        """Return a slot to be written alone; it holds the version whole afterwards."""
        self.label(index, None)
        yield self.slot(index)
        self.label(index, version)

    def pin(
        self,
        register: Callable[[int, int], int] = register,
        unregister: Callable[[int], None] = unregister,
    ) -> None:
        """Pin all slots, so that a GPU copies from and to them at full speed. May last seconds.

        All pages cost memory from then on. They are unpinned when the mapping ends: the driver must
        not take a later mapping at that address for this one. A second call does nothing.

        Raises:
            PublishError: the driver refuses.
        """
        with self._pinning:
            if self._is_pinned:
                return
            self._is_pinned = True
            for mapped, data in zip(self._mapped, self._bytes, strict=True):
                address = data.data_ptr()
                status = register(address, data.numel())
                if status != 0:
                    raise PublishError(f"the weights' memory cannot be pinned: CUDA error {status}")
                weakref.finalize(mapped, unregister, address).atexit = False

    def close(self) -> None:
        """Close the descriptors; a mapping lives as long as its tensors do."""
        _close(self._descriptors)
        self._descriptors = []


def _opened(path: str, layout: WeightManifest) -> int:
    expected = len(safetensors_header(layout, label="")) + layout.num_bytes
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        size, seals = os.fstat(descriptor).st_size, fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        if descriptor >= 0:  # no memory, but another file
            os.close(descriptor)
        raise PublishError(f"cannot map the weights at {path}: {error.strerror}") from error
    if size == expected and seals & _SEALS == _SEALS:
        return descriptor
    os.close(descriptor)
    what = f"have {size} bytes, expected {expected}" if size != expected else "can change in size"
    raise PublishError(f"the weights at {path} {what}")


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
