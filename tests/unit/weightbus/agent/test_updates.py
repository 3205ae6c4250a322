"""Commands of the relay, at an engine that pauses for a version."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.weightbus.agent.fetcher import BucketFetcher
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.tensor_set import TensorSet
from slipstream.weightbus.agent.updates import EngineUpdates, Order
from slipstream.weightbus.version.disk import write_version
from slipstream.weightbus.version.engine_checksums import digest_of, expected_checksums
from slipstream.weightbus.version.snapshot import WeightSnapshot
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import (
    Commit,
    LoadReceived,
    Offer,
    Outcome,
    Pause,
    Receive,
    Verify,
)
from tests.support.bus.engine import BusEngine, random_tensors


class Agent:
    """An engine of plain tensors with its updates, and versions on disk."""

    def __init__(self, folder: Path) -> None:
        tensors = random_tensors(seed=0, count=3, size=8)
        self.engine = BusEngine(tensors, log=folder / "tokens", group_timeout_s=1.0)
        self.staging = Staging(folder, "a")
        self.updates = EngineUpdates(
            self.engine,
            tensors=TensorSet({name: tuple(t.shape) for name, t in tensors.items()}, "float32"),
            staging=self.staging,
            on_pause=lambda: None,
            on_adopt=lambda _version: None,
        )
        self._folder = folder

    def do(self, command: Order) -> Outcome:
        fetcher: BucketFetcher = None  # type: ignore[assignment]  # nothing is fetched
        return asyncio.run(self.updates.execute(command, fetcher))

    def received(self, step: int, tensors: dict[str, Tensor], *, is_checked: bool = True) -> None:
        sent = WeightSnapshot.of(PolicyVersion(1, step), tensors, bucket_bytes=50)
        folder = write_version(self._folder, sent.manifest(), sent.memory.numpy().data)
        self.do(Offer(command_id=1, manifest=sent.manifest()))
        received = Receive(command_id=2, path=str(folder), is_checked=is_checked)
        assert not self.do(received).error


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    yield agent
    agent.engine.close()
    agent.staging.close()


def test_agent_compares_the_engine_with_what_it_received_and_sends_one_digest(agent: Agent):
    newer = random_tensors(seed=1, count=3, size=8)
    agent.received(1, newer)
    agent.do(Pause(command_id=3))
    agent.do(LoadReceived(command_id=4))
    checked = agent.do(Verify(command_id=5))
    assert checked.digest == digest_of(expected_checksums(newer))
    assert not checked.checksums
    assert not agent.do(Commit(command_id=6, version=PolicyVersion(1, 1))).error
    assert agent.updates.adopted == PolicyVersion(1, 1)


def test_a_tensor_that_differs_in_the_engine_is_named(agent: Agent):
    newer = random_tensors(seed=1, count=3, size=8)
    agent.received(1, newer)
    agent.do(Pause(command_id=3))
    agent.do(LoadReceived(command_id=4))
    name = "model.layers.1.norm.weight"
    agent.engine.tensors[name] = torch.zeros(8)
    assert agent.do(Verify(command_id=5)).error == f"1 tensors differ in the engine: ['{name}']"


def test_without_a_check_nothing_is_computed(agent: Agent):
    agent.received(1, random_tensors(seed=1, count=3, size=8), is_checked=False)
    agent.do(Pause(command_id=3))
    agent.do(LoadReceived(command_id=4))
    assert agent.updates._expected is None
    assert agent.do(Verify(command_id=5, wants="nothing")) == Outcome(command_id=5)


def test_checksums_are_sent_where_the_relay_asks_for_them(agent: Agent):
    digest = agent.do(Verify(command_id=5)).digest  # after a collective nothing was received
    every = agent.do(Verify(command_id=6, wants="checksums")).checksums
    assert every == expected_checksums(agent.engine.tensors)
    assert digest == digest_of(every)
