"""The memory of a host of an engine for the versions that it receives."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from slipstream.generators.config import GeneratorSettings
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.tensor_set import TensorSet
from slipstream.weightbus.transports import TRANSPORTS

_log = logging.getLogger(__name__)


@asynccontextmanager
async def room_for(
    settings: GeneratorSettings, name: str, tensors: TensorSet
) -> AsyncIterator[Staging]:
    """Allocate the memory for the first version while the engine starts."""
    staging = Staging(settings.run.socket_folder, name, uses_deltas=settings.uses_deltas)
    # An engine on the learner's host loads from the learner's memory.
    is_fetched = TRANSPORTS[settings.transport].is_staged and bool(settings.run.broker)
    num_bytes = tensors.num_bytes if is_fetched else 0

    def reserve() -> None:
        try:
            staging.reserve(num_bytes)
        except OSError as error:
            _log.warning("no memory yet for a version of %d bytes: %s", num_bytes, error.strerror)

    reserving = asyncio.create_task(asyncio.to_thread(reserve))
    try:
        yield staging
    finally:
        await reserving
        staging.close()
