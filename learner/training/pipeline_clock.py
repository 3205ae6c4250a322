"""Share of a pipeline's time in which its stages compute, by Megatron's own timers.

Megatron starts and stops a timer around each forward and each backward pass of a microbatch
(``config.timers``). Between passes a rank waits for another stage, so

    bubble = 1 - sum over ranks of its passes / (ranks * longest span)

where a span goes from the beginning of the schedule to the end of a rank's last pass; gradients are
summed over replicas after it. With several updates in a step, both are summed over the updates.

On a CPU a mark is the time; on a GPU it is an event in the stream, which also waits for data from
other stages. Events are read once per learner step, when the host has waited for the GPU already.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from slipstream.learner.model.device import device

Mark: TypeAlias = Any  # float seconds, or torch.cuda.Event
_PASSES = ("forward-compute", "backward-compute")
_SCHEDULE = "forward-backward"


def _mark() -> Mark:
    if device().type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    event.record()
    return event


def _seconds(begin: Mark, end: Mark) -> float:
    return float(end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1000.0)


class PipelineClock:
    """Takes the place of Megatron's timers while a model is trained."""

    def __init__(self, *, mark: Callable[[], Mark] = _mark) -> None:
        """Count nothing yet; ``mark`` notes the present moment."""
        self._mark = mark
        self._begun: list[Mark] = []  # begin of each update
        self._passes: list[list[tuple[Mark, Mark]]] = []  # [begin, end] of each pass, by update
        self._pass: Mark = None

    @contextmanager
    def timing(self, config: Any) -> Iterator[None]:  # noqa: ANN401 megatron is untyped
        """Time the passes of the model with this TransformerConfig during a block."""
        config.timers = self
        try:
            yield
        finally:
            config.timers = None

    def __call__(self, name: str, log_level: int = 0) -> "_Timer":
        """Return the timer of a name, as Megatron asks for it."""
        del log_level
        return _Timer(self, name)

    def begins(self, name: str) -> None:
        """Note the begin of a span that Megatron times under a name."""
        if name == _SCHEDULE:
            self._begun.append(self._mark())
            self._passes.append([])
        elif name in _PASSES:
            self._pass = self._mark()

    def ends(self, name: str) -> None:
        """Note the end of the span."""
        if name in _PASSES:
            self._passes[-1].append((self._pass, self._mark()))

    def take(self) -> list[tuple[float, float]]:
        """Return the seconds of (all passes, the span) of each update since the last call."""
        taken = [
            (sum(_seconds(*marks) for marks in passes), _seconds(begin, passes[-1][1]))
            for begin, passes in zip(self._begun, self._passes, strict=True)
            if passes
        ]
        self._begun, self._passes = [], []
        return taken


class _Timer:
    """One of Megatron's timers."""

    def __init__(self, clock: PipelineClock, name: str) -> None:
        self._clock, self._name = clock, name

    def start(self, *, barrier: bool = False) -> None:
        """Begin; Megatron asks for no barrier."""
        del barrier
        self._clock.begins(self._name)

    def stop(self) -> None:
        """End."""
        self._clock.ends(self._name)


def bubble_share(taken: list[tuple[float, float]]) -> float | None:
    """Return the bubble's share of what each rank took, with all ranks; None without an update."""
    if not taken:
        return None
    spans = torch.tensor([span for _, span in taken], dtype=torch.float64, device=device())
    busy = torch.tensor([sum(passes for passes, _ in taken)], dtype=torch.float64, device=device())
    dist.all_reduce(spans, op=dist.ReduceOp.MAX)
    dist.all_reduce(busy)
    return 1.0 - float(busy) / (dist.get_world_size() * float(spans.sum()))
