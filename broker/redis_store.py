"""The store in Redis (or Valkey): one list of events, one hash per trajectory."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import redis.asyncio as aioredis
from redis.exceptions import BusyLoadingError, RedisError

from broker.ledger import TrajectoryKey
from broker.store import Changes, StoredTrajectory
from wire.errors import ConfigError, PeerLostError

_REPLAY_PAGE = 1_000
_LOADING_S = 300.0
_POLL_S = 0.1


class RedisStore:
    """Group commits in one MULTI/EXEC each; keys stand under ``slipstream:RUN:``."""

    def __init__(self, client: "aioredis.Redis", run_name: str) -> None:
        self._client = client
        self._prefix = f"slipstream:{run_name}"

    @classmethod
    async def connect(cls, url: str, run_name: str, *, password: str | None = None) -> "RedisStore":
        """Return a store on a server that answers.

        Raises:
            ConfigError: nobody answers at ``broker.redis.url``.
        """
        client = aioredis.Redis.from_url(url, password=password, socket_timeout=30.0)
        deadline = time.monotonic() + _LOADING_S
        while True:
            try:
                await client.ping()
            except BusyLoadingError as error:  # it reads its file and will answer
                if time.monotonic() > deadline:
                    raise ConfigError(f"Redis at {url} loads for {_LOADING_S:.0f} s") from error
                await asyncio.sleep(_POLL_S)
            except RedisError as error:
                message = f"no Redis answers at {url} (broker.redis.url): {error}"
                raise ConfigError(message) from error
            else:
                return cls(client, run_name)

    async def commit(self, changes: Changes) -> None:
        """Write all changes in one transaction."""
        pipeline = self._client.pipeline(transaction=True)
        if changes.events:
            pipeline.rpush(f"{self._prefix}:events", *changes.events)
        for key, stored in changes.put.items():
            pipeline.hset(self._key(key), "payload", bytes(stored.payload))
            pipeline.hset(self._key(key), "transcript", bytes(stored.transcript))
        if changes.remove:
            pipeline.unlink(*(self._key(key) for key in changes.remove))
        try:
            await pipeline.execute()
        except RedisError as error:
            raise PeerLostError(f"Redis did not take a commit: {error}") from error

    async def fetch(self, keys: Sequence[TrajectoryKey]) -> list[StoredTrajectory]:
        """Return stored trajectories; KeyError names one that is not there."""
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.hmget(self._key(key), "payload", "transcript")
        rows = await pipeline.execute()
        stored = []
        for key, (payload, transcript) in zip(keys, rows, strict=True):
            if payload is None or transcript is None:
                raise KeyError(key)
            stored.append(StoredTrajectory(payload, transcript))
        return stored

    async def replay(self) -> AsyncIterator[bytes]:
        """Yield all events in the order in which they were committed."""
        start = 0
        while page := await self._client.lrange(
            f"{self._prefix}:events", start, start + _REPLAY_PAGE - 1
        ):
            for event in page:
                yield event if isinstance(event, bytes) else event.encode()
            start += len(page)

    async def clear(self) -> None:
        """Forget everything of this run."""
        pattern = f"{_literal(self._prefix)}:*"
        async for key in self._client.scan_iter(match=pattern, count=_REPLAY_PAGE):
            await self._client.unlink(key)

    async def server_version(self) -> str:
        """Return the name and version of the server behind the store."""
        info = await self._client.info("server")
        if "valkey_version" in info:
            return f"valkey {info['valkey_version']} (redis {info['redis_version']})"
        return f"redis {info['redis_version']}"

    async def close(self) -> None:
        """Let go of connections."""
        await self._client.aclose()

    def _key(self, key: TrajectoryKey) -> str:
        return f"{self._prefix}:t:{key[0]}:{key[1]}"


def _literal(text: str) -> str:
    """Return a glob pattern that matches nothing but the text."""
    return "".join(f"\\{char}" if char in "\\*?[]^" else char for char in text)
