"""Commands of the relay, at an engine whose versions stand beside each other."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.weightbus.agent.adapter_updates import AdapterUpdates
from slipstream.weightbus.agent.fetcher import BucketFetcher
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.tensor_set import TensorSet
from slipstream.weightbus.agent.updates import Order
from slipstream.weightbus.version.engine_checksums import digest_of
from slipstream.wire.errors import EngineError
from slipstream.wire.messages.manifest import Bucket, TensorSpec, WeightManifest
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import (
    Abandon,
    Commit,
    LoadReceived,
    Offer,
    Outcome,
    Pause,
    Verify,
)

SPEC = TensorSpec("a.lora_A.weight", "float32", (2, 3))


class Engine:
    """Records what it was told."""

    num_answering = 3

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails = ""

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
        return {"a": "1"}

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
        self.updates = AdapterUpdates(
            self.engine,  # type: ignore[arg-type]  # no collective reaches it
            tensors=TensorSet({SPEC.name: SPEC.shape}, "float32"),
            staging=Staging(folder, "a"),
            on_pause=self._paused,
            on_adopt=self.adopted.append,
        )
        self._folder = folder

    def _paused(self) -> None:
        raise AssertionError("the worker was told of a pause")

    def do(self, command: Order) -> Outcome:
        fetcher: BucketFetcher = None  # type: ignore[assignment]  # nothing is fetched
        return asyncio.run(self.updates.execute(command, fetcher))

    def offer(self, step: int) -> Outcome:
        manifest = WeightManifest(
            version=PolicyVersion(1, step), buckets=(Bucket((SPEC,), SPEC.num_bytes),)
        )
        outcome = self.do(Offer(command_id=1, manifest=manifest, transport="disk"))
        self.updates._received = self._folder
        return outcome

    def publish(self, step: int) -> list[Outcome]:
        version = PolicyVersion(1, step)
        commands: list[Callable[[], Outcome]] = [
            lambda: self.offer(step),
            lambda: self.do(Pause(command_id=2)),
            lambda: self.do(LoadReceived(command_id=3)),
            lambda: self.do(Verify(command_id=4)),
            lambda: self.do(Commit(command_id=5, version=version)),
        ]
        return [command() for command in commands]


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return Agent(tmp_path)


def test_a_publish_loads_beside_and_relabels_without_a_pause(agent: Agent):
    for step in range(2):
        outcomes = agent.publish(step)
        assert not any(outcome.error for outcome in outcomes)
        assert outcomes[1].num_in_flight == 3
        assert outcomes[3].digest == digest_of({"a": "1"})
    assert agent.engine.calls == ["load v1.0", "label v1.0", "load v1.1", "label v1.1"]
    assert agent.adopted == [PolicyVersion(1, 0), PolicyVersion(1, 1)]
    assert not agent.updates.is_paused


def test_a_version_that_is_given_up_is_dropped_and_the_one_before_stays(agent: Agent):
    agent.publish(0)
    agent.offer(1)
    agent.do(LoadReceived(command_id=3))
    assert agent.updates.adopted == PolicyVersion(1, 0)
    agent.do(Abandon(command_id=4, reason="tensors differ"))
    assert agent.engine.calls[-2:] == ["load v1.1", "drop v1.1"]
    assert agent.updates.adopted == PolicyVersion(1, 0)
    assert agent.updates.failures == ["tensors differ"]
    assert "was not loaded" in agent.do(Commit(command_id=5, version=PolicyVersion(1, 1))).error
    assert not any(outcome.error for outcome in agent.publish(1))
    assert agent.updates.failures == []


def test_a_failed_load_leaves_nothing_to_drop(agent: Agent):
    agent.publish(0)
    agent.offer(1)
    agent.engine.fails = "load"
    assert "load v1.1 failed" in agent.do(LoadReceived(command_id=3)).error
    agent.do(Abandon(command_id=4, reason="load failed"))
    assert agent.engine.calls[-1] == "load v1.1"
    assert agent.updates.failures == ["load failed"]


def test_a_version_that_cannot_be_dropped_is_used_by_nobody(agent: Agent):
    agent.publish(0)
    agent.offer(1)
    agent.do(LoadReceived(command_id=3))
    agent.engine.fails = "drop"
    assert not agent.do(Abandon(command_id=4, reason="tensors differ")).error
    assert agent.updates.adopted == PolicyVersion(1, 0)


def test_other_tensors_are_refused(agent: Agent):
    other = TensorSpec("a.lora_A.weight", "float32", (4, 3))
    manifest = WeightManifest(
        version=PolicyVersion(1, 0), buckets=(Bucket((other,), other.num_bytes),)
    )
    outcome = agent.do(Offer(command_id=1, manifest=manifest, transport="disk"))
    assert "has shape (4, 3), the model has (2, 3)" in outcome.error
