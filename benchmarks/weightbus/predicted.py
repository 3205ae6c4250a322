"""The parts of a publish, each done in the plainest way, and what the plan's law makes of them."""

import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import xxhash
import zmq
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.weightbus.light_bus import copy_checked
from benchmarks.weightbus.model import BUCKET_BYTES
from slipstream.deploy.predict.laws.publish_cost import Rates, Setup, cost_of
from slipstream.wire.process.processes import spare_cores

COPY, HASH, SEND, LOAD = "copy and check", "xxh3", "socket", "mapped file to tensors"


class Parts:
    """Work on the tensors of a version. Each way returns once it is done."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._targets = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        self._folder = tempfile.TemporaryDirectory(prefix="bw-", dir="/dev/shm")
        self._file = Path(self._folder.name) / "model.safetensors"
        save_file(self._tensors, self._file)
        data = memoryview(self._file.read_bytes())
        self._buckets = [data[at : at + BUCKET_BYTES] for at in range(0, len(data), BUCKET_BYTES)]
        self._memory = os.memfd_create("bench")
        self._context = zmq.Context()
        self._sender, self._receiver = map(self._context.socket, (zmq.PUSH, zmq.PULL))
        self._sender.bind(f"ipc://{self._folder.name}/socket")
        self._receiver.connect(f"ipc://{self._folder.name}/socket")
        self.ways: dict[str, Callable[[], None]] = {
            COPY: lambda: copy_checked(self._tensors, self._targets),
            HASH: self._hash,
            SEND: self._send,
            LOAD: self._load,
        }

    def close(self) -> None:
        self._context.destroy()
        os.close(self._memory)
        self._folder.cleanup()

    def _hash(self) -> None:
        for tensor in self._tensors.values():
            xxhash.xxh3_128_hexdigest(tensor.view(-1).view(torch.uint8).numpy().data)

    def _load(self) -> None:
        with safe_open(self._file, "pt") as file:
            for name, target in self._targets.items():
                target.copy_(file.get_tensor(name))

    def _send(self) -> None:
        """Send the file over one Unix socket, into memory that is hashed as it comes."""
        sending = threading.Thread(target=self._send_all)
        sending.start()
        at = 0
        for _ in self._buckets:
            received = self._receiver.recv(copy=False).buffer
            xxhash.xxh3_128_hexdigest(received)
            at += os.pwrite(self._memory, received, at)
        sending.join()

    def _send_all(self) -> None:
        for bucket in self._buckets:
            self._sender.send(bucket, copy=False)


def timed(way: Callable[[], None]) -> float:
    began_s = time.monotonic()
    way()
    return time.monotonic() - began_s


def predicted_s(num_bytes: int, part_s: Mapping[str, float], *, is_mapped: bool) -> float:
    """Return the seconds until an engine runs a version, from those of the parts."""
    rates = Rates(
        wire=math.inf if is_mapped else num_bytes / part_s[SEND],
        digest=num_bytes / part_s[HASH],
        encode=math.inf,
        expect=num_bytes / part_s[HASH],
        load=num_bytes / part_s[LOAD],
        check=num_bytes / part_s[HASH],
        copy=num_bytes / part_s[LOAD],
    )
    setup = Setup(
        version_bytes=num_bytes,
        nic_bytes_s=math.inf,
        gpus=1,
        pcie_bytes_s=num_bytes / part_s[COPY],
        connections=1,
        digest_threads=spare_cores(least=2, most=16),
        has_shadow=True,
        rates=rates,
    )
    return cost_of(setup).total_s
