"""Generator side of the weight bus: joins, executes the relay's commands, reports outcomes."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import msgspec
import zmq
import zmq.asyncio

from slipstream.weightbus.agent.engine import EngineWeights
from slipstream.weightbus.agent.fetcher import BucketFetcher
from slipstream.weightbus.agent.staging import Staging, check_folder
from slipstream.weightbus.agent.tensor_set import TensorSet, mismatch
from slipstream.weightbus.net.curve import connect
from slipstream.wire.errors import EngineError, ProtocolError, PublishError
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.codec import decode_command, encode
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import (
    Abandon,
    Command,
    Commit,
    Heard,
    Join,
    Leave,
    LoadBucket,
    LoadReceived,
    Offer,
    OpenGroup,
    Outcome,
    Pause,
    Receive,
    RelayAddress,
    Verify,
)

_log = logging.getLogger(__name__)
_HEARTBEAT_S = 1.0
_MAX_FAILURES = 5
Order: TypeAlias = (
    OpenGroup | Abandon | Offer | Receive | Pause | LoadBucket | LoadReceived | Verify | Commit
)
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
        on_adopt: Callable[[PolicyVersion], None],
        key: ClientKey | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the agent of an engine; ``run`` joins.

        Args:
            engine: to keep on the newest version.
            join: its announcement; ``adopted`` is filled in.
            tensors: of the engine's model.
            staging: keeps received versions until they are loaded; the caller closes it.
            silence_s: a relay without a message for this long is gone.
            fetch_timeout_s: limit for one bucket.
            on_pause: called before the engine pauses.
            on_adopt: called with the version that the engine generates with from now on.
            key: that this host proves to a relay on another one.
            now: monotonic seconds.
        """
        self._engine = engine
        self._join = join
        self._tensors = tensors
        self._staging = staging
        self._silence_s = silence_s
        self._fetch_timeout_s = fetch_timeout_s
        self._on_pause = on_pause
        self._on_adopt = on_adopt
        self._key = key
        self._address: RelayAddress | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._now = now
        self._manifest: WeightManifest | None = None
        self._received: Path | None = None
        self._group = ""  # of the engine's collective; empty without one
        self._before: PolicyVersion | None = None  # that a paused engine ran
        self._is_paused = False
        self._is_torn = False
        self._has_failed = False  # in the current publish
        self._failures: list[str] = []  # of publishes since the last adopted one
        self._relay = ""  # incarnation of the current relay
        self._heard_s = now()
        self._fetcher: BucketFetcher | None = None
        self.adopted: PolicyVersion | None = None

    async def run(self, address: RelayAddress) -> None:
        """Serve the relay until cancelled.

        Raises:
            PublishError: too many publishes in a row failed at this engine.
            ConfigError: the relay requires a key, and there is none.
        """
        context = zmq.asyncio.Context()
        self._socket = socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.SNDHWM, _MAX_COMMANDS)
        self._fetcher = BucketFetcher(context, timeout_s=self._fetch_timeout_s)
        commands: asyncio.Queue[Command] = asyncio.Queue(_MAX_COMMANDS)
        try:
            self.move(address)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._heartbeat(socket))
                group.create_task(self._read(socket, commands))
                group.create_task(self._execute_all(socket, commands))
        except* PublishError as errors:
            raise PublishError(str(errors.exceptions[0])) from errors
        finally:
            with suppress(zmq.Again):  # the relay is gone
                await socket.send(encode(Leave(name=self._join.name)), zmq.NOBLOCK)
            socket.close()
            self._fetcher.close()
            self._socket = self._fetcher = self._address = None
            context.term()

    @property
    def silent_s(self) -> float:
        """Seconds since the last message of the relay."""
        return self._now() - self._heard_s

    def move(self, address: RelayAddress) -> None:
        """Connect to a relay at another address or the same, while ``run`` runs.

        ZeroMQ does not retry a connection that was refused, as by a relay that does not know a new
        key yet: connecting to the same address again does.
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
                await socket.send(encode(join), zmq.NOBLOCK)
            await asyncio.sleep(_HEARTBEAT_S)

    async def _read(self, socket: zmq.asyncio.Socket, commands: asyncio.Queue[Command]) -> None:
        """Record that the relay lives, also while the engine is busy, and queue its commands."""
        while True:
            frames = await socket.recv_multipart()
            try:
                command = decode_command(b"".join(frames))
            except ProtocolError as error:
                _log.error("the relay sent a malformed command: %s", error)
                continue  # the relay leaves this engine out at its deadline
            self._heard_s = self._now()
            if not isinstance(command, Heard):
                await commands.put(command)
            elif command.relay != self._relay:
                if self._relay:
                    _log.warning("another relay serves the weights now")
                    if self._fetcher is not None:
                        self._fetcher.drop("the relay has been replaced")
                self._relay = command.relay
                await commands.put(command)

    async def _execute_all(
        self, socket: zmq.asyncio.Socket, commands: asyncio.Queue[Command]
    ) -> None:
        while True:
            try:
                command = await asyncio.wait_for(commands.get(), _HEARTBEAT_S)
            except TimeoutError:
                if self._is_paused and self._heard_s < self._now() - self._silence_s:
                    await self._abandon(f"the relay was silent for {self._silence_s:g} s")
                continue
            if isinstance(command, Heard):
                if self._is_paused:
                    await self._abandon("the relay that paused it has been replaced")
                continue
            await socket.send(encode(await self._execute(command)))
            if len(self._failures) >= _MAX_FAILURES:
                raise PublishError(
                    f"{_MAX_FAILURES} publishes in a row failed; the last: {self._failures[-1]}"
                )

    # ---- commands ------------------------------------------------------------

    async def _execute(self, command: Order) -> Outcome:
        number = command.command_id
        try:
            match command:
                case Pause():
                    return Outcome(command_id=number, num_in_flight=await self._pause())
                case Verify(wants_checksums=wanted):
                    if self._group and self._received is None:
                        await self._engine.end_update()
                    checksums = await self._engine.checksums() if wanted else {}
                    return Outcome(command_id=number, checksums=checksums)
                case Offer():
                    self._offer(command)
                case OpenGroup():
                    await self._open_group(command)
                case Receive(path=path):
                    self._received = await self._receive(path)
                case LoadBucket(index=index, group_name=group_name):
                    await self._load_bucket(index, group_name)
                case LoadReceived():
                    await self._load_received()
                case Commit(version=version):
                    await self._commit(version)
                case Abandon(reason=reason):
                    if self._is_torn or self._has_failed:  # else another engine's failure
                        self._failures.append(reason)
                    await self._abandon(reason)
        except (EngineError, PublishError) as error:
            self._has_failed = True
            _log.warning("%s failed: %s", type(command).__name__, error)
            return Outcome(command_id=number, error=str(error))
        return Outcome(command_id=number)

    def _offer(self, offer: Offer) -> None:
        manifest = offer.manifest
        if difference := mismatch(manifest, self._tensors):
            raise PublishError(f"refused {manifest.version.label}: {difference}")
        runs = self.adopted or self._before
        if runs is not None and manifest.version < runs:
            raise PublishError(f"refused {manifest.version.label}: this engine ran {runs.label}")
        self._manifest = manifest
        self._received = None
        self._has_failed = False

    async def _open_group(self, command: OpenGroup) -> None:
        await self._leave_group()
        await self._engine.open_group(
            host=command.host,
            port=command.port,
            group_name=command.group_name,
            rank=command.rank,
            world_size=command.world_size,
            backend=command.backend,
        )
        self._group = command.group_name
        _log.info("in a collective of %d", command.world_size)

    async def _leave_group(self) -> None:
        if self._group:
            group, self._group = self._group, ""
            await self._engine.close_group(group)

    async def _receive(self, path: str) -> Path:
        manifest = self._offered
        if path:
            await asyncio.to_thread(check_folder, Path(path), manifest)
            return Path(path)
        fetcher = self._fetcher
        if fetcher is None:
            raise PublishError("the weight bus is not running")
        version = manifest.version
        try:
            return await self._staging.receive(
                manifest, lambda index: fetcher.fetch(version, index)
            )
        except PublishError:
            if self._address is not None and self._address.key:
                fetcher.connect(self._address, self._key)  # it may have been refused before
            raise

    async def _pause(self) -> int:
        self._on_pause()
        if not self._is_paused:
            self._before = self.adopted
        self._is_paused = True
        self.adopted = None
        return await self._engine.pause()

    async def _load_bucket(self, index: int, group_name: str) -> None:
        buckets = self._offered.buckets
        if not self._is_paused or group_name != self._group:
            raise PublishError(f"bucket {index} comes out of order")
        if index == 0:
            self._is_torn = True
            await self._engine.begin_update()
        last = index == len(buckets) - 1
        await self._engine.load_bucket(buckets[index], group_name=group_name, last=last)

    async def _load_received(self) -> None:
        if not self._is_paused or self._received is None:
            raise PublishError("nothing was received, or the engine is not paused")
        await (
            self._leave_group()
        )  # an update that a collective left open would interfere with the load
        self._is_torn = True
        await self._engine.load_folder(self._received)

    async def _commit(self, version: PolicyVersion) -> None:
        if version != self._offered.version or not self._is_torn:
            raise PublishError(f"{version.label} was not loaded")
        await self._engine.label(version)
        self._is_torn = False
        self._before = version  # also if the next line fails
        if self._received is None:
            self._staging.free()  # the next version arrives over the collective
        await self._resume(version)
        self._failures.clear()

    async def _resume(self, version: PolicyVersion) -> None:
        await self._engine.resume()
        self._is_paused = False
        self.adopted = version
        self._on_adopt(version)

    async def _abandon(self, why: str) -> None:
        """Leave a failed publish; the engine generates again if no byte has moved."""
        can_resume = self._is_paused and not self._is_torn and self._before is not None
        if not self._group and not can_resume:
            return
        _log.warning("publish abandoned: %s", why)
        await self._leave_group()
        if can_resume and self._before is not None:
            try:
                await self._resume(self._before)
            except EngineError as error:
                _log.warning("the engine stays paused: %s", error)

    @property
    def _offered(self) -> WeightManifest:
        if self._manifest is None:
            raise PublishError("no version was offered")
        return self._manifest
