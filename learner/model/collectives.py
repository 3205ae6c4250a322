"""Exchanges bytes and flags between ranks, without pickle."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from slipstream.learner.model.device import device
from slipstream.wire.messages.codec import Frame


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def broadcast_bytes(data: bytes | None) -> bytes:
    """Return rank 0's ``data`` on every rank; what the others pass is ignored."""
    if _num_ranks() == 1:
        return data if data is not None else b""
    size = torch.tensor([len(data or b"")], dtype=torch.int64, device=device())
    dist.broadcast(size, src=0)
    if dist.get_rank() == 0 and data is not None:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device())
    else:
        buffer = torch.empty(int(size), dtype=torch.uint8, device=device())
    dist.broadcast(buffer, src=0)
    return buffer.cpu().numpy().tobytes()


def gather_bytes(data: bytes) -> list[bytes]:
    """Return the bytes of every rank, in their order, on every rank."""
    ranks = dist.get_world_size()
    if ranks == 1:
        return [data]
    sizes = torch.zeros(ranks, dtype=torch.int64, device=device())
    sizes[dist.get_rank()] = len(data)
    dist.all_reduce(sizes)
    buffers = [torch.empty(int(size), dtype=torch.uint8, device=device()) for size in sizes]
    if data:
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device())
        buffers[dist.get_rank()] = own
    for source, buffer in enumerate(buffers):
        if buffer.numel():
            dist.broadcast(buffer, src=source)
    return [buffer.cpu().numpy().tobytes() for buffer in buffers]


def any_rank(flag: bool) -> bool:
    """Return True on every rank if the flag is set on any."""
    if _num_ranks() == 1:
        return flag
    total = torch.tensor([int(flag)], dtype=torch.int32, device=device())
    dist.all_reduce(total)
    return bool(total.item())


def total(value: float) -> float:
    """Return the sum of the ranks' values, on every rank."""
    if _num_ranks() == 1:
        return value
    values = torch.tensor([value], dtype=torch.float64, device=device())
    dist.all_reduce(values)
    return float(values.item())


def union(flags: Sequence[bool]) -> list[bool]:
    """Return the flags set on at least one rank; every rank passes equally many."""
    if _num_ranks() == 1:
        return list(flags)
    total = torch.tensor(flags, dtype=torch.int32, device=device())
    dist.all_reduce(total)
    return [bool(count) for count in total.tolist()]


def broadcast_frames(
    frames: Sequence[Frame] | None, count: int, *, group: dist.ProcessGroup, source: int
) -> list[Frame]:
    """Return the frames of rank ``source``, a global rank, on every rank of a group.

    The other ranks pass None, and all know the number of frames.
    """
    if count == 0:
        return []
    lengths = [0] * count if frames is None else [memoryview(frame).nbytes for frame in frames]
    sizes = torch.tensor(lengths, dtype=torch.int64, device=device())
    dist.broadcast(sizes, src=source, group=group)
    if frames is not None:
        data = torch.frombuffer(bytearray().join(frames), dtype=torch.uint8).to(device())
    else:
        data = torch.empty(int(sizes.sum()), dtype=torch.uint8, device=device())
    dist.broadcast(data, src=source, group=group)
    if frames is not None:
        return list(frames)
    received = data.cpu().numpy().data
    ends = list(accumulate(sizes.tolist()))
    return [received[start:end] for start, end in pairwise([0, *ends])]
