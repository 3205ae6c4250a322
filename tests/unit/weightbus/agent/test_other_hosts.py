"""A version that is received on every host of an engine, or on none."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.weightbus.agent.fetcher import BucketFetcher, Receiving
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.tensor_set import TensorSet
from slipstream.weightbus.agent.updates import EngineUpdates, Order
from slipstream.weightbus.net.traffic import Traffic
from slipstream.weightbus.version.layout import bucket_offsets
from slipstream.wire.errors import EngineError, PublishError
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import Adopt, CommandOutcome, ReceiveVersion, RelayAddress
from tests.support.bus.engine import BusEngine, random_tensors
from tests.support.bus.snapshots import CopiedSnapshot

RELAY = RelayAddress(endpoint="tcp://10.0.0.1:5600", bulk_endpoint="tcp://10.0.0.1:5601", key="k")
FETCHED_THERE = 1_000  # bytes


class Relay(BucketFetcher):
    """A relay's buckets without a relay."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.traffic = Traffic()
        self.wrong = False

    @property
    def address(self) -> RelayAddress:
        return RELAY

    def reconnect(self) -> None:
        pass

    def receiving(self, manifest: WeightManifest, *_where: object) -> Receiving:  # type: ignore[override]
        data, starts, wrong = self._data, bucket_offsets(manifest), self.wrong

        class Here(Receiving):
            def __init__(self) -> None:
                self.order = list(range(len(manifest.buckets)))
                self.ahead = 2
                self._served = {}

            async def fetch(self, index: int, _base: object = None) -> bytes:  # type: ignore[override]
                start = starts[index]
                bucket = data[start : start + manifest.buckets[index].num_bytes]
                return bytes(len(bucket)) if wrong else bucket

            def rejected(self, _index: int, _why: str) -> bool:
                return False

        return Here()


class Others:
    """Other hosts that answer as they are told."""

    def __init__(self) -> None:
        self.error = ""
        self.asked: list[tuple[ReceiveVersion, RelayAddress, bool]] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def fetch_too(
        self, receive: ReceiveVersion, relay: RelayAddress, *, may_be_read: bool
    ) -> int:
        self.asked.append((receive, relay, may_be_read))
        await self.answers.wait()
        if self.error:
            raise PublishError(self.error)
        return FETCHED_THERE


class Agent:
    def __init__(self, folder: Path) -> None:
        self.tensors = random_tensors(seed=0)
        self.failing = ""
        self.others = Others()
        self.engine = BusEngine(
            dict(self.tensors), log=folder / "tokens", group_timeout_s=1.0, fault=self._fault
        )
        self.staging = Staging(folder, "a")
        shapes = {name: tuple(t.shape) for name, t in self.tensors.items()}
        self.updates = EngineUpdates(
            self.engine,
            tensors=TensorSet(shapes, "float32"),
            staging=self.staging,
            on_pause=lambda: None,
            on_adopt=lambda _version, _still_s: None,
            others=self.others,
        )

    def _fault(self, step: str) -> None:
        if step == self.failing:
            raise EngineError(f"injected at {step}")

    async def receive(self, step: int, *, wrong: bool = False, path: str = "") -> CommandOutcome:
        sent = CopiedSnapshot.of(
            PolicyVersion(1, step),
            {name: tensor + step for name, tensor in self.tensors.items()},
            bucket_bytes=50,
        )
        relay = Relay(sent.memory.numpy().tobytes())
        relay.wrong = wrong
        command = ReceiveVersion(command_id=2, manifest=sent.manifest(), path=path)
        return await self.updates.execute(command, relay)

    async def do(self, command: Order) -> CommandOutcome:
        return await self.updates.execute(command, Relay(b""))

    async def adopt(self, step: int) -> CommandOutcome:
        return await self.do(Adopt(command_id=3, version=PolicyVersion(1, step)))


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    yield agent
    agent.engine.close()
    agent.staging.close()


async def test_a_version_is_received_when_every_host_has_it(agent: Agent):
    agent.others.answers.clear()
    receiving = asyncio.create_task(agent.receive(1))
    await asyncio.sleep(0.05)
    assert not receiving.done()
    agent.others.answers.set()
    outcome = await receiving
    ((receive, relay, may_be_read),) = agent.others.asked
    assert (relay, may_be_read) == (RELAY, False)
    assert outcome.error == ""
    assert outcome.num_bytes == receive.manifest.num_bytes + FETCHED_THERE
    assert (await agent.adopt(1)).error == ""


async def test_a_failure_of_another_host_is_one_of_this_and_the_version_before_runs_on(
    agent: Agent,
):
    await agent.receive(1)
    await agent.adopt(1)
    agent.others.error = "node 1 (host b, rank 1): bucket 0 was wrong"
    assert (await agent.receive(2)).error == agent.others.error
    assert (await agent.adopt(2)).error == "v1.2 was not received"
    assert agent.updates.adopted == PolicyVersion(1, 1)


async def test_a_failure_here_does_not_wait_for_the_other_hosts(agent: Agent):
    agent.others.answers.clear()
    assert "digest" in (await agent.receive(1, wrong=True)).error


async def test_other_hosts_are_told_that_an_unanswered_load_may_still_read(agent: Agent):
    await agent.receive(1)
    agent.failing = "in_folder"
    assert "injected" in (await agent.adopt(1)).error
    agent.failing = ""
    await agent.receive(1)
    assert (await agent.adopt(1)).error == ""
    await agent.receive(2)
    assert [may_be_read for _, _, may_be_read in agent.others.asked] == [False, True, False]


def test_a_folder_of_one_host_is_no_version_of_an_engine_on_several(agent: Agent):
    outcome = asyncio.run(agent.receive(1, path="/shared/v1"))
    assert outcome.error == "every host of this engine fetches a version from a relay"
    assert agent.others.asked == []
