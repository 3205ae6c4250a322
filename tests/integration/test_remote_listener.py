"""Engines on other hosts: which may get weights, and how a relay that moved is found again."""

import asyncio
from pathlib import Path

import pytest

from slipstream.generators.versions.weights import take_weights
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.broker import FindRelay, RelayPlace
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import RelayAddress
from slipstream.wire.settings.sections import RunSection
from tests.support.bus.remote import (
    EPOCH,
    Bulk,
    adopts,
    agent,
    client_key,
    free_ports,
    running,
    running_relay,
)
from tests.support.waiting import until_async

pytestmark = pytest.mark.integration


@pytest.fixture(params=["encrypted", "plain"])
def bulk(request: pytest.FixtureRequest) -> Bulk:
    return request.param


async def test_a_key_that_the_broker_knows_gets_every_version_until_it_is_revoked(
    folder: Path, bulk: Bulk
):
    known, stranger = client_key("gpu-7"), client_key("gpu-8")
    async with running_relay(folder, bulk=bulk) as relay:
        relay.listener.admit({known.public: known.name})
        place = await relay.place()
        relay.publish(0)
        with agent(folder, known) as let_in, agent(folder, stranger, "b") as shut_out:
            async with running(let_in.run(place)), running(shut_out.run(place)):
                await adopts(let_in, 0)
                relay.publish(1)
                await adopts(let_in, 1)
                (state,) = relay.publisher.states()
                assert (state.name, state.transport) == ("gpu-7/generator-0", "tcp")
                assert {name for r in relay.records for name in r.adopted_by} == {state.name}
                await until_async(lambda: relay.listener.num_refused > 0)
                assert shut_out.adopted is None
                relay.listener.admit({})
                await until_async(lambda: relay.publisher.states() == [])
                relay.publish(2)
                await asyncio.sleep(0.2)  # in which it might get it
                assert let_in.adopted == PolicyVersion(EPOCH, 1)


class Broker:
    """Knows where the relay is; the real one answers the same in test_loop.py."""

    def __init__(self) -> None:
        self.place = RelayPlace(is_known=False)

    async def ask(self, request: FindRelay, _kind: type[RelayPlace]) -> tuple[RelayPlace, list]:
        assert isinstance(request, FindRelay)
        return self.place, []


RUN = RunSection(broker="tcp://head:5555")


async def test_an_engine_finds_a_relay_that_took_the_place_of_its_own_with_another_key(
    folder: Path, bulk: Bulk
):
    key, broker = client_key("gpu-7"), Broker()
    with agent(folder, key) as subscriber:
        async with running(take_weights(subscriber, RUN, broker)):
            async with running_relay(folder, free_ports(), bulk=bulk) as first:
                first.listener.admit({key.public: key.name})
                first.publish(0)
                place = await first.place()
                broker.place = RelayPlace(is_known=True, door=place)
                await adopts(subscriber, 0)
            async with running_relay(folder, place.endpoint, bulk=bulk) as second:  # the same port
                second.listener.admit({key.public: key.name})
                second.publish(1)
                broker.place = RelayPlace(is_known=True, door=await second.place())
                assert broker.place.door != place
                await adopts(subscriber, 1)
                second.publish(2)
                await adopts(subscriber, 2)


async def test_an_engine_that_was_refused_gets_in_when_its_key_is_known(folder: Path, bulk: Bulk):
    key, broker = client_key("gpu-7"), Broker()
    async with running_relay(folder, bulk=bulk) as relay:
        relay.publish(0)
        broker.place = RelayPlace(is_known=True, door=await relay.place())
        with agent(folder, key) as subscriber:
            async with running(take_weights(subscriber, RUN, broker)):
                await until_async(lambda: relay.listener.num_refused >= 2)  # at either port
                assert subscriber.adopted is None
                relay.listener.admit({key.public: key.name})
                await adopts(subscriber, 0)


def test_engine_of_an_unreachable_relay_names_the_missing_setting(folder: Path):
    broker = Broker()
    broker.place = RelayPlace(is_known=True)
    with agent(folder, None) as subscriber, pytest.raises(ConfigError, match=r"weightbus\.listen"):
        asyncio.run(take_weights(subscriber, RUN, broker))


def test_no_key_no_weights(folder: Path):
    place = RelayAddress(
        endpoint="tcp://127.0.0.1:1", bulk_endpoint="tcp://127.0.0.1:2", key="k" * 40
    )
    with agent(folder, None) as subscriber, pytest.raises(ConfigError, match=r"run\.key_file"):
        asyncio.run(subscriber.run(place))
