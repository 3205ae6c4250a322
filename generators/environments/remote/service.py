"""Builds an environment server from its settings and runs it until it is stopped."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import zmq.asyncio

from slipstream.generators.environments.local import local_environments
from slipstream.generators.environments.remote.messages import identity_of
from slipstream.generators.environments.remote.proxy import PolicyProxy
from slipstream.generators.environments.remote.server import EnvironmentServer
from slipstream.weightbus.net.curve import LeaderListener
from slipstream.weightbus.net.listening import endpoint_of
from slipstream.wire.files.keys import read_client_key
from slipstream.wire.process.run_until import first_ended, running
from slipstream.wire.process.stopping import stop_event
from slipstream.wire.settings.rendezvous import Address
from slipstream.wire.settings.sections import EnvironmentSection

_log = logging.getLogger(__name__)


async def serve(
    settings: EnvironmentSection, address: Address, *, most: int, hide: Sequence[Path] = ()
) -> None:
    """Serve an environment until this process is asked to end.

    Args:
        settings: Settings of the environment.
        address: Address to listen at.
        most: Most trajectories at a time.
        hide: Paths that environments must not see, besides the key file.

    Raises:
        ConfigError: the environment cannot be imported, the key not read, or the address not bound.
    """
    stop = stop_event()
    key_file = Path(settings.key_file)
    key = read_client_key(key_file, setting="environment.key_file")
    async with AsyncExitStack() as cleanup:
        stopping: asyncio.Task[object] = asyncio.create_task(stop.wait())
        cleanup.callback(stopping.cancel)
        host = await local_environments(settings, hide=[key_file, *hide])
        cleanup.push_async_callback(host.close)
        proxy = PolicyProxy()
        await proxy.start()
        cleanup.push_async_callback(proxy.close)
        context = zmq.asyncio.Context()
        cleanup.callback(context.destroy, 0)
        listener = LeaderListener(endpoint_of(address, named="--listen"), key, setting="--listen")
        cleanup.callback(listener.close)
        server = EnvironmentServer(
            host,
            proxy,
            identity=identity_of(settings.function, settings.options),
            most=most,
            silence_s=settings.server_silence_s,
        )
        socket = listener.open(context)
        _log.info("serving %s at %s", settings.function, address)
        async with running(server.run(socket)) as (serving,):
            await first_ended(stopping, serving)
        _log.info("asked to stop")
