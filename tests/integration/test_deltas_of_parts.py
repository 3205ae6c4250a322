"""Deltas from the relays of a learner on two hosts: each has the steps of its own buckets."""

from pathlib import Path

import pytest
import torch

from slipstream.weightbus.agent.staging import Staging
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.bus.remote import EPOCH, TENSORS, Bulk, agent, client_key, running
from tests.support.bus.two_hosts import TwoHosts
from tests.support.waiting import until_async

pytestmark = pytest.mark.integration
SIZE = sum(tensor.nbytes for tensor in TENSORS.values())


@pytest.mark.parametrize("bulk", ["encrypted", "plain"])
async def test_every_part_sends_what_changed_in_its_buckets(folder: Path, bulk: Bulk):
    learner = TwoHosts(folder, bulk)
    async with learner.running_head() as head, learner.running_part():
        key = client_key("far")
        learner.listener.admit({key.public: "far"})
        learner.show_head(head)
        staging = Staging(folder, "far", uses_deltas=True)
        with agent(folder, key, transport="tcp", staging=staging) as subscriber:
            async with running(subscriber.run(head)):
                for step in range(4):
                    sent = learner.publish(step)
                    version = PolicyVersion(EPOCH, step)
                    await until_async(lambda: subscriber.adopted == version)  # noqa: B023
                    engine = subscriber._updates._engine
                    for name, tensor in sent.items():
                        assert torch.equal(engine.tensors[name], tensor)  # type: ignore[attr-defined]
        await until_async(lambda: len(learner.records) >= 4)
        staging.close()
    fetched = [sum(one.fetched_bytes.values()) for one in learner.records if one.adopted_by]
    assert fetched[0] == SIZE
    assert max(fetched[1:]) < SIZE / 10
    assert staging.num_refused_deltas == 0
    sent_as_deltas = learner.publisher._deltas.num_sent + learner.deltas_of_part.num_sent
    assert sent_as_deltas == 3 * learner.num_buckets
    assert learner.deltas_of_part.num_sent
