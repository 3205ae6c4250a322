"""How long a group of three engines takes to get over one that died or was stopped."""

import signal
import time
from dataclasses import dataclass, field

from benchmarks.broker.process import work_folder
from tests.support.bus.harness import WeightBus, weight_bus

TIMEOUT_S = 2.0  # weightbus.timeout_s
_NAMES = ("g0", "g1", "g2")


@dataclass(slots=True)
class RebuildFigures:
    """Seconds from a publish until the engines that are left generate with it, by round."""

    standing: list[float] = field(default_factory=list)  # nothing happened
    died: list[float] = field(default_factory=list)  # one is dead when it begins
    stopped: list[float] = field(default_factory=list)  # one is stopped when it begins
    anew: list[float] = field(default_factory=list)  # the next one: the group is made anew


def measure_rebuild(rounds: int) -> RebuildFigures:
    """Publish a small version to one group of three again and again."""
    figures = RebuildFigures()
    with (
        work_folder() as folder,
        weight_bus(folder, engines_per_group=3, timeout_s=TIMEOUT_S) as bus,
    ):
        step = 0
        for _ in range(rounds):
            for sent, what in ((signal.SIGKILL, figures.died), (signal.SIGSTOP, figures.stopped)):
                for name in _NAMES:
                    if name not in bus.agents:
                        bus.start(name)
                _publish(bus, step, _NAMES)  # joined alone: in the group from the next on
                _publish(bus, step + 1, _NAMES)
                figures.standing.append(_publish(bus, step + 2, _NAMES))
                bus.signal("g2", sent)
                what.append(_publish(bus, step + 3, _NAMES[:2]))
                figures.anew.append(_publish(bus, step + 4, _NAMES[:2]))
                bus.end("g2")
                step += 5
        bus.check_tokens()
    return figures


def _publish(bus: WeightBus, step: int, names: tuple[str, ...]) -> float:
    began_s = time.monotonic()
    bus.publish(step)
    for name in names:
        bus.wait_for(name, step)
    return time.monotonic() - began_s
