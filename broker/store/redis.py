"""The store in Redis (or Valkey): a snapshot, a list of events, two keys per trajectory.

Keys are under ``slipstream:RUN:``, RUN percent-encoded: ``generation`` names the broker that
may write, ``commits`` counts its transactions, ``snapshot`` and ``events`` hold the ledger,
``p:GROUP:SIBLING`` and ``t:GROUP:SIBLING`` a payload and a transcript.

One connection writes. It watches ``generation`` and ``commits`` from one transaction to the next,
so a transaction is applied only if the store was not claimed since, and never twice: after an
outage ``commits`` shows whether Redis applied it, and should a copy sent before the outage be
applied after all, then the one sent again is not.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast
from urllib.parse import quote

import redis.asyncio as aioredis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    ExecAbortError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from slipstream.broker.store.base import Changes, StoredTrajectory
from slipstream.broker.store.outage import LOADING_S, Outage
from slipstream.wire.errors import ConfigError, PeerLostError, StoreLostError, SupersededError
from slipstream.wire.messages.codec import Frame
from slipstream.wire.messages.trajectory import TrajectoryKey
from slipstream.wire.redaction import without_secrets

_log = logging.getLogger(__name__)
_SIGN_OF_LIFE_S = 5.0
_SIGN_OF_LIFE_EVERY_S = 1.0
_T = TypeVar("_T")
_Command: TypeAlias = tuple[str | int | Frame, ...]
_Reply: TypeAlias = object

_POLL_S = 0.1
_SEND_BYTES = 128 * 1024  # measured: twice the CPU at 1 MiB, where malloc maps fresh pages
_MAX_ARGUMENTS = 10_000
_REPLAY_PAGE = 1_000
_FETCH_BYTES = 16 * 1024 * 1024
_FIRST_FETCH_PAGE = 4
_MAX_FETCH_PAGE = 512


@dataclass(frozen=True, slots=True)
class Persistence:
    """Settings of a server that decide whether it keeps what it acknowledged."""

    appendonly: bool
    appendfsync: str
    maxmemory_policy: str  # noeviction also where its memory has no limit


class RedisStore:
    """Group commits in one MULTI/EXEC each, exactly once through every outage of the server."""

    def __init__(
        self,
        client: "aioredis.Redis",
        run_name: str,
        *,
        url: str,
        outage_s: float,
        socket_timeout_s: float,
    ) -> None:
        self._client = client
        self._prefix = f"slipstream:{quote(run_name, safe='')}"
        self._url = url
        self._outage_s = outage_s
        self._socket_timeout_s = socket_timeout_s
        self._outages: Counter[str] = Counter()
        self._shows_life = True  # until a sign of life is missing
        self._watched = (self._name("generation"), self._name("commits"))
        self._writing = asyncio.Lock()
        self._connection: AbstractConnection | None = None
        self._generation: bytes | None = None  # value of the key since this handle claimed it
        self._num_commits = 0  # acknowledged, to this broker and those before
        self._found: tuple[bytes | None, int] = (None, 0)  # state of Redis when last watched
        self._outcome_known = True

    @classmethod
    async def connect(
        cls,
        url: str,
        run_name: str,
        *,
        username: str | None = None,
        password: str | None = None,
        ca_file: str | None = None,
        outage_s: float = 300.0,
        socket_timeout_s: float = 10.0,
    ) -> "RedisStore":
        """Return a store on a server that answers.

        ``ca_file`` has the certificates that a rediss:// server must be signed by. An operation
        waits ``outage_s`` for a server that went away, such as one silent for ``socket_timeout_s``.

        Raises:
            ConfigError: nothing answers at ``broker.redis.url``, or it is no URL of a Redis.
        """
        client = _client_of(url, username=username, password=password, ca_file=ca_file)
        deadline = time.monotonic() + LOADING_S
        while True:
            try:
                async with asyncio.timeout(socket_timeout_s):
                    await client.ping()
            except BusyLoadingError as error:  # it reads its file and will answer
                if time.monotonic() > deadline:
                    await client.aclose()
                    raise ConfigError(f"Redis at {url} loads for {LOADING_S:.0f} s") from error
                await asyncio.sleep(_POLL_S)
            except (RedisError, OSError) as error:
                await client.aclose()
                reason = without_secrets(str(error)) or "silence"
                message = f"no Redis answers at {url} (broker.redis.url): {reason}"
                raise ConfigError(message) from error
            else:
                return cls(
                    client, run_name, url=url, outage_s=outage_s, socket_timeout_s=socket_timeout_s
                )

    @property
    def is_answering(self) -> bool:
        """False while an operation waits for a server that went away, or a sign of life does."""
        return self._shows_life and not any(self._outages.copy().values())

    async def watch(self) -> None:
        """Ask the server for a sign of life every second until cancelled, for ``is_answering``.

        A broker with nothing to write would not notice. Nothing is ended by silence here.
        """
        while True:
            try:
                async with asyncio.timeout(_SIGN_OF_LIFE_S):
                    await self._client.ping()
                self._shows_life = True
            except ResponseError:  # denied to this user, but an answer all the same
                self._shows_life = True
            except (RedisError, OSError) as error:
                _log.debug("no sign of life of Redis: %s", error)
                self._shows_life = False
            await asyncio.sleep(_SIGN_OF_LIFE_EVERY_S)

    async def claim(self) -> int:
        """Become the only writer; return the broker generation, greater than all before."""
        async with self._writing:
            return await self._claim()

    async def commit(self, changes: Changes) -> None:
        """Write all changes in one transaction, exactly once."""
        commands: list[_Command] = []  # a key removed and put again is put
        if changes.snapshot is not None:
            commands += [
                ("SET", self._name("snapshot"), changes.snapshot),
                ("DEL", self._name("events")),
            ]
        commands += _in_pages("RPUSH", changes.events, self._name("events"))
        gone: list[str | Frame] = [name for key in changes.remove for name in self._names(key)]
        commands += _in_pages("UNLINK", gone)
        values: list[str | Frame] = []
        for key, stored in changes.put.items():
            payload, transcript = self._names(key)
            values += (payload, stored.payload, transcript, stored.transcript)
        commands += _in_pages("MSET", values)
        await self._transact(commands)

    async def snapshot(self) -> bytes | None:
        """Return the newest snapshot."""
        found = await self._until_answered(
            "reads", lambda: self._client.get(self._name("snapshot"))
        )
        return cast("bytes | None", found)

    async def replay(self) -> AsyncIterator[bytes]:
        """Yield the events after the snapshot in the order in which they were committed."""
        name, start = self._name("events"), 0
        while True:
            end = start + _REPLAY_PAGE - 1
            found = await self._until_answered(
                "reads", partial(self._client.lrange, name, start, end)
            )
            page = cast("list[bytes]", found)
            for event in page:
                yield event
            start += len(page)
            if not page:
                return

    async def fetch(self, keys: Sequence[TrajectoryKey]) -> list[StoredTrajectory]:
        """Return stored trajectories; KeyError names a missing one."""
        stored: list[StoredTrajectory] = []
        num_bytes = 0
        while len(stored) < len(keys):
            count = _FIRST_FETCH_PAGE
            if num_bytes:
                fitting = _FETCH_BYTES * len(stored) // num_bytes
                count = min(max(1, fitting), _MAX_FETCH_PAGE)
            page = keys[len(stored) : len(stored) + count]
            names = [name for key in page for name in self._names(key)]
            found = await self._until_answered("reads", partial(self._client.mget, names))
            values = cast("list[bytes | None]", found)
            for key, payload, transcript in zip(page, values[::2], values[1::2], strict=True):
                if payload is None or transcript is None:
                    raise KeyError(key)
                stored.append(StoredTrajectory(payload, transcript))
                num_bytes += stored[-1].num_bytes
        return stored

    async def server_version(self) -> str:
        """Return the name and version of the server behind the store."""
        info = await self._if_permitted(self._client.info)
        if info is None:
            return "redis (INFO is not permitted)"
        if "valkey_version" in info:
            return f"valkey {info['valkey_version']} (redis {info['redis_version']})"
        return f"redis {info['redis_version']}"

    async def durability(self) -> str:
        """Describe the durability of an acknowledged commit."""
        seen = await self.persistence()
        if seen is None:
            return "unknown (CONFIG is not permitted)"
        if seen.maxmemory_policy != "noeviction":
            return (
                f"maxmemory-policy {seen.maxmemory_policy}: a full server loses acknowledged work"
            )
        if not seen.appendonly:
            return "no append-only file: acknowledged work is lost when the server ends"
        match seen.appendfsync:
            case "always":
                return "appendfsync always"
            case "everysec":
                return "appendfsync everysec: a crash can lose the last second"
            case other:
                return f"appendfsync {other}: a crash of the machine can lose acknowledged work"

    async def persistence(self) -> Persistence | None:
        """Return the settings of the server that decide; None if it does not say."""
        append = await self._if_permitted(lambda: self._client.config_get("append*"))
        if append is None:
            return None
        memory = await self._if_permitted(lambda: self._client.config_get("maxmemory*")) or {}
        is_bounded = memory.get("maxmemory", "0") != "0"
        policy = memory.get("maxmemory-policy") if is_bounded else None
        return Persistence(
            appendonly=append.get("appendonly") == "yes",
            appendfsync=str(append.get("appendfsync")),
            maxmemory_policy=str(policy or "noeviction"),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._drop_connection()
        await self._client.aclose()

    # ---- one transaction ---------------------------------------------------------

    async def _transact(self, commands: list[_Command]) -> None:
        """Apply commands in one transaction and count it; the first of a handle claims."""
        async with self._writing:
            if not self._outcome_known:
                raise PeerLostError(
                    "a commit was cancelled and its outcome is unknown: claim the store again"
                )
            if self._generation is None:
                await self._claim()
            number = self._num_commits + 1
            try:
                await self._until_answered(
                    "commits", lambda: self._apply(commands, number), one_wait=False
                )
            except asyncio.CancelledError:
                self._outcome_known = False
                raise
            self._num_commits = number

    async def _apply(self, commands: list[_Command], number: int) -> None:
        """Try once to apply a transaction that may have been applied by an earlier try."""
        connection = await self._watch()
        if self._is_applied(number):
            return
        batch = [("MULTI",), *commands, ("SET", self._name("commits"), number), ("EXEC",)]
        replies = await self._ask(connection, [*batch, *self._watching()])
        self._found = _watched_state(replies)
        results = replies[-3]
        if results is not None and not isinstance(results, ResponseError):
            for result in cast("list[_Reply]", results):
                if isinstance(result, ResponseError):  # Redis does not undo the rest
                    raise StoreLostError(f"Redis applied a commit in part: {result}") from result
            return  # a claim from now on is noticed by the next transaction
        refusals = [reply for reply in replies if isinstance(reply, ResponseError)]
        if refusals:
            causes = [reply for reply in refusals if not isinstance(reply, ExecAbortError)]
            raise (causes or refusals)[0]
        if not self._is_applied(number):
            raise RedisError("a watched key was touched")

    def _is_applied(self, number: int) -> bool:
        """Compare the state of Redis with its acknowledgements.

        Raises:
            SupersededError: another broker holds the store.
            StoreLostError: acknowledged commits are gone.
        """
        generation, found = self._found
        if _number(generation) < _number(self._generation):
            raise StoreLostError(self._lost(number - 1 - found))
        if generation != self._generation:
            raise SupersededError(
                f"another broker has claimed the store: generation {_number(generation)}, "
                f"this one has {_number(self._generation)}"
            )
        if found < number - 1:
            raise StoreLostError(self._lost(number - 1 - found))
        return found == number

    def _lost(self, count: int) -> str:
        return (
            f"Redis came back without {max(count, 0)} acknowledged commits "
            f"({self._url}, broker.redis.url): was its folder emptied, or appendfsync not always?"
        )

    # ---- the connection that writes ----------------------------------------------

    async def _claim(self) -> int:
        token = secrets.token_hex(8)
        taken = await self._until_answered("claims", lambda: self._take_generation(token))
        await self._drop_connection()
        self._generation = taken
        await self._until_answered("claims", self._watch)
        self._num_commits = self._found[1]
        self._outcome_known = True
        return _number(taken)

    async def _watch(self) -> AbstractConnection:
        """Return the connection that watches; a new one reads the state of Redis."""
        if self._connection is not None and self._connection.is_connected:
            return self._connection
        pool = self._client.connection_pool  # has the settings; this connection is not in it
        connection = cast("Callable[[], AbstractConnection]", pool.make_connection)()
        try:
            async with asyncio.timeout(self._socket_timeout_s):
                await cast("Callable[[], Awaitable[None]]", connection.connect)()
            replies = await self._ask(connection, list(self._watching()))
            self._found = _watched_state(replies)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        self._connection = connection
        return connection

    def _watching(self) -> tuple[_Command, _Command]:
        return ("WATCH", *self._watched), ("MGET", *self._watched)

    async def _ask(self, connection: AbstractConnection, commands: list[_Command]) -> list[_Reply]:
        """Send commands in one go; return the reply to each, errors among them."""
        for piece in _pieces(connection.pack_commands(commands)):
            async with asyncio.timeout(self._socket_timeout_s):
                await connection.send_packed_command(piece, check_health=False)
        replies: list[_Reply] = []
        for _ in commands:
            try:
                async with asyncio.timeout(self._socket_timeout_s):
                    replies.append(await connection.read_response())
            except ResponseError as error:
                replies.append(error)
        return replies

    async def _take_generation(self, token: str) -> bytes:
        """Raise the generation by one in this handle's name."""
        name = self._watched[0]
        async with self._client.pipeline(transaction=True) as pipeline:
            await pipeline.watch(name)
            found = cast("bytes | None", await pipeline.get(name))
            if found is not None and found.endswith(token.encode()):
                return found  # an earlier try whose answer was lost
            value = f"{_number(found) + 1}:{token}".encode()
            cast("Callable[[], None]", pipeline.multi)()
            pipeline.set(name, value)
            await pipeline.execute()
        return value

    async def _drop_connection(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.disconnect(nowait=True)

    # ---- outages -----------------------------------------------------------------

    async def _until_answered(
        self, what: str, attempt: Callable[[], Awaitable[_T]], *, one_wait: bool = True
    ) -> _T:
        """Try until Redis does it; a try that is ``one_wait`` is ended by the socket timeout.

        Raises:
            PeerLostError: it did not for ``outage_s`` seconds.
            ConfigError: it does not permit the command.
        """
        with Outage(what, self._url, self._outage_s, self._outages) as outage:
            while True:
                try:
                    async with asyncio.timeout(self._socket_timeout_s if one_wait else None):
                        return await attempt()
                except NoPermissionError as error:
                    message = (
                        f"Redis at {self._url} forbids commands that the broker needs: {error}"
                    )
                    raise ConfigError(message) from error
                except (RedisError, OSError) as error:
                    if isinstance(error, ReadOnlyError):
                        await self._leave_replica()
                    await outage.wait(error, loads=isinstance(error, BusyLoadingError))

    async def _leave_replica(self) -> None:
        """Reconnect: the server was made a replica, and its address may name another one."""
        with suppress(RedisError, OSError):
            await self._drop_connection()
            await self._client.connection_pool.disconnect()

    async def _if_permitted(
        self, ask: Callable[[], Awaitable[object]]
    ) -> Mapping[str, _Reply] | None:
        """Return an answer that a server may refuse (some users, hosted servers), or None."""

        async def attempt() -> Mapping[str, _Reply] | None:
            try:
                return cast("Mapping[str, _Reply]", await ask())
            except ResponseError:
                return None

        return await self._until_answered("reads", attempt)

    # ---- names -------------------------------------------------------------------

    def _name(self, part: str) -> str:
        return f"{self._prefix}:{part}"

    def _names(self, key: TrajectoryKey) -> tuple[str, str]:
        """Return the names of a payload and of a transcript."""
        return f"{self._prefix}:p:{key[0]}:{key[1]}", f"{self._prefix}:t:{key[0]}:{key[1]}"


def _client_of(
    url: str, *, username: str | None, password: str | None, ca_file: str | None
) -> "aioredis.Redis":
    # The library's own timeouts go through asyncio.wait_for, which can swallow a cancellation
    # before Python 3.12; every wait here is inside an asyncio.timeout instead.
    tls: dict[str, Any] = {}
    if url.startswith("rediss://"):
        tls["ssl_check_hostname"] = True  # a certificate of another host is no proof
        if ca_file:
            tls["ssl_ca_certs"] = ca_file
    try:
        return aioredis.Redis.from_url(
            url,
            username=username,
            password=password,
            **tls,
            socket_timeout=None,
            socket_connect_timeout=None,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except ValueError as error:
        reason = without_secrets(str(error))
        raise ConfigError(f"{url!r} is no URL of a Redis (broker.redis.url): {reason}") from error


def _number(generation: bytes | None) -> int:
    """Return the number in NUMBER:TOKEN; 0 before the first claim."""
    return int(generation.partition(b":")[0]) if generation else 0


def _watched_state(replies: list[_Reply]) -> tuple[bytes | None, int]:
    """Read the answers to WATCH and MGET generation commits, the last two."""
    for reply in replies[-2:]:
        if isinstance(reply, ResponseError):
            raise reply
    generation, num_commits = cast("list[bytes | None]", replies[-1])
    return generation, int(num_commits or 0)


def _in_pages(command: str, arguments: Sequence[str | Frame], *first: str) -> Iterator[_Command]:
    """Split arguments over several commands; Redis takes about a million in one."""
    for start in range(0, len(arguments), _MAX_ARGUMENTS):
        yield (command, *first, *arguments[start : start + _MAX_ARGUMENTS])


def _pieces(packed: list[bytes]) -> Iterator[list[bytes]]:
    """Group buffers into sends that are not small; each has a socket timeout of its own."""
    piece: list[bytes] = []
    num_bytes = 0
    for buffer in packed:
        piece.append(buffer)
        num_bytes += len(buffer)
        if num_bytes >= _SEND_BYTES:
            yield piece
            piece, num_bytes = [], 0
    if piece:
        yield piece
