"""An agent beside an engine that only holds bytes: what a publish costs without an engine's work.

``python -m benchmarks.weightbus.agent --folder DIR --name NAME --sizes smollm2``; prints a line
of JSON when it joins and for every version that it adopts.
"""

import argparse
import asyncio
import json
import secrets
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed import TCPStore

from benchmarks.weightbus.model import QUICK, SMOLLM2, TINY, Sizes
from benchmarks.weightbus.receiver import join_group
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.subscriber import Subscriber
from slipstream.weightbus.agent.tensor_set import TensorSet
from slipstream.weightbus.net.compatibility import installed_libraries
from slipstream.weightbus.version.engine_checksums import expected_checksums
from slipstream.wire.messages.manifest import Bucket
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import Join
from slipstream.wire.settings.sections import RunSection, relay_address
from tests.support.engine_steps import EngineInSteps

SIZES = {"smollm2": SMOLLM2, "quick": QUICK, "tiny": TINY}


class HoldingEngine(EngineInSteps):
    """Tensors that updates are copied into; generates nothing."""

    def __init__(self, sizes: Sizes) -> None:
        specs = sizes.specs()
        self._tensors: dict[str, Tensor] = {
            spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs
        }
        self._groups: dict[str, dist.ProcessGroup] = {}

    async def open_group(
        self, *, host: str, port: int, group_name: str, rank: int, world_size: int, backend: str
    ) -> None:
        store = await asyncio.to_thread(TCPStore, host, port, is_master=False)
        self._groups[group_name] = await asyncio.to_thread(
            join_group, store, group_name, rank=rank, world_size=world_size
        )

    async def close_group(self, group_name: str) -> None:
        if (group := self._groups.pop(group_name, None)) is not None:
            dist.destroy_process_group(group)

    async def pause(self) -> int:
        return 0

    async def begin_update(self) -> None:
        pass

    async def load_bucket(self, bucket: Bucket, *, group_name: str, last: bool) -> None:
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        await asyncio.to_thread(dist.broadcast, flat, src=0, group=self._groups[group_name])
        at = 0
        for spec in bucket.tensors:
            held = self._tensors[spec.name]
            held.copy_(flat[at : at + spec.num_bytes].view(held.dtype).view(held.shape))
            at += spec.num_bytes

    async def end_update(self) -> None:
        pass

    async def load_folder(self, folder: Path) -> None:
        def load() -> None:
            with safe_open(folder / "model.safetensors", framework="pt") as file:
                for name, held in self._tensors.items():
                    held.copy_(file.get_tensor(name))

        await asyncio.to_thread(load)

    async def checksums(self) -> dict[str, str]:
        return await asyncio.to_thread(expected_checksums, self._tensors)

    async def label(self, version: PolicyVersion) -> None:
        pass

    async def resume(self) -> None:
        pass


def _report(**what: object) -> None:
    print(json.dumps(what), flush=True)


async def _serve(arguments: argparse.Namespace) -> None:
    sizes, folder = SIZES[arguments.sizes], arguments.folder
    shapes = {spec.name: spec.shape for spec in sizes.specs()}
    tensors = TensorSet(shapes, "bfloat16")
    staging = Staging(folder, arguments.name)
    staging.reserve(tensors.num_bytes)  # as an agent does while its engine starts
    subscriber = Subscriber(
        HoldingEngine(sizes),
        join=Join(
            name=arguments.name,
            incarnation=secrets.token_hex(4),
            device="cpu",
            torch_version=installed_libraries().torch_version,
            transport=arguments.transport,
        ),
        tensors=tensors,
        staging=staging,
        silence_s=20.0,
        fetch_timeout_s=20.0,
        on_pause=lambda: None,
        on_adopt=lambda version, _stood_s: _report(step=version.step, at_s=time.monotonic()),
    )
    sockets = arguments.folder / "sockets"
    _report(joins=True, at_s=time.monotonic())
    await subscriber.run(relay_address(RunSection(socket_dir=str(sockets))))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--transport", default="collective")
    parser.add_argument("--sizes", choices=list(SIZES), default="smollm2")
    torch.set_num_threads(1)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
