"""Where the time of a step goes: its kernels by group, and the rest, in which none ran.

On a GPU these are kernels; on a CPU operators, without what they call.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

IDLE, OTHER = "idle", "other"
# The first pattern that a name holds decides. Products come after what is built from them; the
# update's norm of the gradient comes before norms of the model.
_PATTERNS = (
    ("logits", r"logit_"),
    ("MLP", r"swiglu|silu"),
    ("rotary", r"rotary|rope"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("products", r"gemm|gemv|nvjet|cublas|xmma|cutlass|split_?k|\b(add)?b?mm(_dtype)?\b"),
    ("update", r"adam|multi_tensor|foreach"),
    ("norms", r"norm|GammaBeta|rms"),
)
_GROUPS = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _PATTERNS)


class Interval(NamedTuple):
    """One run of a kernel, in microseconds."""

    name: str
    begin: float
    end: float


def group_of(name: str) -> str:
    """Return the group of a kernel or operator."""
    return next((group for group, pattern in _GROUPS if pattern.search(name)), OTHER)


def seconds_by_group(intervals: Iterable[Interval], step_s: float) -> dict[str, float]:
    """Return the seconds of each group and of ``idle``, which sum to those of the step.

    Time in which several ran counts for the one that began first.
    """
    seconds = dict.fromkeys((*(name for name, _ in _GROUPS), OTHER), 0.0)
    reached = -float("inf")
    for interval in sorted(intervals, key=lambda interval: interval.begin):
        alone = interval.end - max(interval.begin, reached)
        if alone > 0:
            seconds[group_of(interval.name)] += alone / 1e6
            reached = interval.end
    return {**seconds, IDLE: step_s - sum(seconds.values())}


def intervals_of(step: Callable[[], None]) -> list[Interval]:
    """Run a step, which waits for the device, and return what ran in it."""
    on_gpu = torch.cuda.is_available()
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        step()
    return [
        interval
        for event in seen.events() or ()
        if event.device_type == kind and not event.is_user_annotation
        for interval in _without_called(event)
    ]


def _without_called(event: FunctionEvent) -> Iterator[Interval]:
    """Yield the parts of an operator's time in which it calls no other."""
    begin = event.time_range.start
    for called in sorted(event.cpu_children, key=lambda child: child.time_range.start):
        yield Interval(event.name, begin, called.time_range.start)
        begin = called.time_range.end
    yield Interval(event.name, begin, event.time_range.end)
