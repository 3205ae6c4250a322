"""Copies of a rank's tensors in host memory, to write a checkpoint from during training."""

import logging
import mmap
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.weightbus.version.shared_memory import register, unregister

_log = logging.getLogger(__name__)
_ALIGNMENT = 64  # bytes: enough for any element; a cache line


class TensorStaging:
    """One piece of memory for all copies of a checkpoint, used again for the next checkpoint.

    Each copy has a storage of its own: torch writes whole storages.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self.num_bytes = 0  # host memory held

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies with the same values, contiguous, on the host.

        Copies returned before must not be in use any more. A GPU copies into pinned memory; its
        copies are complete when this returns.

        Raises:
            OSError: there is not that much memory.
        """
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        memory = self._allocated(sum(sizes), pinned=on_gpu)
        copies: list[Tensor] = []
        offset = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            copy = torch.empty(0, dtype=tensor.dtype)
            if tensor.numel():
                copy = torch.frombuffer(
                    memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset
                )
            copy = copy.view(tensor.shape)
            copy.copy_(tensor.detach(), non_blocking=True)
            copies.append(copy)
            offset += size
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies

    def _allocated(self, num_bytes: int, *, pinned: bool) -> mmap.mmap:
        wanted = max(num_bytes, mmap.PAGESIZE)
        if self._memory is not None and len(self._memory) == wanted:
            return self._memory
        self._memory, self.num_bytes = None, 0  # freed first: never two at a time
        memory = mmap.mmap(-1, wanted, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if pinned:
            address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            status = register(address, wanted)
            if status == 0:
                weakref.finalize(memory, unregister, address).atexit = False
            else:
                _log.warning(
                    "checkpoints are copied through unpinned memory: CUDA error %d", status
                )
        self._memory, self.num_bytes = memory, wanted
        return memory
