"""Generator side of the weight bus: joins, obeys the relay's commands, reports outcomes."""

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
    RelayDoor,
    Verify,
)

_log = logging.getLogger(__name__)
_HEARTBEAT_S = 1.0
_MAX_FAILURES = 5
Order: TypeAlias = (
    OpenGroup | Abandon | Offer | Receive | Pause | LoadBucket | LoadReceived | Verify | Commit
)
_MAX_COMMANDS = 64  # that wait; the relay sends a few ahead


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
        """Prepare to join.

        Args:
            engine: whose weights are kept up to date.
            join: how it is announced; ``adopted`` is filled in.
            tensors: that the engine's model has.
            staging: keeps versions that are received before they are loaded; whoever made it
                closes it.
            silence_s: a relay that says nothing for so long is gone.
            fetch_timeout_s: a bucket that takes longer has failed.
            on_pause: is called before the engine pauses.
            on_adopt: is called with the version that it generates with from now on.
            key: what this host proves itself with to a relay on another one.
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
        self._door: RelayDoor | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._now = now
        self._manifest: WeightManifest | None = None
        self._received: Path | None = None
        self._group = ""  # that the engine is in
        self._before: PolicyVersion | None = None  # what a paused engine ran
        self._is_paused = False
        self._is_torn = False
        self._has_failed = False  # in the publish that is going on
        self._failures: list[str] = []  # of publishes since the last one that was adopted
        self._relay = ""  # which one we obey
        self._heard_s = now()
        self._fetcher: BucketFetcher | None = None
        self.adopted: PolicyVersion | None = None

    async def run(self, door: RelayDoor) -> None:
        """Serve the relay until cancelled.

        Raises:
            PublishError: the engine took part in too many publishes that failed.
            ConfigError: the relay wants a key, and there is none.
        """
        context = zmq.asyncio.Context()
        self._socket = socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.SNDHWM, _MAX_COMMANDS)
        self._fetcher = BucketFetcher(context, timeout_s=self._fetch_timeout_s)
        commands: asyncio.Queue[Command] = asyncio.Queue(_MAX_COMMANDS)
        try:
            self.move(door)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._heartbeat(socket))
                group.create_task(self._read(socket, commands))
                group.create_task(self._obey_all(socket, commands))
        except* PublishError as errors:
            raise PublishError(str(errors.exceptions[0])) from errors
        finally:
            with suppress(zmq.Again):  # nobody is there to be told
                await socket.send(encode(Leave(name=self._join.name)), zmq.NOBLOCK)
            socket.close()
            self._fetcher.close()
            self._socket = self._fetcher = self._door = None
            context.term()

    @property
    def silent_s(self) -> float:
        """Return for how long the relay has said nothing."""
        return self._now() - self._heard_s

    def move(self, door: RelayDoor) -> None:
        """Connect anew, to a relay at another place or the same, while ``run`` runs.

        The same again is no waste: ZeroMQ does not try again where it was refused once, as by a
        relay that has not heard of a new key yet.
        """
        before, self._door = self._door, door
        if self._socket is None or self._fetcher is None:
            return
        if before is not None:
            self._socket.disconnect(before.endpoint)
        connect(self._socket, door.endpoint, server_key=door.key, key=self._key)
        self._fetcher.connect(door, self._key)

    # ---- the relay -----------------------------------------------------------

    async def _heartbeat(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            join = msgspec.structs.replace(self._join, adopted=self.adopted)
            with suppress(zmq.Again):  # many wait already for a relay that is gone
                await socket.send(encode(join), zmq.NOBLOCK)
            await asyncio.sleep(_HEARTBEAT_S)

    async def _read(self, socket: zmq.asyncio.Socket, commands: asyncio.Queue[Command]) -> None:
        """Note that the relay lives, whatever the engine is doing, and queue what it wants."""
        while True:
            frames = await socket.recv_multipart()
            try:
                command = decode_command(b"".join(frames))
            except ProtocolError as error:
                _log.error("the relay wants something unreadable: %s", error)
                continue  # it runs into its deadline, and leaves us out
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

    async def _obey_all(self, socket: zmq.asyncio.Socket, commands: asyncio.Queue[Command]) -> None:
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
            await socket.send(encode(await self._carry_out(command)))
            if len(self._failures) >= _MAX_FAILURES:
                raise PublishError(
                    f"{_MAX_FAILURES} publishes in a row failed; the last: {self._failures[-1]}"
                )

    # ---- commands ------------------------------------------------------------

    async def _carry_out(self, command: Order) -> Outcome:
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
                    if self._is_torn or self._has_failed:  # else it was no fault of ours
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
            if self._door is not None and self._door.key:
                fetcher.connect(self._door, self._key)  # it may have been refused before
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
        await self._leave_group()  # an update that a collective left open would catch the load
        self._is_torn = True
        await self._engine.load_folder(self._received)

    async def _commit(self, version: PolicyVersion) -> None:
        if version != self._offered.version or not self._is_torn:
            raise PublishError(f"{version.label} was not loaded")
        await self._engine.label(version)
        self._is_torn = False
        self._before = version  # whatever becomes of the next line
        if self._received is None:
            self._staging.free()  # what comes next comes over the collective
        await self._resume(version)
        self._failures.clear()

    async def _resume(self, version: PolicyVersion) -> None:
        await self._engine.resume()
        self._is_paused = False
        self.adopted = version
        self._on_adopt(version)

    async def _abandon(self, why: str) -> None:
        """Free the engine from a publish that failed; it generates again if no byte has moved."""
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
