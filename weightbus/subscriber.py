"""Generator side of the weight bus: joins, obeys the publisher's commands, reports outcomes."""

import asyncio
import logging
from collections.abc import Callable

import zmq
import zmq.asyncio

from weightbus.engine import EngineWeights
from weightbus.tensor_set import Shapes, mismatch
from wire.bus import (
    CloseGroup,
    Command,
    Commit,
    Join,
    Leave,
    LoadBucket,
    Offer,
    OpenGroup,
    Outcome,
    Pause,
    Verify,
)
from wire.codec import decode_command, encode
from wire.errors import EngineError, PublishError
from wire.manifest import WeightManifest
from wire.versions import PolicyVersion

_log = logging.getLogger(__name__)
_HEARTBEAT_S = 1.0
_MAX_FAILURES = 5


class Subscriber:
    """Keeps one engine on the newest published version."""

    def __init__(
        self,
        engine: EngineWeights,
        *,
        join: Join,
        shapes: Shapes,
        on_pause: Callable[[], None],
        on_adopt: Callable[[PolicyVersion], None],
    ) -> None:
        self._engine = engine
        self._join = join
        self._shapes = shapes
        self._on_pause = on_pause
        self._on_adopt = on_adopt
        self._manifest: WeightManifest | None = None
        self._failures: list[str] = []  # of publishes since the last one that was adopted
        self.adopted: PolicyVersion | None = None

    async def run(self, endpoint: str) -> None:
        """Serve the publisher until cancelled.

        Raises:
            PublishError: the engine took part in too many publishes that failed.
        """
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 200)
        socket.connect(endpoint)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._heartbeat(socket))
                while True:
                    (frame,) = await socket.recv_multipart()
                    command = decode_command(frame)
                    outcome = await self._carry_out(command)
                    await socket.send(encode(outcome))
                    if len(self._failures) >= _MAX_FAILURES:
                        raise PublishError(
                            f"{_MAX_FAILURES} publishes in a row failed; the last: "
                            f"{self._failures[-1]}"
                        )
        finally:
            socket.send(encode(Leave(name=self._join.name)), zmq.NOBLOCK)
            socket.close()
            context.term()

    async def _heartbeat(self, socket: zmq.asyncio.Socket) -> None:
        join = self._join
        while True:
            await socket.send(
                encode(
                    Join(
                        name=join.name,
                        incarnation=join.incarnation,
                        device=join.device,
                        torch_version=join.torch_version,
                        num_ranks=join.num_ranks,
                        adopted=self.adopted,
                    )
                )
            )
            await asyncio.sleep(_HEARTBEAT_S)

    async def _carry_out(self, command: Command) -> Outcome:
        number = command.command_id
        try:
            match command:
                case Pause():
                    return Outcome(command_id=number, num_in_flight=await self._pause())
                case Verify():
                    await self._engine.end_update()
                    return Outcome(command_id=number, checksums=await self._engine.checksums())
                case _:
                    await self._obey(command)
        except (EngineError, PublishError) as error:
            _log.warning("%s failed: %s", type(command).__name__, error)
            return Outcome(command_id=number, error=str(error))
        return Outcome(command_id=number)

    async def _pause(self) -> int:
        self._on_pause()
        num_in_flight = await self._engine.pause()
        await self._engine.begin_update()
        return num_in_flight

    async def _obey(self, command: OpenGroup | CloseGroup | Offer | LoadBucket | Commit) -> None:
        match command:
            case OpenGroup(host=host, port=port, group_name=group_name, backend=backend):
                await self._engine.open_group(
                    host=host,
                    port=port,
                    group_name=group_name,
                    world_size=1 + self._join.num_ranks,
                    backend=backend,
                )
            case CloseGroup(group_name=group_name, reason=reason):
                await self._engine.close_group(group_name)
                self._failures.append(reason)
            case Offer(manifest=manifest):
                self._check(manifest)
                self._manifest = manifest
            case LoadBucket(index=index, group_name=group_name):
                buckets = self._offered.buckets
                last = index == len(buckets) - 1
                await self._engine.load_bucket(buckets[index], group_name=group_name, last=last)
            case Commit():
                version = self._offered.version
                await self._engine.label(version)
                await self._engine.resume()
                self._failures.clear()
                self.adopted = version
                self._on_adopt(version)

    @property
    def _offered(self) -> WeightManifest:
        if self._manifest is None:
            raise PublishError("no version was offered")
        return self._manifest

    def _check(self, manifest: WeightManifest) -> None:
        if difference := mismatch(manifest, self._shapes):
            raise PublishError(f"refused {manifest.version.label}: {difference}")
        if self.adopted is not None and manifest.version < self.adopted:
            raise PublishError(
                f"refused {manifest.version.label}: this engine runs {self.adopted.label}"
            )
