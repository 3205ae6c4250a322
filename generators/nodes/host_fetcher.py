"""A follower's half of a publish: fetches node 0's versions into the memory of its own host."""

import asyncio
import logging

import zmq.asyncio

from slipstream.generators.nodes.follower import EngineFollower
from slipstream.weightbus.agent.fetcher import BucketFetcher
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.tensor_set import TensorSet, mismatch
from slipstream.weightbus.agent.updates import fetch_into
from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.net.curve import num_connections
from slipstream.wire.errors import ConfigError, PublishError, text_of
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.followers import FetchToo

_log = logging.getLogger(__name__)


class HostFetcher:
    """Carries out one order of node 0 after the other. Use it inside one event loop."""

    def __init__(
        self,
        bus: WeightBusSection,
        node: int,
        link: EngineFollower,
        staging: Staging,
        tensors: TensorSet,
        key: ClientKey,
    ) -> None:
        """Fetch nothing yet; ``run`` does.

        Args:
            bus: The [weightbus] section.
            node: Number of this node.
            link: Link to node 0, which gives orders and gets answers.
            staging: Memory of this host.
            tensors: Tensors of the model.
            key: Key to prove at the doors for buckets.
        """
        self._bus = bus
        self._node = node
        self._link = link
        self._staging = staging
        self._tensors = tensors
        self._key = key

    async def run(self) -> None:
        """Carry out orders until cancelled; a new order ends the previous, which node 0 gave up."""
        connections = self._bus.connections
        context = zmq.asyncio.Context(io_threads=num_connections(connections, is_far=True))
        fetcher = BucketFetcher(context, timeout_s=self._bus.timeout_s, connections=connections)
        working: asyncio.Task[None] | None = None
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    order = await self._link.fetches.get()
                    await _given_up(working)
                    if order.may_be_read:  # set first: this order may be given up before it begins
                        self._staging.may_be_read = True
                    working = group.create_task(self._fetch(order, fetcher))
        finally:
            fetcher.close()
            context.term()

    async def _fetch(self, order: FetchToo, fetcher: BucketFetcher) -> None:
        label = order.receive.manifest.version.label
        try:
            await self._receive(order, fetcher)
        except (PublishError, ConfigError, OSError) as error:  # OSError: no memory is left
            _log.warning("%s was not received: %s", label, text_of(error))
            await self._link.answer(order.command_id, error=text_of(error))
        else:
            await self._link.answer(order.command_id, num_bytes=self._staging.fetched_bytes)

    async def _receive(self, order: FetchToo, fetcher: BucketFetcher) -> None:
        receive = order.receive
        if difference := mismatch(receive.manifest, self._tensors):
            raise PublishError(f"refused {receive.manifest.version.label}: {difference}")
        if fetcher.address != order.relay:
            fetcher.connect(order.relay, self._key)
        first_part = receive.first_part + self._node  # hosts begin with different parts
        await fetch_into(self._staging, receive.manifest, fetcher, receive.sources, first_part)


async def _given_up(task: "asyncio.Task[None] | None") -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
