"""One engine on the weight bus, and the transaction that brings it to a version."""

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import zmq.asyncio

from weightbus.collective_transport import EngineGroup
from weightbus.config import WeightBusSection
from weightbus.engine_checksums import differing, digest_of, expected_checksums
from weightbus.snapshot import WeightSnapshot
from wire.bus import (
    CloseGroup,
    Command,
    Commit,
    Join,
    LoadBucket,
    Offer,
    OpenGroup,
    Outcome,
    Pause,
    PublishRecord,
    Verify,
)
from wire.codec import encode
from wire.errors import PublishError
from wire.manifest import WeightManifest
from wire.versions import PolicyVersion

_command_ids = itertools.count(1)
_group_numbers = itertools.count(1)


@dataclass(frozen=True)
class Publish:
    """A version with all that every transfer of it needs; computed once."""

    snapshot: WeightSnapshot
    manifest: WeightManifest
    gpu_digests: set[str] = field(default_factory=set)  # at most one: what the first GPU held

    @cached_property
    def expected(self) -> dict[str, str]:
        """Return the checksums of an engine on a CPU that holds this version."""
        return expected_checksums(self.snapshot.tensors)


class Member:
    """One engine as its agent described it last. Its agent carries out one command at a time."""

    def __init__(
        self,
        peer: bytes,
        join: Join,
        socket: zmq.asyncio.Socket,
        settings: WeightBusSection,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peer = peer  # routing id of its agent
        self.join = join
        self.heard_s = now()
        self.adopted: PolicyVersion | None = join.adopted
        self._socket = socket
        self._settings = settings
        self._now = now
        self._group: EngineGroup | None = None
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}

    def take(self, outcome: Outcome) -> None:
        """Hand an outcome to whoever waits for it."""
        future = self._waiting.get(outcome.command_id)
        if future is not None and not future.done():
            future.set_result(outcome)

    def leave(self, why: str) -> None:
        """End at once whatever is going on with this member: its agent will not answer."""
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(PublishError(f"{self.join.name} {why}"))
        self._close_group()

    async def bring_to(self, publish: Publish) -> PublishRecord:
        """Do the whole transaction: offer, transfer, verify, commit, adopt.

        Never raises for what the engine or its agent does: the record says what failed. A torn
        engine stays paused until a later transaction succeeds, which sends everything again.
        """
        name, version = self.join.name, publish.snapshot.version
        laps = Laps(self._now)
        at_s, started = time.time(), self._now()
        num_in_flight, digest = 0, ""
        try:
            num_in_flight, digest = await self._transfer(publish, laps)
        except PublishError as error:
            await self._abandon(str(error))
            return PublishRecord(
                version=version, at_s=at_s, adopted_by={}, failed={name: str(error)}
            )
        self.adopted = version
        return PublishRecord(
            version=version,
            at_s=at_s,
            adopted_by={name: self._now() - started},
            num_in_flight={name: num_in_flight},
            engine_digests={name: digest},
            phase_seconds=laps.seconds,
            num_bytes=publish.manifest.num_bytes,
        )

    async def _transfer(self, publish: Publish, laps: "Laps") -> tuple[int, str]:
        """Return the generations in flight at the pause, and the digest of the engine."""
        manifest = publish.manifest
        await self._tell(lambda n: Offer(command_id=n, manifest=manifest))
        group = self._group or await self._open_group()
        laps.lap("offer")
        paused = await self._tell(lambda n: Pause(command_id=n))
        laps.lap("pause")
        for index, bucket in enumerate(manifest.buckets):
            future = await self._send(_load_bucket(index, group.name))
            await group.broadcast(publish.snapshot.flat(bucket), peer_failed=_has_failed(future))
            await self._outcome(future, f"LoadBucket {index}")
        laps.lap("transfer")
        verified = await self._tell(lambda n: Verify(command_id=n))
        digest = digest_of(verified.checksums)
        await self._check(publish, verified.checksums, digest)
        laps.lap("verify")
        await self._tell(lambda n: Commit(command_id=n))
        laps.lap("commit")
        return paused.num_in_flight, digest

    async def _check(self, publish: Publish, checksums: dict[str, str], digest: str) -> None:
        if self.join.device == "cpu":
            expected = await asyncio.to_thread(lambda: publish.expected)
            wrong = differing(expected, checksums)
            if wrong:
                raise PublishError(f"{len(wrong)} tensors differ in the engine: {wrong[:3]}")
            return
        if publish.gpu_digests and digest not in publish.gpu_digests:
            raise PublishError("the engine holds other tensors than the other engines")
        publish.gpu_digests.add(digest)

    async def _abandon(self, reason: str) -> None:
        """After a failure: destroy our group first, which frees the engine, then let it clean up.

        The engine stays paused; the next attempt sends everything again over a new group.
        """
        name = self._group.name if self._group is not None else ""
        self._close_group()
        self.adopted = None
        try:
            await self._tell(lambda n: CloseGroup(command_id=n, group_name=name, reason=reason))
        except PublishError:
            return  # it is gone, and will be found silent or join again

    async def _open_group(self) -> EngineGroup:
        settings, join = self._settings, self.join
        by_device: Literal["gloo", "nccl"] = "nccl" if join.device == "cuda" else "gloo"
        backend = by_device if settings.backend == "auto" else settings.backend
        group = EngineGroup(
            f"{join.name}-{join.incarnation}-{next(_group_numbers)}",
            host=settings.host,
            world_size=1 + join.num_ranks,
            timeout_s=settings.timeout_s,
        )
        joined = asyncio.create_task(asyncio.to_thread(group.join, backend))
        joined.add_done_callback(lambda task: task.cancelled() or task.exception())
        await self._tell(
            lambda n: OpenGroup(
                command_id=n,
                host=settings.host,
                port=group.port,
                group_name=group.name,
                backend=backend,
            )
        )
        await joined
        self._group = group
        return group

    def _close_group(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            group.close()

    # ---- commands ------------------------------------------------------------

    async def _tell(self, command: Callable[[int], Command]) -> Outcome:
        future = await self._send(command)
        return await self._outcome(future, type(command(0)).__name__)

    async def _send(self, command: Callable[[int], Command]) -> asyncio.Future[Outcome]:
        number = next(_command_ids)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        future.add_done_callback(lambda _: self._waiting.pop(number, None))
        await self._socket.send_multipart([self.peer, encode(command(number))])
        return future

    async def _outcome(self, future: asyncio.Future[Outcome], what: str) -> Outcome:
        try:
            outcome = await asyncio.wait_for(future, self._settings.timeout_s)
        except TimeoutError as error:
            raise PublishError(
                f"{self.join.name} did not answer {what} in {self._settings.timeout_s:.0f} s "
                "(weightbus.timeout_s)"
            ) from error
        if outcome.error:
            raise PublishError(f"{what}: {outcome.error}")
        return outcome


def _load_bucket(index: int, group_name: str) -> Callable[[int], Command]:
    return lambda number: LoadBucket(command_id=number, index=index, group_name=group_name)


def _has_failed(future: asyncio.Future[Outcome]) -> Callable[[], bool]:
    def failed() -> bool:
        if not future.done():
            return False
        return future.cancelled() or future.exception() is not None or bool(future.result().error)

    return failed


class Laps:
    """Seconds between calls, by name."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since = now()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """End the phase that runs, under this name."""
        now = self._now()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now
