"""Messages between ranks over gloo with the manners of NCCL.

gloo takes a message although nobody waits for it. With NCCL a pair of ranks has a communicator in
each group: its messages pass one after the other, in the order of the calls and in both directions
together, and each ends when its receiver has come to it. No call blocks the host. A message that
fails is not noticed before the next call; to wait for it says nothing.
"""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_DATA, _TAKEN = 1, 2  # tags


class _Work:
    def __init__(self) -> None:
        self.is_over = threading.Event()

    def wait(self) -> bool:
        """Wait as the operators do that follow on the same stream; never say that it failed."""
        return self.is_over.wait()


class _Pair:
    """A communicator of this rank and another one."""

    def __init__(self) -> None:
        self.has_failed = False
        self._calls = queue.SimpleQueue[tuple[Callable[[], None], _Work]]()
        threading.Thread(target=self._run, daemon=True).start()

    def call(self, message: Callable[[], None]) -> _Work:
        if self.has_failed:
            raise RuntimeError("NCCL communicator was aborted or has failed before")
        work = _Work()
        self._calls.put((message, work))
        return work

    def _run(self) -> None:
        while True:
            message, work = self._calls.get()
            try:
                if not self.has_failed:
                    message()
            except RuntimeError:
                self.has_failed = True
            work.is_over.set()


def install() -> None:
    """Put such messages in the place of torch's in this process."""
    send, receive = dist.isend, dist.irecv
    pairs = defaultdict[tuple[str, int], _Pair](_Pair)

    def pair_of(group: dist.ProcessGroup, peer: int) -> _Pair:
        return pairs[group.group_name, peer]

    def isend(tensor: Tensor, dst: int, group: dist.ProcessGroup) -> Any:  # noqa: ANN401
        def message() -> None:
            send(tensor.detach(), dst, group=group, tag=_DATA).wait()
            receive(torch.empty(1), dst, group=group, tag=_TAKEN).wait()

        return pair_of(group, dst).call(message)

    def irecv(tensor: Tensor, src: int, group: dist.ProcessGroup) -> Any:  # noqa: ANN401
        def message() -> None:
            receive(tensor.detach(), src, group=group, tag=_DATA).wait()
            send(torch.empty(1), src, group=group, tag=_TAKEN).wait()

        return pair_of(group, src).call(message)

    dist.isend, dist.irecv = isend, irecv
