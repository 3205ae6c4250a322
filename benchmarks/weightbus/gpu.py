"""What only a GPU shows: the learner's copy out of device memory. Skipped without one."""

import statistics
import time
from dataclasses import dataclass

import torch

from benchmarks.weightbus.model import Sizes, random_tensors, written_slots
from slipstream.weightbus.version.snapshot import tensor_views


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """Seconds of one copy of all tensors from the device."""

    num_bytes: int
    into_slot_s: float  # the shared memory, as WeightWriter does
    into_pinned_s: float  # one tensor's worth of memory that the device writes by itself


def measure_gpu(sizes: Sizes, *, rounds: int) -> GpuFigures | None:
    """Copy from the device into a slot and into pinned memory; None without CUDA."""
    if not torch.cuda.is_available():
        return None
    layout = sizes.layout()
    memory = written_slots(sizes, slots=1)
    tensors = {name: one.cuda() for name, one in random_tensors(sizes.specs()).items()}
    pinned = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=True)
    seconds: list[list[float]] = [[], []]
    for number in range(-1, rounds):
        for spent, flat in zip(seconds, (memory.slot(0), pinned), strict=True):
            views = tensor_views(layout, flat)
            torch.cuda.synchronize()
            began_s = time.monotonic()
            for name, view in views.items():
                view.copy_(tensors[name], non_blocking=flat is pinned)
            torch.cuda.synchronize()
            if number >= 0:
                spent.append(time.monotonic() - began_s)
    memory.close()
    return GpuFigures(layout.num_bytes, *map(statistics.median, seconds))
