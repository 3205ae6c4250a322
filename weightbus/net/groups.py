"""Process groups of a relay and engines: every wait has a deadline here, whatever the backend.

gloo connects in the call that makes a group, and its work fails when a peer dies. NCCL connects in
the first collective, its work may then never end, to destroy a group waits for its work, and its
watchdog ends the process. So a group counts as joined when one byte has passed, work is polled
together with the group's store, which ends with rank 0, and a group is aborted where its backend
can be.
"""

import datetime
import time

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import Store

from slipstream.wire.errors import PublishError

_POLL_S = 0.001
_STORE_POLL_S = 0.1  # between polls of the store
_NOTHING = "nothing"  # a key: only the answer counts


def open_group(
    backend: str, store: Store, *, name: str, rank: int, world_size: int, timeout_s: float
) -> dist.ProcessGroup:
    """Make a group beside the default one; gloo waits for the others here, NCCL does not.

    Raises:
        RuntimeError: from torch, when others did not come in time.
    """
    group: dist.ProcessGroup
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    c10d._world.pg_group_ranks[group] = {r: r for r in range(world_size)}
    return group


def pass_first_byte(group: dist.ProcessGroup, device: torch.device, *, timeout_s: float) -> None:
    """Broadcast one byte from rank 0, which connects all; every rank calls this. Blocks.

    Raises:
        PublishError: it did not arrive in time.
    """
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    try:
        work = dist.broadcast(byte, src=0, group=group, async_op=True)
    except RuntimeError as error:
        raise PublishError(f"the ranks of a weight group do not connect: {error}") from error
    wait_for(work, timeout_s=timeout_s, arrived=event_on(device))


def event_on(device: torch.device) -> torch.cuda.Event | None:
    """Return an event for ``wait_for``; a CPU needs none."""
    if device.type != "cuda":
        return None
    return torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def wait_for(
    work: dist.Work,
    *,
    timeout_s: float,
    group: dist.ProcessGroup | None = None,
    arrived: torch.cuda.Event | None = None,
) -> None:
    """Block until ``work`` is complete: on a GPU, until the bytes are there.

    Args:
        work: of a broadcast.
        timeout_s: that it may take.
        group: give up too when rank 0 has left this group; None while its ranks connect, which use
            its store.
        arrived: on a GPU, an event to be recorded behind it and waited for: NCCL calls work
            complete that has failed, and its bytes are not there.

    Raises:
        PublishError: it failed, or did not end in time.
    """
    now = time.monotonic()
    end_s, next_poll_s = now + timeout_s, now + _STORE_POLL_S
    try:
        while not work.is_completed():
            now = time.monotonic()
            if now > end_s:
                raise PublishError(late(timeout_s))
            if group is not None and now > next_poll_s:
                next_poll_s = now + _STORE_POLL_S
                _store_of(group).check([_NOTHING])
            time.sleep(_POLL_S)
        work.wait()
        if arrived is not None:
            arrived.record()
            while not arrived.query():  # type: ignore[no-untyped-call]
                if time.monotonic() > end_s:
                    raise PublishError(late(timeout_s))
                time.sleep(_POLL_S)
    except RuntimeError as error:
        raise PublishError(f"a broadcast of weights failed: {error}") from error


def _store_of(group: dist.ProcessGroup) -> Store:
    """Return the store through which a group was made; its server is a process that may end."""
    store: Store = c10d._world.pg_map[group][1]
    return store


def late(timeout_s: float) -> str:
    """Return the error for a broadcast that does not end."""
    return f"a broadcast of weights did not end in {timeout_s:g} s (weightbus.timeout_s)"


def release(group: dist.ProcessGroup) -> None:
    """Leave a group, which frees peers that wait in it. May block; never waits for work of NCCL."""
    if dist.get_backend(group) == dist.Backend.GLOO:
        dist.destroy_process_group(group)  # closes its connections
    else:
        c10d._abort_process_group(group)
