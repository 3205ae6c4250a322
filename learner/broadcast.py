"""What ranks tell each other about control: bytes and flags, without pickle."""

import torch
import torch.distributed as dist

from learner.device import device


def broadcast_bytes(data: bytes | None, *, rank: int, world_size: int) -> bytes:
    """Return rank 0's ``data`` on every rank; the others pass None."""
    if world_size == 1:
        return data if data is not None else b""
    size = torch.tensor([len(data or b"")], dtype=torch.int64, device=device())
    dist.broadcast(size, src=0)
    if rank == 0 and data is not None:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device())
    else:
        buffer = torch.empty(int(size), dtype=torch.uint8, device=device())
    dist.broadcast(buffer, src=0)
    return buffer.cpu().numpy().tobytes()


def any_rank(flag: bool, *, world_size: int) -> bool:
    """Tell every rank whether the flag is set on at least one of them."""
    if world_size == 1:
        return flag
    total = torch.tensor([int(flag)], dtype=torch.int32, device=device())
    dist.all_reduce(total)
    return bool(total.item())
