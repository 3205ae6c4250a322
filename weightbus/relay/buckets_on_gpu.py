"""Buckets of a version on the relay's GPU: each is copied there once, for all groups."""

import logging
import threading

import torch
from torch import Tensor

from slipstream.weightbus.version.shared_memory import pin
from slipstream.weightbus.version.snapshot import WeightSnapshot
from slipstream.wire.errors import PublishError

_log = logging.getLogger(__name__)
_KEPT = 4  # groups request close buckets at one time
_pinned: set[int] = set()  # addresses of slots that this process has pinned, or could not


class BucketsOnGpu:
    """Takes calls from several threads."""

    def __init__(self, snapshot: WeightSnapshot) -> None:
        """Copy nothing yet."""
        self._snapshot = snapshot
        self._lock = threading.Lock()
        self._buckets: dict[int, Tensor] = {}  # by number, the oldest first

    def get(self, index: int, device: torch.device) -> Tensor:
        """Return the bytes of a bucket, [num_bytes] uint8, on a device.

        The copy is asynchronous, from pinned memory; later work on this device waits for it. A
        bucket lives as long as work started with it needs it.
        """
        flat = self._snapshot.bucket(index)
        if device.type == "cpu":
            return flat
        with self._lock:
            if index not in self._buckets:
                self._pin()
                while len(self._buckets) >= _KEPT:
                    del self._buckets[next(iter(self._buckets))]
                self._buckets[index] = flat.to(device, non_blocking=True)
            return self._buckets[index]

    def _pin(self) -> None:
        slot = self._snapshot.memory
        if slot.data_ptr() in _pinned:
            return
        _pinned.add(slot.data_ptr())
        try:
            pin(slot)
        except PublishError as error:
            _log.warning("%s: copies to the GPU are slow", error)
