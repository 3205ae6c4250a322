"""A generator's agent as a process, beside an engine of plain tensors that can be made to fail."""

import argparse
import asyncio
import json
import logging
import os
import secrets
import signal
from pathlib import Path

import torch

from slipstream.weightbus.agent import updates
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.subscriber import Subscriber
from slipstream.weightbus.agent.tensor_set import TensorSet
from slipstream.weightbus.net.compatibility import installed_libraries
from slipstream.wire.errors import EngineError
from slipstream.wire.files.keys import read_client_key
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.weightbus import Join
from slipstream.wire.process.logs import start_logging
from slipstream.wire.settings.sections import RunSection, relay_address
from tests.support.bus import nccl_manners
from tests.support.bus.engine import BusEngine, random_tensors
from tests.support.waiting import NEVER_S

_log = logging.getLogger("agent")


class Fault:
    """Does something when a step was reached so many times since the last fault."""

    def __init__(self, step: str, counts: list[int], do: str, *, armed: Path) -> None:
        self._step, self._counts, self._do = step, list(counts), do
        self._armed = armed  # exists from when on steps count
        self._reached = 0

    def __call__(self, step: str) -> None:
        if step != self._step or not self._counts or not self._armed.exists():
            return
        self._reached += 1
        if self._reached < self._counts[0]:
            return
        self._reached = 0
        del self._counts[0]
        match self._do:
            case "raise":
                raise EngineError(f"injected at {step}")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)


def _unseen(path: Path, _manifest: WeightManifest) -> int:
    raise FileNotFoundError(f"{path} is of another container")


async def serve(arguments: argparse.Namespace) -> None:
    folder, name = arguments.folder, arguments.name
    tensors = random_tensors(seed=0, count=arguments.count, size=arguments.size)
    engine = BusEngine(
        tensors,
        log=folder / f"{name}.tokens",
        fault=Fault(*json.loads(arguments.fault), armed=folder / f"{name}.armed"),
        group_timeout_s=arguments.group_timeout_s,
        token_s=arguments.token_s,
        has_shadow=arguments.shadow,
    )
    libraries = installed_libraries()
    subscriber = Subscriber(
        engine,
        join=Join(
            name=name,
            incarnation=secrets.token_hex(4),
            device="cpu",
            torch_version=arguments.torch_version or libraries.torch_version,
            transport=arguments.transport,
        ),
        tensors=TensorSet({n: tuple(t.shape) for n, t in tensors.items()}, arguments.dtype),
        staging=Staging(folder, name),
        silence_s=NEVER_S,
        fetch_timeout_s=NEVER_S,
        on_pause=lambda: _log.info("paused"),
        on_adopt=lambda version, _stood_s: _log.info("adopted %s", version.label),
        key=read_client_key(arguments.key_file) if arguments.key_file else None,
    )
    sockets = folder / "sockets"
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.generate())
        group.create_task(subscriber.run(relay_address(RunSection(socket_dir=str(sockets)))))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--transport", default="collective")
    parser.add_argument("--fault", default='["", [], ""]')
    parser.add_argument("--torch-version", default="")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--group-timeout-s", type=float, default=NEVER_S)
    parser.add_argument("--token-s", type=float, default=0.005)
    torch.set_num_threads(1)
    start_logging("agent")
    parser.add_argument("--manners", default="gloo")
    parser.add_argument("--key-file", type=Path, help="proved where a part is fetched")
    parser.add_argument("--shadow", action="store_true", help="load next to the live weights")
    parser.add_argument("--out-of-sight", action="store_true", help="of the learner's memory")
    arguments = parser.parse_args()
    if arguments.out_of_sight:
        updates.open_mapped = _unseen
    if arguments.manners == "nccl":
        nccl_manners.install()
    asyncio.run(serve(arguments))


if __name__ == "__main__":
    main()
