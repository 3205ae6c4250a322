"""A light agent: joins groups and receives into memory that lies ready, as the relay asks it to.

It obeys the relay's commands over the relay's kind of socket, and between them orders of the
benchmark, which begin with an exclamation mark and are JSON.
"""

import datetime
import json
import time
from collections import deque

import torch
import torch.distributed as dist
import zmq
from torch.distributed import TCPStore

from benchmarks.weightbus.model import Sizes
from slipstream.weightbus.net import groups
from slipstream.wire.messages.codec import decode_command, encode
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.weightbus import CommandOutcome, LoadBucket, OpenGroup

TIMEOUT_S = 60.0
IN_FLIGHT = 2  # broadcasts of a group, as many as Collective.load has


def join_group(store: TCPStore, name: str, *, rank: int, world_size: int) -> dist.ProcessGroup:
    """Join a group beside the default one."""
    group = groups.open_group(
        "gloo", store, name=name, rank=rank, world_size=world_size, timeout_s=TIMEOUT_S
    )
    groups.pass_first_byte(group, torch.device("cpu"), timeout_s=TIMEOUT_S)
    return group


def raw_broadcasts(memory: torch.Tensor, group: dist.ProcessGroup, bucket_bytes: int) -> None:
    """Broadcast a memory from rank 0, so many bytes at a time, and nothing else."""
    moving: deque[dist.Work] = deque()
    for start in range(0, len(memory), bucket_bytes):
        if len(moving) == IN_FLIGHT:
            moving.popleft().wait()
        part = memory[start : start + bucket_bytes]
        moving.append(dist.broadcast(part, src=0, group=group, async_op=True))
    for work in moving:
        work.wait()


def receive(endpoint: str, name: str, sizes: Sizes) -> None:
    """Serve until asked to end."""
    torch.set_num_threads(1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, name.encode())
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(endpoint)
    receiver = _Receiver(sizes)
    socket.send(b"!{}")
    while True:
        frame = b"".join(socket.recv_multipart())
        if not frame.startswith(b"!"):
            socket.send(encode(receiver.obey(frame)))
            continue
        order = json.loads(frame[1:])
        if order["do"] == "end":
            break
        socket.send(b"!" + json.dumps(receiver.carry_out(order)).encode())
    context.destroy(linger=100)


class _Receiver:
    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._layout: WeightManifest = sizes.layout()
        self._memory = torch.zeros(self._layout.num_bytes, dtype=torch.uint8)
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._at = 0
        self._ended_s = 0.0

    def obey(self, frame: bytes) -> CommandOutcome:
        match command := decode_command(frame):
            case OpenGroup(group_name=name):
                self._join(command.host, command.port, name, command.rank, command.world_size)
            case LoadBucket(index=index, group_name=name):
                self._at = 0 if index == 0 else self._at
                size = self._layout.buckets[index].num_bytes
                flat = self._memory[self._at : self._at + size]
                dist.broadcast(flat, src=0, group=self._groups[name])
                self._at += size
                self._ended_s = time.monotonic()
            case _:
                raise ValueError(f"{command} is not for a light agent")
        return CommandOutcome(command_id=command.command_id)

    def carry_out(self, order: dict[str, object]) -> dict[str, float]:
        match order:
            case {"do": "join", "group": str(name), "port": int(port), "rank": int(rank)}:
                self._join("127.0.0.1", port, name, rank, int(str(order["world_size"])))
            case {"do": "layout", "bucket_bytes": int(bucket_bytes)}:
                self._layout = self._sizes.layout(bucket_bytes)
            case {"do": "raw", "group": str(name), "bucket_bytes": int(bucket_bytes)}:
                raw_broadcasts(self._memory, self._groups[name], bucket_bytes)
                self._ended_s = time.monotonic()
            case {"do": "sum"}:
                return {"sum": float(self._memory.view(torch.int64).sum().item() % 2**40)}
        return {"ended_s": self._ended_s, "cpu_s": time.process_time()}

    def _join(self, host: str, port: int, name: str, rank: int, world_size: int) -> None:
        limit = datetime.timedelta(seconds=TIMEOUT_S)
        store = TCPStore(host, port, is_master=False, timeout=limit)
        self._groups[name] = join_group(store, name, rank=rank, world_size=world_size)
