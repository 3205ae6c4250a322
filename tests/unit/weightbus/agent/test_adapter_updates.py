"""Commands of the relay, at an engine whose versions stand beside each other."""

import asyncio
import itertools
from pathlib import Path

import pytest
import torch

from slipstream.weightbus.agent.adapter_updates import AdapterUpdates
from slipstream.weightbus.agent.fetcher import BucketFetcher
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.tensor_set import TensorSet
from slipstream.weightbus.agent.updates import Order
from slipstream.weightbus.version.adapter_checksums import expected_of_version
from slipstream.weightbus.version.disk import write_version
from slipstream.weightbus.version.engine_checksums import digest_of
from slipstream.wire.errors import EngineError
from slipstream.wire.messages.manifest import Bucket, TensorSpec, WeightManifest
from slipstream.wire.messages.probe import ProbeLogprobs
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import Abandon, Adopt, CommandOutcome, ReceiveVersion
from tests.support.bus.snapshots import CopiedSnapshot

_copies = itertools.count(1)
PROBE = ProbeLogprobs(sequences=((3, 5, 1),), logprobs=((-0.5, -2.0),), num_context=1)
SPEC = TensorSpec("a.lora_A.weight", "float32", (2, 3))


class Engine:
    """Records what it was told."""

    num_answering = 3

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails = ""
        self.holds: dict[str, str] = {}

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call.startswith(self.fails or "-"):
            raise EngineError(f"{call} failed")

    async def load_adapter(self, received: Path, version: PolicyVersion) -> None:
        del received
        self._note(f"load {version.label}")

    async def drop_adapter(self, version: PolicyVersion) -> None:
        self._note(f"drop {version.label}")

    async def checksums(self) -> dict[str, str]:
        return self.holds

    async def label(self, version: PolicyVersion) -> None:
        self._note(f"label {version.label}")

    async def resume(self) -> None:
        pass

    async def pause(self) -> int:
        raise AssertionError("it was paused")


class Agent:
    def __init__(self, folder: Path) -> None:
        self.engine = Engine()
        self.adopted: list[PolicyVersion] = []
        self.probes: list[tuple[PolicyVersion, ProbeLogprobs | None]] = []
        self.updates = AdapterUpdates(
            self.engine,  # type: ignore[arg-type]  # no collective reaches it
            tensors=TensorSet({SPEC.name: SPEC.shape}, "float32"),
            staging=Staging(folder, "a"),
            on_pause=self._paused,
            on_adopt=lambda version, _stood_s: self.adopted.append(version),
            on_probe=lambda version, probe, _: self.probes.append((version, probe)),
        )
        self._folder = folder
        self.expected = ""

    def _paused(self) -> None:
        raise AssertionError("the worker was told of a pause")

    def do(self, command: Order) -> CommandOutcome:
        fetcher: BucketFetcher = None  # type: ignore[assignment]  # nothing is fetched
        return asyncio.run(self.updates.execute(command, fetcher))

    def receive(self, step: int) -> CommandOutcome:
        tensors = {SPEC.name: torch.full(SPEC.shape, float(step))}
        sent = CopiedSnapshot.of(PolicyVersion(1, step), tensors, bucket_bytes=50)
        folder = write_version(
            self._folder, sent.manifest(), sent.memory.numpy().data, number=next(_copies)
        )
        self.engine.holds = expected_of_version(tensors)
        self.expected = digest_of(self.engine.holds)  # as the relay computes it
        return self.do(ReceiveVersion(command_id=1, manifest=sent.manifest(), path=str(folder)))

    def adopt(self, step: int) -> CommandOutcome:
        version = PolicyVersion(1, step)
        return self.do(Adopt(command_id=2, version=version, digest=self.expected, probe=PROBE))

    def publish(self, step: int) -> list[CommandOutcome]:
        return [self.receive(step), self.adopt(step)]


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return Agent(tmp_path)


def test_a_publish_loads_beside_and_relabels_without_a_pause(agent: Agent):
    for step in range(2):
        received, adopted = agent.publish(step)
        assert not received.error
        assert not adopted.error
        assert adopted.num_in_flight == 3
        assert adopted.digest == digest_of(agent.engine.holds)
    assert agent.engine.calls == ["load v1.0", "label v1.0", "load v1.1", "label v1.1"]
    assert agent.adopted == [PolicyVersion(1, 0), PolicyVersion(1, 1)]
    assert agent.probes == [(version, PROBE) for version in agent.adopted]
    assert not agent.updates.is_paused


def test_a_version_that_differs_in_the_engine_is_dropped_and_the_one_before_stays(agent: Agent):
    agent.publish(0)
    agent.receive(1)
    agent.engine.holds = {SPEC.name: "0"}
    assert agent.adopt(1).checksums == {SPEC.name: "0"}
    assert agent.updates.adopted == PolicyVersion(1, 0)
    agent.do(Abandon(command_id=4, reason="tensors differ"))
    assert agent.engine.calls[-2:] == ["load v1.1", "drop v1.1"]
    assert agent.updates.adopted == PolicyVersion(1, 0)
    assert agent.updates.failures == ["tensors differ"]
    assert agent.probes == [(PolicyVersion(1, 0), PROBE)]
    assert not any(outcome.error for outcome in agent.publish(1))
    assert agent.updates.failures == []


def test_a_failed_load_leaves_nothing_to_drop(agent: Agent):
    agent.publish(0)
    agent.receive(1)
    agent.engine.fails = "load"
    assert "load v1.1 failed" in agent.adopt(1).error
    agent.do(Abandon(command_id=4, reason="load failed"))
    assert agent.engine.calls[-1] == "load v1.1"
    assert agent.updates.failures == ["load failed"]


def test_a_version_that_cannot_be_dropped_is_used_by_nobody(agent: Agent):
    agent.publish(0)
    agent.receive(1)
    agent.engine.holds = {SPEC.name: "0"}
    agent.adopt(1)
    agent.engine.fails = "drop"
    assert not agent.do(Abandon(command_id=4, reason="tensors differ")).error
    assert agent.updates.adopted == PolicyVersion(1, 0)


def test_only_what_was_received_is_adopted(agent: Agent):
    assert "v1.0 was not received" in agent.adopt(0).error
    agent.receive(0)
    assert "v1.1 was not received" in agent.adopt(1).error


def test_other_tensors_are_refused(agent: Agent):
    other = TensorSpec(SPEC.name, "float32", (4, 3))
    manifest = WeightManifest(
        version=PolicyVersion(1, 0), buckets=(Bucket((other,), other.num_bytes),)
    )
    outcome = agent.do(ReceiveVersion(command_id=1, manifest=manifest, path="/nowhere"))
    assert "has shape (4, 3), the model has (2, 3)" in outcome.error
