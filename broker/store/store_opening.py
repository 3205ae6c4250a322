"""Opens the store of a run: on a private server, or on the configured one."""

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from pathlib import Path

from slipstream.broker.config import BrokerSettings, redis_folder
from slipstream.broker.store.private_server import RedisServer
from slipstream.broker.store.redis import RedisStore
from slipstream.wire.errors import ConfigError, PeerLostError
from slipstream.wire.files.keys import read_private

_log = logging.getLogger(__name__)
_AGAIN_S = 1.0
_SERVER_SPEAKS_FIRST_S = 15.0


async def start_private_server(
    settings: BrokerSettings, cleanup: AsyncExitStack
) -> RedisServer | None:
    """Start a private server, unless the settings name one."""
    redis = settings.broker.redis
    if redis.url:
        return None
    if redis.fsync != "always":
        _log.warning("broker.redis.fsync = %s: a crash can lose acknowledged work", redis.fsync)
    socket = settings.run.socket("redis")
    server = RedisServer.launch(
        socket=socket,
        folder=redis_folder(settings.run),
        log_file=settings.run.logs / "redis.log",
        fsync=redis.fsync,
    )
    cleanup.callback(server.stop)
    await server.until_listening(socket)
    return server


async def open_store(
    settings: BrokerSettings, server: RedisServer | None, *, restarted: bool
) -> RedisStore:
    """Return the store of a run.

    Raises:
        ConfigError: no server answers.
        PeerLostError: it answered before, and then not for ``run.outage_s`` seconds.
    """
    run, redis = settings.run, settings.broker.redis
    url = redis.url or (server.url if server else "")
    password = server.password if server else None
    if server is None and redis.password_file:
        password = read_private(Path(redis.password_file), "broker.redis.password_file").strip()
    # A private server that cannot be kept up reports why; the store itself waits a little longer.
    outage_s = run.outage_s + (_SERVER_SPEAKS_FIRST_S if server else 0.0)
    # A private server listens already: it may be slow, or be stopped for a while.
    is_patient = restarted or server is not None
    deadline = time.monotonic() + (run.outage_s if is_patient else 0.0)
    while True:
        try:
            return await RedisStore.connect(
                url,
                run.name,
                username=redis.username or None,
                password=password,
                ca_file=redis.ca_file or None,
                outage_s=outage_s,
            )
        except ConfigError as error:
            if not is_patient:
                raise
            if server is not None:
                server.check_alive()  # it reports why it ended
            if time.monotonic() > deadline:
                raise PeerLostError(f"{error} for {run.outage_s:.0f} s (run.outage_s)") from error
            await asyncio.sleep(_AGAIN_S)  # it was there before and may come back
