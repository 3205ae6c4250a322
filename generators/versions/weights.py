"""Finds the relay: by its Unix socket on this host, else by asking the broker."""

import asyncio
import logging

from slipstream.broker.client import BrokerClient
from slipstream.weightbus.agent.subscriber import Subscriber
from slipstream.wire.errors import ConfigError, SlipstreamError
from slipstream.wire.messages.broker import FindRelay, RelayPlace
from slipstream.wire.messages.weightbus import RelayAddress
from slipstream.wire.settings.sections import RunSection, relay_address

_log = logging.getLogger(__name__)
_ASK_S = 1.0
_AGAIN_S = 2.0  # silence after which it may have been replaced, or not know the key
_LOG_EVERY = 30  # questions


async def take_weights(subscriber: Subscriber, run: RunSection, client: BrokerClient) -> None:
    """Keep an engine on the newest version until cancelled.

    The relay is on another host if ``run.broker`` is set; the broker knows its address.

    Raises:
        ConfigError: the learner's relay listens to its own host only.
        PublishError: too many publishes in a row failed at this engine.
    """
    if not run.broker:
        await subscriber.run(relay_address(run))
        return
    num_asked = 0
    while (address := await _find(client)) is None:  # a learner takes a while to start
        if num_asked % _LOG_EVERY == 0:
            _log.info("waiting for a learner whose relay has weights")
        num_asked += 1
        await asyncio.sleep(_ASK_S)
    _log.info("weights come from %s", address.endpoint)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(subscriber.run(address))
            group.create_task(_follow(subscriber, client))
    except* SlipstreamError as errors:
        raise errors.exceptions[0] from errors


async def _follow(subscriber: Subscriber, client: BrokerClient) -> None:
    """Move to the relay that replaced one which is silent."""
    was_silent = False
    while True:
        await asyncio.sleep(_AGAIN_S)
        is_silent = subscriber.silent_s > _AGAIN_S
        if is_silent and not was_silent:
            _log.warning("the relay is silent; asking the broker for another")
        was_silent = is_silent
        if is_silent and (address := await _find(client)) is not None:
            subscriber.move(address)


async def _find(client: BrokerClient) -> RelayAddress | None:
    place, _ = await client.ask(FindRelay(), RelayPlace)
    if place.is_known and place.door is None:
        raise ConfigError(
            "the learner's relay listens to its own host only: set weightbus.listen = "
            '"tcp://ADDRESS:PORT" there, or leave run.broker empty here if this is that host'
        )
    return place.door
