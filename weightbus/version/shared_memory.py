"""Shared memory: the learner writes versions into it and the relay reads them.

It has no name in any file system: other processes find it through the descriptor of the process
that made it. The kernel frees it when the last process that has mapped it ends, however it ends.
"""

import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from slipstream.wire.errors import PublishError

_PAGE = 2 * 1024 * 1024  # a slot starts on a large page


def register(address: int, num_bytes: int) -> int:
    """Pin memory of this process; return CUDA's status, 0 on success."""
    return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))  # type: ignore[no-untyped-call]


def unregister(address: int) -> None:
    """Unpin memory."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class SharedSlots:
    """Slots of equal size, for one version each. Pages cost memory once they are written."""

    def __init__(self, descriptor: int, *, slot_bytes: int, num_slots: int) -> None:
        self._descriptor = descriptor
        self._slot_bytes = slot_bytes
        self._stride = _stride(slot_bytes)
        self._mapped = mmap.mmap(descriptor, self._stride * num_slots)
        self._bytes = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self._pinning = threading.Lock()
        self._is_pinned = False

    @classmethod
    def make(cls, *, slot_bytes: int, num_slots: int) -> Self:
        """Allocate the memory."""
        descriptor = os.memfd_create("slipstream-weights")
        os.ftruncate(descriptor, _stride(slot_bytes) * num_slots)
        return cls(descriptor, slot_bytes=slot_bytes, num_slots=num_slots)

    @classmethod
    def open(cls, path: str, *, slot_bytes: int, num_slots: int) -> Self:
        """Map the memory of another process.

        Raises:
            PublishError: that process is gone, or its memory has another size.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise PublishError(f"cannot map the weights at {path}: {error.strerror}") from error
        size, expected = os.fstat(descriptor).st_size, _stride(slot_bytes) * num_slots
        if size != expected:
            os.close(descriptor)
            raise PublishError(f"the weights at {path} have {size} bytes, expected {expected}")
        return cls(descriptor, slot_bytes=slot_bytes, num_slots=num_slots)

    @property
    def path(self) -> str:
        """Path for other processes of this user, valid while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def is_at(self, path: str) -> bool:
        """True if a path leads to this very memory; process ids are reused."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._descriptor))  # noqa: PTH116
        except OSError:
            return False

    def slot(self, index: int) -> Tensor:
        """Return a slot. Shape [slot_bytes], uint8; shares the memory."""
        start = index * self._stride
        return self._bytes[start : start + self._slot_bytes]

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
            address = self._bytes.data_ptr()
            status = register(address, self._bytes.numel())
            if status != 0:
                raise PublishError(f"the weights' memory cannot be pinned: CUDA error {status}")
            weakref.finalize(self._mapped, unregister, address).atexit = False

    def close(self) -> None:
        """Close the descriptor; the mapping lives as long as its tensors do."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _stride(slot_bytes: int) -> int:
    return max(_PAGE, -(-slot_bytes // _PAGE) * _PAGE)
