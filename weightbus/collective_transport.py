"""Broadcast of buckets over a torch.distributed group of two: this process and one engine."""

import asyncio
import datetime
from collections.abc import Callable
from typing import Literal

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from weightbus.rendezvous import open_store
from wire.errors import PublishError

_POLL_S = 0.001


class EngineGroup:
    """A process group beside the default one. Rank 0 is here, the engine has all others."""

    def __init__(self, name: str, *, host: str, world_size: int, timeout_s: float) -> None:
        self.name = name
        self._world_size = world_size
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._store = open_store(host, world_size=world_size, timeout_s=timeout_s)
        self._group: dist.ProcessGroup | None = None

    @property
    def port(self) -> int:
        """Return the port at which the engine finds the group's store."""
        port: int = self._store.port
        return port

    def join(self, backend: Literal["gloo", "nccl"]) -> None:
        """Become rank 0; blocks until the engine has joined too, or the timeout."""
        try:
            self._group, _ = c10d._new_process_group_helper(
                self._world_size,
                0,
                [],
                c10d.Backend(backend),
                c10d.PrefixStore(self.name, self._store),
                group_name=c10d.GroupName(self.name),
                timeout=self._timeout,
            )
        except RuntimeError as error:
            raise PublishError(f"the engine did not join group {self.name}: {error}") from error
        c10d._world.pg_group_ranks[self._group] = {r: r for r in range(self._world_size)}

    async def broadcast(self, flat: Tensor, *, peer_failed: Callable[[], bool]) -> None:
        """Send ``flat`` ([num_bytes] uint8); gives up as soon as the peer reports a failure."""
        if self._group is None:
            raise PublishError(f"group {self.name} is not open")
        try:
            work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
            while not work.is_completed():
                if peer_failed():
                    raise PublishError(f"the engine of group {self.name} stopped receiving")
                await asyncio.sleep(_POLL_S)
            work.wait()
        except RuntimeError as error:
            raise PublishError(f"broadcast to group {self.name} failed: {error}") from error

    def close(self) -> None:
        """Destroy the group, which also frees a peer that waits in it."""
        if self._group is not None:
            group, self._group = self._group, None
            dist.destroy_process_group(group)
