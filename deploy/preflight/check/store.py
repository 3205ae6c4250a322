"""The Redis of a run: the user's server, or the program of a private server."""

import asyncio
from pathlib import Path

from slipstream.broker.config import BrokerSettings
from slipstream.broker.store.redis import Persistence, RedisStore
from slipstream.broker.store.server_binary import find_server
from slipstream.deploy.preflight.check.facts import Fact, fail, ok, warn
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.keys import read_private

_SETTING = "broker.redis.url"


def judge_persistence(seen: Persistence | None) -> Fact:
    """Return whether a server keeps acknowledged data; None if it does not say."""
    name = "Redis persistence"
    if seen is None:
        return warn(name, "unknown: CONFIG is not permitted to this user", "broker.redis.username")
    if seen.maxmemory_policy != "noeviction":
        found = f"maxmemory-policy is {seen.maxmemory_policy}, expected noeviction"
        return fail(name, f"{found}: a full server drops acknowledged work", _SETTING)
    if not seen.appendonly:
        found = "appendonly is no, expected yes: acknowledged work is lost when the server ends"
        return fail(name, found, _SETTING)
    found = f"appendonly yes, appendfsync {seen.appendfsync}, maxmemory-policy noeviction"
    if seen.appendfsync != "always":
        return warn(name, f"{found}: a crash can lose acknowledged work", _SETTING)
    return ok(name, found, _SETTING)


def observe_store(settings: BrokerSettings) -> list[Fact]:
    """Return the facts of a broker's store on this host."""
    try:
        if settings.broker.redis.url:
            return asyncio.run(_ask(settings))
        return [ok("Redis", f"a private server, {find_server()}", _SETTING)]
    except ConfigError as error:
        return [fail("Redis", str(error), _SETTING)]


async def _ask(settings: BrokerSettings) -> list[Fact]:
    redis = settings.broker.redis
    password = None
    if redis.password_file:
        password = read_private(Path(redis.password_file), "broker.redis.password_file").strip()
    store = await RedisStore.connect(
        redis.url,
        settings.run.name,
        username=redis.username or None,
        password=password,
        ca_file=redis.ca_file or None,
        outage_s=settings.run.outage_s,
    )
    try:
        found = f"{redis.url} answers: {await store.server_version()}"
        return [ok("Redis", found, _SETTING), judge_persistence(await store.persistence())]
    finally:
        await store.close()
