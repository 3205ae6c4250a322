"""A learner's link to a real relay process, and agents as processes that only hold bytes."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.broker.process import ROOT, cpu_s, work_folder
from benchmarks.weightbus.agent import SIZES
from slipstream.learner.model.weights.shards import is_finite
from slipstream.learner.publish.relay_link import RelayLink
from slipstream.learner.publish.relay_process import RelayLaunch
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.slots import NUM_SLOTS
from slipstream.weightbus.version.snapshot import tensor_views
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.process.background import BackgroundLoop
from slipstream.wire.process.processes import bound_to_me, last_lines

_CONFIG = """
[run]
name = "bus"
dir = "{folder}/runs"
model = "{folder}"
socket_dir = "{folder}/sockets"
outage_s = 1000

[weightbus]
engine_check_every = {check_every}
"""
_LONGEST_S = 60.0


class Agent:
    """One agent process."""

    def __init__(self, folder: Path, name: str, transport: str, sizes: str) -> None:
        self._log = folder / f"{name}.txt"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.weightbus.agent", "--folder", str(folder)),
                    *("--name", name, "--transport", transport, "--sizes", sizes),
                ],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                preexec_fn=bound_to_me(),
            )

    def printed(self) -> list[dict[str, Any]]:
        lines = self._log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def joined_s(self) -> float:
        return float(next(line["at_s"] for line in self.printed() if "joins" in line))

    def adopted_s(self, step: int) -> float:
        """Wait until it runs a version; return since when."""
        deadline_s = time.monotonic() + _LONGEST_S
        while time.monotonic() < deadline_s:
            for line in self.printed():
                if line.get("step") == step:
                    return float(line["at_s"])
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        raise RuntimeError(f"an agent did not adopt step {step}:\n{last_lines(self._log, 20)}")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class LightBus:
    """The learner's side. Tensors are written as WeightWriter does, with the finite check."""

    def __init__(self, folder: Path, loop: BackgroundLoop, sizes: str) -> None:
        self.folder, self._loop, self._sizes = folder, loop, sizes
        self.layout = SIZES[sizes].layout()
        self.memory = SharedSlots.make(self.layout, num_slots=NUM_SLOTS)

        async def make() -> RelayLink:
            launch = RelayLaunch(("--config", str(folder / "run.toml")))
            return RelayLink(f"ipc://{folder}/sockets/relay.sock", launch)

        self._link = loop.run(make())
        loop.start(self._link.run())
        loop.run(self._link.open(self.memory.paths, self.layout, epoch=1))

    def relay_cpu_s(self) -> float:
        return cpu_s(int((self.folder / "sockets" / "relay.lock").read_text()))

    def until_relay(self) -> None:
        deadline_s = time.monotonic() + _LONGEST_S
        while not (self.folder / "sockets" / "weightbus.sock").exists():
            if time.monotonic() > deadline_s:
                raise TimeoutError("the relay did not start")
            time.sleep(0.05)
        time.sleep(1.5)  # until the link has seen it

    def publish(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        """Copy and hand over a version; what follows is the relay's work."""
        version = PolicyVersion(1, step)
        slot = self._loop.run(self._link.reserve())
        with self.memory.writing(slot, version) as memory:
            copy_checked(tensors, tensor_views(self.layout, memory))
        self._loop.run(self._link.written(version, slot))

    def agent(self, name: str, transport: str = "collective") -> Agent:
        return Agent(self.folder, name, transport, self._sizes)

    def end(self) -> None:
        self._loop.run(self._link.end())


def copy_checked(tensors: dict[str, torch.Tensor], views: dict[str, torch.Tensor]) -> None:
    """Copy tensors to their places, checking for NaN and inf on the way."""
    finite = []
    for name, tensor in tensors.items():
        finite.append(is_finite(tensor))
        views[name].copy_(tensor)
    if not all(torch.stack(finite).tolist()):
        raise RuntimeError("not finite")


@contextmanager
def light_bus(sizes: str, *, check_every: int = 1) -> Iterator[LightBus]:
    """Yield a learner with its relay."""
    with work_folder() as folder, BackgroundLoop() as loop:
        (folder / "run.toml").write_text(_CONFIG.format(folder=folder, check_every=check_every))
        (folder / "sockets").mkdir(mode=0o700)
        bus = LightBus(folder, loop, sizes)
        try:
            bus.until_relay()
            yield bus
        finally:
            bus.end()
