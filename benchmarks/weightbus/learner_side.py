"""What publishing costs the learner: its stall, and the CPU time of its steps."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from benchmarks.broker.process import Driver, drivers
from benchmarks.weightbus.agent import SIZES
from benchmarks.weightbus.figures import growth
from benchmarks.weightbus.light_bus import copy_checked, light_bus
from benchmarks.weightbus.model import random_tensors, written_slots
from slipstream.weightbus.version.snapshot import tensor_views

_WIDTH = 1024
_LONGEST_S = 400.0
_MEMCPY, _CHECKED = "one memcpy", "with the check for NaN and inf"


@dataclass(slots=True)
class StallFigures:
    """Seconds and CPU seconds of a round, by what was done."""

    num_bytes: int
    rounds: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def median(self, what: str) -> tuple[float, float]:
        seconds, cpu = zip(*self.rounds[what], strict=True)
        return statistics.median(seconds), statistics.median(cpu)

    @property
    def stall(self) -> float:
        """Seconds of what a learner does, over those of one memcpy of as many bytes."""
        return self.median(_CHECKED)[0] / self.median(_MEMCPY)[0]


def measure_stall(sizes: str, rounds: int) -> StallFigures:
    """Write a version into a slot, with and without checking for NaN, and copy the same bytes."""
    model = SIZES[sizes]
    layout = model.layout()
    memory = written_slots(model)
    tensors = random_tensors(model.specs())
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    slots = [memory.slot(index) for index in range(3)]
    views = [tensor_views(layout, slot) for slot in slots]

    def plain_views(at: int) -> None:
        for name, tensor in tensors.items():
            views[at][name].copy_(tensor)

    ways: dict[str, Callable[[int], object]] = {
        _MEMCPY: lambda at: slots[at].copy_(flat),
        "tensor by tensor": plain_views,
        _CHECKED: lambda at: copy_checked(tensors, views[at]),
    }
    figures = StallFigures(layout.num_bytes)
    for number in range(-1, rounds):
        for name, way in ways.items():
            began_s, began_cpu_s = time.monotonic(), time.process_time()
            way(number % 3)
            spent = (time.monotonic() - began_s, time.process_time() - began_cpu_s)
            if number >= 0:
                figures.rounds.setdefault(name, []).append(spent)
    memory.close()
    return figures


@dataclass(frozen=True, slots=True)
class StepFigures:
    """CPU seconds of learner steps, without and with a publish, and of the relay per publish."""

    without: list[float]
    with_publish: list[float]
    relay: float

    @property
    def growth(self) -> float:
        """By which part a step costs more, what the relay spends beside it included."""
        published = statistics.median(self.with_publish) + self.relay
        return growth(published, statistics.median(self.without))

    @property
    def growth_of_learner(self) -> float:
        """The same of the learner's process alone."""
        return growth(statistics.median(self.with_publish), statistics.median(self.without))


def measure_steps(sizes: str, *, steps: int, step_cpu_s: float) -> StepFigures:
    """Train synthetic steps in a process of its own, every second one published."""
    with drivers(Driver(_learner, sizes, steps, step_cpu_s)) as (learner,):
        without, with_publish, relay = learner.result(_LONGEST_S)
    return StepFigures(without, with_publish, relay)


def _learner(sizes: str, steps: int, step_cpu_s: float) -> tuple[list[float], list[float], float]:
    torch.set_num_threads(1)
    tensors = random_tensors(SIZES[sizes].specs())
    products = _calibrated(step_cpu_s)
    without: list[float] = []
    published: list[float] = []
    with light_bus(sizes) as bus:
        agent = bus.agent("receiver")
        try:
            bus.publish(0, tensors)
            agent.adopted_s(0)
            bus.publish(1, tensors)  # this one makes the group
            agent.adopted_s(1)
            relay_before_s = bus.relay_cpu_s()
            for number in range(steps):
                without.append(_step(products, lambda: None))
                step = number + 2
                published.append(_step(products, lambda: bus.publish(step, tensors)))  # noqa: B023
                agent.adopted_s(step)  # so that the next step without pays nothing of it
            relay = (bus.relay_cpu_s() - relay_before_s) / steps
        finally:
            agent.end()
    return without, published, relay


def _calibrated(step_cpu_s: float) -> int:
    _train(2)
    began_s = time.process_time()
    _train(8)
    return max(1, round(8 * step_cpu_s / (time.process_time() - began_s)))


def _train(products: int) -> None:
    matrix = torch.full((_WIDTH, _WIDTH), 0.5)
    for _ in range(products):
        matrix = (matrix @ matrix).clamp_(-1, 1)


def _step(products: int, publish: Callable[[], None]) -> float:
    """Publish, then train beside the relay's transfer; return the CPU seconds of this process."""
    began_s = time.process_time()
    publish()
    _train(products)
    return time.process_time() - began_s
