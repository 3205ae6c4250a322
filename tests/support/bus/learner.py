"""A learner as a process that only publishes: it does as it reads from stdin."""

import argparse
import dataclasses
import os
import sys
from pathlib import Path

import torch

from slipstream.learner.batches.background import BackgroundLoop
from slipstream.learner.publish.relay_link import RelayLink
from slipstream.learner.publish.relay_process import RelayLaunch
from slipstream.weightbus.version.layout import plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.slots import NUM_SLOTS
from slipstream.weightbus.version.snapshot import tensor_spec, tensor_views
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.process.logs import start_logging
from tests.support.bus.engine import random_tensors

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
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start_logging("learner")
    sizes = {"count": arguments.count, "size": arguments.size}
    specs = [tensor_spec(*item) for item in random_tensors(seed=0, **sizes).items()]
    layout = plan_layout(specs, bucket_bytes=arguments.bucket_bytes)
    memory = SharedSlots.make(slot_bytes=layout.num_bytes, num_slots=NUM_SLOTS)
    folder = arguments.folder
    with BackgroundLoop() as loop:

        async def make() -> RelayLink:
            launch = RelayLaunch(("--config", str(folder / "run.toml")))
            if arguments.manners == "nccl":
                path = os.pathsep.join(map(str, (ROOT / "tests/support/bus/manners", ROOT)))
                environment = {**launch.environment, "PYTHONPATH": path}
                launch = dataclasses.replace(launch, environment=environment)
            return RelayLink(f"ipc://{folder}/sockets/relay.sock", launch)

        link = loop.run(make())
        loop.start(link.run())
        loop.run(link.open(memory.path, layout, epoch=arguments.epoch))
        _print("ready")
        for line in sys.stdin:
            word, _, step = line.strip().partition(" ")
            if word == "end":
                break
            version = PolicyVersion(arguments.epoch, int(step))
            slot = loop.run(link.reserve())
            views = tensor_views(layout, memory.slot(slot))
            for name, tensor in random_tensors(seed=version.step, **sizes).items():
                views[name].copy_(tensor)
                if word == "half":  # a learner that dies in the middle of a copy
                    _print("half")
                    sys.stdin.readline()
            loop.run(link.written(version, slot))
            _print(f"published {step}")
        loop.run(link.end())


if __name__ == "__main__":
    main()
