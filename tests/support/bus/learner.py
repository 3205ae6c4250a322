"""A learner as a process that only publishes: it does as it reads from stdin."""

import argparse
import dataclasses
import faulthandler
import os
import signal
import sys
from pathlib import Path

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in torch's stubs

from slipstream.learner.publish.head_door import HeadDoor
from slipstream.learner.publish.part_link import PartLink
from slipstream.learner.publish.relay_link import RelayLink
from slipstream.learner.publish.relay_process import RelayLaunch
from slipstream.weightbus.version.layout import part_layout, plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.slots import NUM_SLOTS
from slipstream.weightbus.version.snapshot import tensor_views
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.models.model_digests import short_digest
from slipstream.wire.process.background import BackgroundLoop
from slipstream.wire.process.logs import start_logging
from slipstream.wire.settings.sections import RunSection
from tests.support.bus.engine import random_tensors
from tests.support.bus.snapshots import tensor_spec

ROOT = Path(__file__).parents[3]


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--epoch", type=int, default=1)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--bucket-bytes", type=int, default=2 * 4096 * 4)
    parser.add_argument("--manners", default="gloo")
    parser.add_argument("--parts", type=int, default=1, help="hosts, each with a relay")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    start_logging("learner")
    sizes = {"count": arguments.count, "size": arguments.size}
    sizes_of = random_tensors(seed=0, **sizes)
    specs = [tensor_spec(*item) for item in sizes_of.items()]
    part_of = {name: number % arguments.parts for number, name in enumerate(sizes_of)}
    layout = plan_layout(specs, bucket_bytes=arguments.bucket_bytes, part_of=part_of)
    layouts = [part_layout(layout, part) for part in range(arguments.parts)]
    memories = [SharedSlots.make(one, num_slots=NUM_SLOTS) for one in layouts]
    folder, epoch, door = arguments.folder, arguments.epoch, HeadDoor(HashStore())
    launch = launch_of(arguments)
    run = RunSection(socket_dir=str(folder / "sockets"))
    with BackgroundLoop() as loop:
        parts = [
            PartLink(loop, run, dataclasses.replace(launch, part=number), door)
            for number in range(1, arguments.parts)
        ]

        async def make() -> RelayLink:
            on_door = door.post if parts else None
            return RelayLink(f"ipc://{folder}/sockets/relay.sock", launch, on_door=on_door)

        link = loop.run(make())
        loop.start(link.run())
        for part, memory in zip(parts, memories[1:], strict=True):
            part.open(memory.paths, layout, epoch=epoch, run_id="")
        keys = [part.public for part in parts]
        loop.run(link.open(memories[0].paths, layout, epoch=epoch, part_keys=keys))
        _print("ready")
        for line in sys.stdin:
            word, _, step = line.strip().partition(" ")
            if word == "end":
                break
            version = PolicyVersion(epoch, int(step))
            slot = loop.run(link.reserve())
            for part in parts:
                part.writing(slot)
            with memories[0].writing(slot, version):
                views = {
                    name: view
                    for one, memory in zip(layouts, memories, strict=True)
                    for name, view in tensor_views(one, memory.slot(slot)).items()
                }
                tensors = random_tensors(seed=version.step, **sizes)
                for number, (name, tensor) in enumerate(tensors.items(), 1):
                    views[name].copy_(tensor)
                    if word == "half" and number == len(memories):  # each host has written some
                        _print("half")
                        sys.stdin.readline()
            for part in parts:
                part.written(version, slot)
            loop.run(link.written(version, slot))
            _print(f"published {step}")
        loop.run(link.end())
        for part in parts:
            part.end()


def launch_of(arguments: argparse.Namespace) -> RelayLaunch:
    """Return how relays are started: with the manners and faults that a test wants."""
    settings = ["--config", str(arguments.folder / "run.toml")]
    if arguments.parts > 1:
        settings.append("weightbus.listen=tcp://127.0.0.1:0")
    digest = short_digest((arguments.folder / "run.toml").read_bytes())
    launch = RelayLaunch(settings, parts=arguments.parts, digest=digest)
    added = "manners" if arguments.manners == "nccl" else "faults" if arguments.parts > 1 else ""
    if not added:
        return launch
    path = os.pathsep.join(map(str, (ROOT / "tests/support/bus" / added, ROOT)))
    environment = {**launch.environment, "PYTHONPATH": path, "RELAY_FAULTS": str(arguments.folder)}
    return dataclasses.replace(launch, environment=environment)


if __name__ == "__main__":
    main()
