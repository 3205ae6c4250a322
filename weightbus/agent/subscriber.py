"""Generator side of the weight bus: joins, queues the relay's commands, reports their outcomes."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from slipstream.weightbus.agent.adapter_updates import AdapterUpdates, EngineAdapters
from slipstream.weightbus.agent.engine import EngineWeights
from slipstream.weightbus.agent.fetcher import BucketFetcher
from slipstream.weightbus.agent.forward import Forwarder
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.tensor_set import TensorSet
from slipstream.weightbus.agent.updates import (
    EngineUpdates,
    OnAdopt,
    OnProbe,
    Order,
    OtherHosts,
    ignore,
)
from slipstream.weightbus.net.curve import connect, num_connections
from slipstream.weightbus.net.traffic import Traffic
from slipstream.weightbus.version.engine_checksums import engine_layout_of
from slipstream.wire.errors import ProtocolError, PublishError
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.codec import decode_command, encode
from slipstream.wire.messages.pieces import cut
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import (
    Admit,
    CommandOutcome,
    Join,
    JoinAcknowledged,
    Leave,
    RelayAddress,
)

_log = logging.getLogger(__name__)
_HEARTBEAT_S = 1.0
_MAX_FAILURES = 5
_MAX_COMMANDS = 64  # queued; the relay sends a few ahead


class Subscriber:
    """Keeps one engine on the newest published version."""

    def __init__(
        self,
        engine: EngineWeights,
        *,
        join: Join,
        tensors: TensorSet,
        staging: Staging,
        silence_s: float,
        fetch_timeout_s: float,
        on_pause: Callable[[], None],
        on_adopt: OnAdopt,
        on_probe: OnProbe = ignore,
        key: ClientKey | None = None,
        adapters: EngineAdapters | None = None,
        forward: str = "",
        forwards_plain: bool = False,
        connections: int = 0,
        others: OtherHosts | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the agent of an engine; ``run`` joins, with ``adopted`` filled in.

        A relay without a message for ``silence_s`` is gone; ``fetch_timeout_s`` limits one bucket.
        ``on_pause`` is called before the engine pauses, ``on_adopt`` with the version that it
        generates with from now on (see ``EngineUpdates``). ``on_probe`` follows it, once per
        adopted version, with the learner's results under that version. The caller closes
        ``staging``. ``key`` is proved to a relay on another host. ``adapters`` is the engine if its
        versions are adapters. At ``forward`` (tcp://ADDRESS:PORT) other engines may fetch this
        engine's buckets, unencrypted with ``forwards_plain``. ``connections`` is their number to
        each door; 0 chooses. ``others`` are the other hosts with ranks of the engine.
        """
        self._join = join
        self._silence_s = silence_s
        self._fetch_timeout_s = fetch_timeout_s
        self._key = key
        self._address: RelayAddress | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._now = now
        self._relay = ""  # incarnation of the current relay
        self._last_message_s = now()
        self._fetcher: BucketFetcher | None = None
        self._connections = connections
        self.traffic = Traffic()
        self._forwarder = self._forwarder_at(forward, staging, is_plain=forwards_plain)
        self._updates = _updates_of(
            engine,
            adapters,
            tensors=tensors,
            staging=staging,
            on_pause=on_pause,
            on_adopt=on_adopt,
            on_probe=on_probe,
            engine_layout=engine_layout_of(join),
            others=others,
        )

    def _forwarder_at(self, listen: str, staging: Staging, *, is_plain: bool) -> Forwarder | None:
        """Return the door for other engines; None without an address."""
        if not listen:
            return None
        return Forwarder(
            listen,
            staging,
            patience_s=self._fetch_timeout_s / 2,
            traffic=self.traffic,
            is_relay_heard=lambda: self.silent_s < self._silence_s,
            is_plain=is_plain,
        )

    @property
    def adopted(self) -> PolicyVersion | None:
        """The version that the engine runs; None before the first and while it is paused."""
        return self._updates.adopted

    async def run(self, address: RelayAddress) -> None:
        """Serve the relay until cancelled.

        Raises:
            PublishError: too many publishes in a row failed at this engine.
            ConfigError: the relay requires a key, and no key is given.
        """
        context = zmq.asyncio.Context(
            io_threads=num_connections(self._connections, is_far=bool(address.key))
        )
        self._socket = socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.SNDHWM, _MAX_COMMANDS)
        self._fetcher = fetcher = BucketFetcher(
            context,
            timeout_s=self._fetch_timeout_s,
            connections=self._connections,
            traffic=self.traffic,
        )
        commands: asyncio.Queue[Order | JoinAcknowledged] = asyncio.Queue(_MAX_COMMANDS)
        forwarder = self._forwarder
        try:
            if forwarder is not None:
                door = forwarder.open(context)
                self._join = msgspec.structs.replace(self._join, forward=door)
            self.move(address)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._heartbeat(socket))
                group.create_task(self._read(socket, fetcher, commands))
                group.create_task(self._execute_all(socket, fetcher, commands))
                if forwarder is not None:
                    group.create_task(forwarder.run())
        except* PublishError as errors:
            raise PublishError(str(errors.exceptions[0])) from errors
        finally:
            with suppress(zmq.Again):  # the relay is gone
                await socket.send_multipart(cut([encode(Leave(name=self._join.name))]), zmq.NOBLOCK)
            socket.close()
            fetcher.close()
            if forwarder is not None:
                forwarder.close()
            self._socket = self._fetcher = self._address = None
            context.term()

    @property
    def silent_s(self) -> float:
        """Seconds since the last message of the relay."""
        return self._now() - self._last_message_s

    def move(self, address: RelayAddress) -> None:
        """Connect to a relay at another address, or again at the same, while ``run`` runs.

        ZeroMQ does not retry a refused connection: a relay refuses a new key that it does not know
        yet. Connecting to the same address again retries it.
        """
        before, self._address = self._address, address
        if self._socket is None or self._fetcher is None:
            return
        if before is not None:
            self._socket.disconnect(before.endpoint)
        connect(self._socket, address.endpoint, server_key=address.key, key=self._key)
        self._fetcher.connect(address, self._key)

    # ---- the relay -----------------------------------------------------------

    async def _heartbeat(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            join = msgspec.structs.replace(self._join, adopted=self.adopted)
            with suppress(zmq.Again):  # its queue is full: the relay is gone
                await socket.send_multipart(cut([encode(join)]), zmq.NOBLOCK)
            await asyncio.sleep(_HEARTBEAT_S)

    async def _read(
        self,
        socket: zmq.asyncio.Socket,
        fetcher: BucketFetcher,
        commands: asyncio.Queue[Order | JoinAcknowledged],
    ) -> None:
        """Record the relay's messages, also while the engine is busy, and queue its commands."""
        while True:
            frames = await socket.recv_multipart()
            try:
                command = decode_command(b"".join(frames))
            except ProtocolError as error:
                _log.error("the relay sent a malformed command: %s", error)
                continue  # the relay leaves this engine out at its deadline
            self._last_message_s = self._now()
            if isinstance(command, Admit):
                await socket.send_multipart(cut([encode(self._admit(command))]))
            elif not isinstance(command, JoinAcknowledged):
                await commands.put(command)
            elif command.relay != self._relay:
                if self._relay:
                    _log.warning("another relay serves the weights now")
                    fetcher.drop("the relay has been replaced")
                self._relay = command.relay
                await commands.put(command)

    def _admit(self, command: Admit) -> CommandOutcome:
        self.traffic.commands += 1
        if self._forwarder is None:
            return CommandOutcome(command_id=command.command_id, error="it forwards nothing")
        self._forwarder.admit(command.version, command.keys)
        return CommandOutcome(command_id=command.command_id)

    async def _execute_all(
        self,
        socket: zmq.asyncio.Socket,
        fetcher: BucketFetcher,
        commands: asyncio.Queue[Order | JoinAcknowledged],
    ) -> None:
        updates = self._updates
        while True:
            try:
                async with asyncio.timeout(_HEARTBEAT_S):
                    command = await commands.get()
            except TimeoutError:
                if updates.is_paused and self._last_message_s < self._now() - self._silence_s:
                    await updates.abandon(f"the relay was silent for {self._silence_s:g} s")
                continue
            if isinstance(command, JoinAcknowledged):
                if updates.is_paused:
                    await updates.abandon("the relay that paused it has been replaced")
                continue
            self.traffic.commands += 1
            outcome = await updates.execute(command, fetcher)
            await socket.send_multipart(cut([encode(outcome)]))
            if len(updates.failures) >= _MAX_FAILURES:
                raise PublishError(
                    f"{_MAX_FAILURES} publishes in a row failed; the last: {updates.failures[-1]}"
                )


def _updates_of(
    engine: EngineWeights,
    adapters: EngineAdapters | None,
    **common: Any,  # noqa: ANN401 arguments of both
) -> EngineUpdates:
    if adapters is None:
        return EngineUpdates(engine, **common)
    return AdapterUpdates(adapters, **common)
