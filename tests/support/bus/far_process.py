"""A relay or an agent as a process, on a host of its own: engines of plain tensors over tcp.

The relay publishes as often as it is told once all agents have joined, and writes what it and its
members took; agents run until they are killed. They share a folder.
"""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.weightbus import PublishRecord, RelayAddress
from slipstream.wire.process.logs import start_logging
from tests.support.bus.engine import random_tensors
from tests.support.bus.remote import Relay, agent, client_key, running
from tests.support.waiting import until_async

ADDRESS, RECORDS = "address.json", "records.json"


def key_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.key.json"


def make_keys(folder: Path, names: Sequence[str]) -> None:
    """Write the keys of agents."""
    for name in names:
        key_file(folder, name).write_bytes(msgspec.json.encode(client_key(name)))


def read_key(path: Path) -> ClientKey:
    return msgspec.json.decode(path.read_bytes(), type=ClientKey)


async def serve_relay(arguments: argparse.Namespace) -> None:
    folder = arguments.folder
    relay = Relay(
        folder,
        f"tcp://{arguments.address}:0",
        bucket_bytes=arguments.bucket_bytes,
        fanout=arguments.fanout,
        tensors=random_tensors(seed=0, count=arguments.count, size=arguments.size),
        engine_check_every=0,
    )
    keys = [read_key(path) for path in folder.glob("*.key.json")]
    relay.listener.admit({key.public: key.name for key in keys})
    async with running(relay.publisher.run(relay.near, relay.listener)):
        place = await relay.place()
        (folder / "unfinished").write_bytes(msgspec.json.encode(place))
        (folder / "unfinished").rename(folder / ADDRESS)
        await until_async(lambda: len(relay.publisher.states()) == len(keys))
        for step in range(arguments.publishes):
            relay.publish(step)
            await until_async(lambda: len(relay.records) == len(keys) * (step + 1))  # noqa: B023
    (folder / "unfinished").write_bytes(msgspec.json.encode(relay.records))
    (folder / "unfinished").rename(folder / RECORDS)


async def serve_agent(arguments: argparse.Namespace) -> None:
    folder, name = arguments.folder, arguments.name
    await until_async((folder / ADDRESS).exists)
    place = msgspec.json.decode((folder / ADDRESS).read_bytes(), type=RelayAddress)
    with agent(
        folder,
        read_key(key_file(folder, name)),
        name,
        tensors=random_tensors(seed=0, count=arguments.count, size=arguments.size),
        transport="tcp",
        fetch_timeout_s=120.0,
        forward=f"tcp://{arguments.address}:0",
        connections=arguments.connections,
    ) as subscriber:
        await subscriber.run(place)


def records_in(folder: Path) -> list[PublishRecord]:
    """Return the records of a relay that has ended."""
    return msgspec.json.decode((folder / RECORDS).read_bytes(), type=list[PublishRecord])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("relay", "agent"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--name", default="")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--bucket-bytes", type=int, default=1)
    parser.add_argument("--fanout", type=int, default=0)
    parser.add_argument("--publishes", type=int, default=1)
    parser.add_argument("--connections", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start_logging(arguments.role)
    asyncio.run((serve_relay if arguments.role == "relay" else serve_agent)(arguments))


if __name__ == "__main__":
    main()
