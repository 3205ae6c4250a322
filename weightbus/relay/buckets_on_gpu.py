"""Buckets of a version on the relay's GPU: each is copied there once, for all groups."""

import threading

import torch
from torch import Tensor

from slipstream.weightbus.version.snapshot import WeightSnapshot

_KEPT = 4  # groups request neighboring buckets at a time


class BucketsOnGpu:
    """Takes calls from several threads."""

    def __init__(self, snapshot: WeightSnapshot) -> None:
        """Copy nothing yet."""
        self._snapshot = snapshot
        self._lock = threading.Lock()
        self._buckets: dict[int, Tensor] = {}  # buckets by number, the oldest first

    def get(self, index: int, device: torch.device) -> Tensor:
        """Return the bytes of a bucket, [num_bytes] uint8, on a device.

        The copy is asynchronous if the memory is pinned; later work on this device waits for it. A
        bucket lives until the work that was started with it ends.
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
        """Drop all copies: this version has no readers now."""
        with self._lock:
            self._buckets.clear()
