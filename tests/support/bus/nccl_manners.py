"""A group over gloo with the manners of NCCL, to show that nothing relies on those of gloo.

To make it returns at once, and the ranks connect in their first broadcast, which blocks until all
have come, however long that takes. Work that fails never ends: it is an error in the next call, if
at all. To destroy the group waits for its work; only to abort it does not. ``install`` puts it in
the place of gloo in this process.
"""

import datetime
import functools
import queue
import sys
import threading
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from slipstream.weightbus.net import groups
from tests.support.waiting import NEVER_S

NAME = "nccl_manners"
MARK = "weight groups of this process have the manners of NCCL"
OfTorch: TypeAlias = Any  # its stubs do not name them


class Work(dist.Work):
    """Done if its bytes have arrived; never, if they could not."""

    def __init__(self) -> None:
        super().__init__()
        self.is_done = threading.Event()

    def is_completed(self) -> bool:
        return self.is_done.is_set()

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        del timeout  # NCCL's makes a stream wait, not its caller
        return True


class NcclManners(dist.ProcessGroup):
    """Connects in its first broadcast, and hands them to a thread."""

    def __init__(
        self, store: OfTorch, rank: int, world_size: int, timeout: datetime.timedelta
    ) -> None:
        super().__init__(rank, world_size)
        del timeout  # which NCCL does not know while it connects
        self._connect = functools.partial(
            dist.ProcessGroupGloo,
            store,
            rank,
            world_size,
            timeout=datetime.timedelta(seconds=NEVER_S),
        )
        self._queue: queue.SimpleQueue[tuple[list[Tensor], Any, Work] | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self.name = ""
        self._inner: Any = None
        self._has_failed = False
        self._connecting = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def group_name(self) -> str:
        return self.name  # torch names its own groups elsewhere

    def getBackendName(self) -> str:  # noqa: N802 torch's name
        return NAME

    def broadcast(self, tensors: list[Tensor], opts: OfTorch) -> Work:
        if self._has_failed:
            raise RuntimeError("NCCL communicator was aborted or has failed before")
        with self._connecting:
            if self._inner is None:
                self._inner = self._connect()
        work = Work()
        self._queue.put((tensors, opts, work))
        return work

    def abort(self) -> None:
        """Free the peers, and this process, whatever is under way."""
        self._has_failed = True
        self._queue.put(None)
        if self._inner is not None:
            self._inner.abort()
        self._ended.set()

    def destroy(self) -> None:
        """Wait for all work, as torch does before it destroys such a group."""
        self._queue.put(None)
        self._ended.wait()

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                tensors, opts, work = item
                self._inner.broadcast(tensors, opts).wait()
                work.is_done.set()
            self._ended.set()
        except RuntimeError:  # it is not noticed before the next call
            self._has_failed = True


def install() -> None:
    """Make weight groups over gloo have these manners, in this process."""

    def create(
        store: OfTorch, rank: int, world_size: int, timeout: datetime.timedelta
    ) -> NcclManners:
        return NcclManners(store, rank, world_size, timeout)

    dist.Backend.register_backend(NAME, create, devices=["cpu"])
    opened, destroyed = groups.open_group, dist.destroy_process_group

    def open_group(backend: str, *arguments: OfTorch, **named: OfTorch) -> dist.ProcessGroup:
        assert backend == "gloo"
        group = opened(NAME, *arguments, **named)
        group.name = named["name"]
        return group

    def destroy_process_group(group: OfTorch = None) -> None:
        if isinstance(group, NcclManners):
            group.destroy()
        destroyed(group)

    sys.stderr.write(f"{MARK}\n")
    groups.open_group = open_group
    dist.destroy_process_group = c10d.destroy_process_group = destroy_process_group
