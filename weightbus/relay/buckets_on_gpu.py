"""Buckets of a version on the relay's GPU: each is copied there once, for all groups."""

import threading

import torch
from torch import Tensor

from slipstream.weightbus.version.snapshot import WeightSnapshot

_KEPT = 4  # what groups ask for at one time is close together


class BucketsOnGpu:
    """Takes calls from several threads."""

    def __init__(self, snapshot: WeightSnapshot) -> None:
        """Copy nothing yet."""
        self._snapshot = snapshot
        self._lock = threading.Lock()
        self._buckets: dict[int, Tensor] = {}  # by number, the oldest first

    def get(self, index: int, device: torch.device) -> Tensor:
        """Return the bytes of a bucket, [num_bytes] uint8, on a device.

        The copy is asynchronous where the memory is pinned; what this device does next waits for
        it. A bucket lives as long as what was started with it needs it.
        """
        flat = self._snapshot.bucket(index)
        if device.type == "cpu":
            return flat
        with self._lock:
            if index not in self._buckets:
                while len(self._buckets) >= _KEPT:
                    del self._buckets[next(iter(self._buckets))]
                self._buckets[index] = flat.to(device, non_blocking=True)
            return self._buckets[index]

    def clear(self) -> None:
        """Let go of all copies: nobody reads this version now."""
        with self._lock:
            self._buckets.clear()
