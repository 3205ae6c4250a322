"""Process groups of a relay and engines: every wait has a deadline here, whatever the backend.

gloo connects in the call that makes a group, and its work fails when a peer dies. NCCL connects in
the first collective, which may block for ever; its work may then never end; destroying a group
waits for its work; and its watchdog ends the process. Therefore a group counts as joined once one
byte has passed; calls that may block run in a thread that is left behind at the deadline; work is
polled together with the group's store, which ends with rank 0; and a group is aborted if its
backend allows that.
"""

import datetime
import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import Store

from slipstream.weightbus.net import threads
from slipstream.wire.errors import PublishError

_POLL_S = 0.001
_STORE_POLL_S = 0.1  # between polls of the store
_NOTHING = "nothing"  # a key: only the answer counts


def open_group(
    backend: str, store: Store, *, name: str, rank: int, world_size: int, timeout_s: float
) -> dist.ProcessGroup:
    """Make a group besides the default one; gloo waits for the others here, NCCL does not.

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
    broadcast(byte, group, timeout_s=timeout_s, watches_store=False)  # its ranks use it


def broadcast(
    flat: Tensor, group: dist.ProcessGroup, *, timeout_s: float, watches_store: bool = True
) -> None:
    """Send from rank 0, or receive from it: block until the bytes have passed.

    On a GPU this uses a stream of its own: work that fails there holds up nothing else.

    ``flat`` is [num_bytes] uint8. With ``watches_store`` also give up when rank 0 has left the
    group.

    Raises:
        PublishError: it failed, or did not end in time.
    """
    end_s = time.monotonic() + timeout_s
    before = torch.cuda.current_stream(flat.device) if flat.is_cuda else None

    def start_and_wait() -> None:
        if before is None:
            work = dist.broadcast(flat, src=0, group=group, async_op=True)
            _wait_for(work, group if watches_store else None, end_s=end_s)
            return
        own = torch.cuda.Stream(flat.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(own):
            own.wait_stream(before)
            work = dist.broadcast(flat, src=0, group=group, async_op=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            _wait_for(work, group if watches_store else None, end_s=end_s, arrived=event)

    try:
        threads.in_time(start_and_wait, timeout_s)
    except TimeoutError as error:
        raise PublishError(late(timeout_s)) from error
    except RuntimeError as error:
        raise PublishError(f"a broadcast of weights failed: {error}") from error


def _wait_for(
    work: dist.Work,
    group: dist.ProcessGroup | None,
    *,
    end_s: float,
    arrived: torch.cuda.Event | None = None,
) -> None:
    """Block until ``work`` is complete: on a GPU, until the bytes are there.

    ``group`` is given up when rank 0 has left it. ``arrived`` is an event to record behind the work
    and to wait for: NCCL reports failed work as complete, although its bytes are missing.

    Raises:
        TimeoutError: it is not complete by ``end_s``, monotonic seconds.
        RuntimeError: from torch: it failed, or rank 0 has left.
    """
    next_poll_s = time.monotonic() + _STORE_POLL_S
    is_ordered = False  # the event is recorded behind the work
    while True:
        if work.is_completed():
            if not is_ordered:
                is_ordered = True
                work.wait()
                if arrived is not None:
                    arrived.record()
            if arrived is None or arrived.query():  # type: ignore[no-untyped-call]
                return
        now = time.monotonic()
        if now > end_s:
            raise TimeoutError
        if group is not None and now > next_poll_s:
            next_poll_s = now + _STORE_POLL_S
            _store_of(group).check([_NOTHING])
        time.sleep(_POLL_S)


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
