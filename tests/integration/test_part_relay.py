"""A part's relay and its head, whose connection breaks, and a head that is gone for good."""

from pathlib import Path
from typing import Literal

import msgspec
import pytest
import zmq.asyncio

from slipstream.weightbus.agent import updates
from slipstream.weightbus.agent.fetcher import BucketFetcher
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.tensor_set import TensorSet
from slipstream.weightbus.version.engine_checksums import EngineLayout, expected_checksums
from slipstream.weightbus.version.tensor_bits import Tensors
from slipstream.wire.errors import PublishError
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import BulkDoor, RelayAddress
from tests.support.bus.engine import BusEngine
from tests.support.bus.in_between import Link
from tests.support.bus.published import subscriber_of
from tests.support.bus.remote import EPOCH, TENSORS, Bulk, adopts, agent, client_key, running
from tests.support.bus.two_hosts import TwoHosts
from tests.support.waiting import until_async

pytestmark = pytest.mark.integration
VERSION = PolicyVersion(EPOCH, 0)
NOWHERE = RelayAddress(endpoint="ipc:///nowhere", bulk_endpoint="ipc:///tmp/sp-nowhere")


@pytest.mark.parametrize("lost", ["answer", "question"])
async def test_a_hold_whose_answer_was_lost_with_the_connection_is_asked_for_again(
    folder: Path, lost: str
):
    learner, key = TwoHosts(folder), client_key("far")
    async with learner.running_head() as head, learner.running_part(), Link(head) as link:
        learner.listener.admit({key.public: "far"})
        learner.show_head(msgspec.structs.replace(head, endpoint=link.endpoint))
        with agent(folder, key, transport="tcp") as subscriber:
            async with running(subscriber.run(head)):
                await until_async(lambda: 1 in learner.parts._parts)
                await until_async(lambda: len(learner.publisher.states()) == 1)
                held = learner.parts._parts[1].waiting
                link.swallow(to_head=lost == "answer", from_head=lost == "question")
                learner.publish(0)
                # The head hears of the version by another way than the part's report.
                state = learner.parts._parts[1].state
                learner.heads.heard(msgspec.structs.replace(state, whole=(VERSION,)), 0.0)
                await until_async(lambda: bool(held))
                if lost == "answer":
                    await until_async(lambda: VERSION in learner.part._holds.held(0.0))
                    await until_async(lambda: not learner.part._answering)
                before = link.num_swallowed  # and then another report
                await until_async(lambda: link.num_swallowed > before)
                assert subscriber.adopted is None
                assert held
                link.cut()
                await until_async(lambda: subscriber.adopted == VERSION)
        assert not any(record.failed for record in learner.records)


class OnGpu(BusEngine):
    """An engine that hashes its tensors as on a GPU."""

    async def checksums(self) -> dict[str, str]:
        return expected_checksums(self.tensors, EngineLayout("cuda"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
async def test_what_an_engine_on_a_gpu_must_hold_is_hashed_where_it_is_written(
    folder: Path, device: Literal["cpu", "cuda"], monkeypatch: pytest.MonkeyPatch
):
    computed: list[EngineLayout] = []

    def by_agent(tensors: Tensors, of: EngineLayout) -> dict[str, str]:
        computed.append(of)
        return expected_checksums(tensors, of)

    monkeypatch.setattr(updates, "expected_of_version", by_agent)
    learner, key = TwoHosts(folder), client_key("far")
    engine = (OnGpu if device == "cuda" else BusEngine)(
        TENSORS, log=folder / "tokens", group_timeout_s=1.0
    )
    tensors = TensorSet({name: tuple(t.shape) for name, t in TENSORS.items()}, "float32")
    subscriber = subscriber_of(
        engine, tensors, Staging(folder, "far"), transport="tcp", key=key, device=device
    )
    async with learner.running_head() as head, learner.running_part():
        learner.listener.admit({key.public: "far"})
        learner.show_head(head)
        async with running(subscriber.run(head)):
            for step in range(2):
                learner.publish(step)
                await adopts(subscriber, step)
            engine.loads_wrongly = next(iter(TENSORS))
            learner.publish(2)
            await until_async(lambda: any(record.failed for record in learner.records))
    (failed,) = (why for record in learner.records[-1:] for why in record.failed.values())
    assert f"1 tensors differ in the engine: ['{engine.loads_wrongly}']" in failed
    assert set(computed) == (set() if device == "cuda" else {EngineLayout()})
    engine.close()


async def fetched(door: BulkDoor, key: ClientKey, manifest: WeightManifest) -> bytes:
    """Return a bucket of part 1, or raise what keeps it from there."""
    context = zmq.asyncio.Context()
    fetcher = BucketFetcher(context, timeout_s=2.0, connections=1)
    fetcher.connect(NOWHERE, key)
    index = next(i for i, bucket in enumerate(manifest.buckets) if bucket.part == 1)
    try:
        receiving = fetcher.receiving(manifest, ((door,), (door,)))
        return bytes(memoryview(await receiving.fetch(index)))
    finally:
        fetcher.close()
        context.destroy(linger=0)


@pytest.mark.parametrize("bulk", ["encrypted", "plain"])
async def test_nobody_fetches_from_a_part_once_no_head_says_who_may(
    folder: Path, bulk: Bulk, caplog: pytest.LogCaptureFixture
):
    learner, key = TwoHosts(folder, bulk), client_key("far")
    async with learner.running_part():
        async with learner.running_head() as head:
            learner.listener.admit({key.public: "far"})
            learner.show_head(head)
            with agent(folder, key, transport="tcp") as subscriber:
                async with running(subscriber.run(head)):
                    learner.publish(0)
                    await until_async(lambda: subscriber.adopted == VERSION)
            found = learner.heads.find(VERSION)
            assert found is not None
            manifest = await found.manifest()
            door = learner.part_listener.door
            assert door is not None
            assert await fetched(door, key, manifest)
        assert await fetched(door, key, manifest), "it outlives the head for a while"
        learner.part._keys._linger_s = 0.0  # that is over
        await until_async(lambda: "no head says who may fetch" in caplog.text)
        assert learner.part_listener.holders == {}
        with pytest.raises(PublishError, match=r"refused our key|handshake"):
            await fetched(door, key, manifest)
