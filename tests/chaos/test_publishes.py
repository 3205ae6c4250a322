"""Publishes over every transport while relay, learner and engines die or stop: `make chaos`."""

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from slipstream.wire.messages.versions import PolicyVersion
from tests.support.bus.harness import WeightBus, weight_bus
from tests.support.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.chaos]
ENGINES = tuple(
    (f"{transport}-{number}", transport)
    for transport in ("collective", "tcp", "mapped", "disk")
    for number in (1, 2)
)
GIVEN_UP_S = 3.0  # a command or a load that lasts longer
STOPPED_S = 1.5 * GIVEN_UP_S  # an engine that continues after it was given up
EVERY = 5  # publishes between two disturbances
PACE = ("--token-s", "0.02")
SHADOWED = "2"  # engines of this number load next to their live weights


class Disturbance:
    """Kills and stops, drawn at random."""

    def __init__(self, bus: WeightBus, draw: random.Random) -> None:
        self.done: Counter[str] = Counter()
        self._bus = bus
        self._draw = draw
        self._stopped: dict[str, float] = {}  # engine -> when it continues, monotonic

    def strike(self) -> None:
        """Do one thing, and start again what has died."""
        ways: list[Callable[[], None]] = [self._relay, self._learner, *4 * [self._engine]]
        self._draw.choice([*ways, *3 * [self._stop]])()

    def repair(self, *, everything: bool = False) -> list[str]:
        """Continue and start again whatever is due; return the names of the engines that run."""
        for name, until_s in list(self._stopped.items()):
            if everything or time.monotonic() > until_s:
                del self._stopped[name]
                self._bus.signal(name, signal.SIGCONT)
        for name, transport in ENGINES:
            if name not in self._stopped and self._bus.agents[name].poll() is not None:
                self.done["restart"] += 1
                start(self._bus, name, transport)
        return [name for name, _ in ENGINES if name not in self._stopped]

    def _relay(self) -> None:
        if self._bus.relay_lives():
            self.done["kill relay"] += 1
            self._bus.kill_relay()

    def _learner(self) -> None:
        """Kill the learner while it writes a version, which is never whole."""
        self.done["kill learner"] += 1
        self._bus.publish_half(10**6)
        self._bus.kill_learner()
        self._bus.start_learner()

    def _engine(self) -> None:
        name = self._draw.choice([name for name, _ in ENGINES])
        self.done[f"kill {name[:-2]}"] += 1
        self._stopped.pop(name, None)
        self._bus.signal(name, signal.SIGKILL)
        self._bus.agents[name].wait()

    def _stop(self) -> None:
        name = self._draw.choice([name for name, _ in ENGINES])
        if name not in self._stopped:
            self.done[f"stop {name[:-2]}"] += 1
            self._stopped[name] = time.monotonic() + self._draw.random() * 2 * STOPPED_S
            self._bus.signal(name, signal.SIGSTOP)


def test_no_token_of_a_thousand_publishes_has_a_wrong_label(folder: Path):
    run(folder, publishes=1_000, seed=51)


def run(folder: Path, *, publishes: int, seed: int) -> None:
    """Publish so often with a disturbance after every few; check every token."""
    draw = random.Random(seed)
    deadlines = {"timeout_s": GIVEN_UP_S, "receive_timeout_s": GIVEN_UP_S}
    with weight_bus(folder, **deadlines) as bus:
        for name, transport in ENGINES:
            start(bus, name, transport)
        disturbance = Disturbance(bus, draw)
        for step in range(publishes):
            bus.publish(step)
            running = disturbance.repair()
            if step % EVERY == 0:
                disturbance.strike()
            elif running and draw.random() < 0.5:
                wait_for_any(bus, draw.sample(running, min(2, len(running))), step)
        bus.publish(publishes)
        until(
            lambda: (
                bool(disturbance.repair(everything=True))
                and all(newest(bus, name).step == publishes for name, _ in ENGINES)
            )
        )
        count = bus.check_tokens()
        ran = {name: len(set(bus.labels(name))) for name, _ in ENGINES}
        print(f"\n{count} tokens; {dict(disturbance.done)}; versions {ran}")  # noqa: T201
        for name, _ in ENGINES:
            versions = [version_of(label) for label in bus.labels(name)]
            assert all(older < newer for older, newer in pairwise(versions)), name
            assert ran[name] > publishes / 20, f"{name} was hardly there"


def start(bus: WeightBus, name: str, transport: str) -> None:
    bus.start(name, transport, *PACE, *(("--shadow",) if name.endswith(SHADOWED) else ()))


def wait_for_any(bus: WeightBus, names: list[str], step: int) -> None:
    """Wait until one of these engines runs a version, or for the deadline of a command."""
    deadline_s = time.monotonic() + GIVEN_UP_S
    while time.monotonic() < deadline_s:
        if any(newest(bus, name).step >= step for name in names):
            return
        time.sleep(0.01)


def newest(bus: WeightBus, name: str) -> PolicyVersion:
    return version_of(bus.newest_label(name) or "v0.0")


def version_of(label: str) -> PolicyVersion:
    epoch, _, step = label.removeprefix("v").partition(".")
    return PolicyVersion(int(epoch), int(step))
