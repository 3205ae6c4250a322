"""What real publishes move is what the arithmetic says: bytes, messages and copies, exactly."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from slipstream.deploy.predict.laws.publish_cost import Setup, cost_of
from slipstream.weightbus.net.traffic import Traffic
from tests.support.bus.remote import TENSORS, adopts, agent, client_key, running, running_relay
from tests.support.waiting import until_async

pytestmark = pytest.mark.integration
SIZE = sum(tensor.nbytes for tensor in TENSORS.values())
NUM_PUBLISHES = 3


async def moved(folder: Path, *, members: int, fanout: int, bucket_bytes: int) -> list[Traffic]:
    """Publish some versions; return what the relay and each agent counted."""
    keys = [client_key(f"host-{i}") for i in range(members)]
    async with (
        running_relay(folder, bucket_bytes=bucket_bytes, fanout=fanout) as relay,
        AsyncExitStack() as stack,
    ):
        relay.listener.admit({key.public: key.name for key in keys})
        agents = []
        for i, key in enumerate(keys):
            made = agent(folder, key, f"g{i}", transport="tcp", forward="tcp://127.0.0.1:0")
            agents.append(stack.enter_context(made))
            await stack.enter_async_context(running(agents[-1].run(await relay.place())))
        await until_async(lambda: len(relay.publisher.states()) == members)
        for step in range(NUM_PUBLISHES):
            relay.publish(step)
            for subscriber in agents:
                await adopts(subscriber, step)
            await until_async(lambda: len(relay.records) == members * (step + 1))  # noqa: B023
        assert not any(record.failed for record in relay.records)
        return [relay.publisher.traffic, *(one.traffic for one in agents)]


@pytest.mark.parametrize("bucket_bytes", [16 * 1024, 40 * 1024])
@pytest.mark.parametrize(("members", "fanout"), [(1, 0), (1, 1), (3, 0), (3, 1), (3, 2)])
def test_bytes_messages_and_copies_are_those_of_the_formula(
    folder: Path, members: int, fanout: int, bucket_bytes: int
):
    relay, *agents = asyncio.run(
        moved(folder, members=members, fanout=fanout, bucket_bytes=bucket_bytes)
    )
    num_tensors = bucket_bytes // (16 * 1024)  # of 16 KiB in a bucket
    cost = cost_of(
        Setup(
            version_bytes=SIZE,
            engine_hosts=members,
            fanout=fanout,
            buckets=-(-len(TENSORS) // num_tensors),
        )
    )
    assert relay.sent_bytes == NUM_PUBLISHES * cost.relayed_bytes
    assert sum(one.sent_bytes for one in agents) == NUM_PUBLISHES * cost.forwarded_bytes
    assert sum(one.relay_bytes for one in agents) == relay.sent_bytes
    assert sum(one.forwarded_bytes for one in agents) == NUM_PUBLISHES * cost.forwarded_bytes
    assert relay.commands == NUM_PUBLISHES * cost.commands
    assert sum(one.commands for one in agents) == relay.commands
    requests = relay.bucket_requests + sum(one.bucket_requests for one in agents)
    assert requests == NUM_PUBLISHES * cost.bucket_requests
    assert sum(one.copied_bytes for one in agents) == NUM_PUBLISHES * cost.copied_bytes
    for one in (relay, *agents):
        assert (one.refused_requests, one.left_doors, one.rejected_buckets) == (0, 0, 0)
