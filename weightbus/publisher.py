"""Learner side of the weight bus: every publish is a transaction with each of its members.

offer -> transfer -> verify -> commit -> adopt. Newest wins: a version that is ready before the
older one left replaces it. Each member has a group of its own, so that its death concerns nobody
else; members are served in parallel and left out at their deadline.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

import zmq
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
    Leave,
    LoadBucket,
    Offer,
    OpenGroup,
    Outcome,
    Pause,
    PublishRecord,
    Verify,
)
from wire.codec import decode_agent_message, encode
from wire.errors import ProtocolError, PublishError
from wire.manifest import WeightManifest
from wire.versions import PolicyVersion

_log = logging.getLogger(__name__)
_RETRY_S = 1.0


@dataclass(slots=True)
class Member:
    """One engine as its agent described it last."""

    peer: bytes  # routing id of its agent
    join: Join
    heard_s: float
    adopted: PolicyVersion | None = None
    group: EngineGroup | None = None
    not_before_s: float = 0.0  # after a failure


@dataclass(slots=True)
class TransferReport:
    """What one member's transaction took."""

    seconds: float = 0.0
    num_in_flight: int = 0
    engine_digest: str = ""
    phase_seconds: dict[str, float] = field(default_factory=dict)
    error: str = ""


class Publisher:
    """Serves the newest snapshot to every engine that joined. Lives in one event loop."""

    def __init__(
        self,
        settings: WeightBusSection,
        *,
        on_record: Callable[[PublishRecord], Awaitable[None]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._on_record = on_record
        self._now = now
        self._members: dict[str, Member] = {}
        self._newest: WeightSnapshot | None = None
        self._wake = asyncio.Event()
        self._command_ids = itertools.count(1)
        self._group_numbers = itertools.count(1)
        self._outcomes: dict[int, asyncio.Future[Outcome]] = {}
        self._socket: zmq.asyncio.Socket | None = None

    def submit(self, snapshot: WeightSnapshot) -> None:
        """Offer a version; returns at once."""
        self._newest = snapshot
        self._wake.set()

    def lags_behind(self) -> list[str]:
        """Return the members that do not run the newest version yet."""
        if self._newest is None:
            return []
        newest = self._newest.version
        return [name for name, member in self._members.items() if member.adopted != newest]

    async def run(self, endpoint: str) -> None:
        """Serve until cancelled."""
        context = zmq.asyncio.Context()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._listen(self._socket))
                while True:
                    await self._publish_once()
        finally:
            for member in self._members.values():
                self._close_group(member)
            self._socket.close()
            context.term()

    # ---- membership ----------------------------------------------------------

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            peer, *frames = await socket.recv_multipart()
            try:
                message = decode_agent_message(b"".join(frames))
            except ProtocolError as error:
                _log.warning("malformed message on the weight bus: %s", error)
                continue
            match message:
                case Join():
                    self._joined(peer, message)
                case Leave(name=name):
                    if name in self._members:
                        self._forget(name, "left")
                case Outcome(command_id=command_id):
                    future = self._outcomes.get(command_id)
                    if future is not None and not future.done():
                        future.set_result(message)

    def _joined(self, peer: bytes, join: Join) -> None:
        known = self._members.get(join.name)
        if known is not None and known.join.incarnation == join.incarnation:
            known.heard_s = self._now()
            known.peer = peer
            return
        if known is not None:
            self._forget(join.name, "restarted")
        _log.info("%s joined the weight bus", join.name)
        self._members[join.name] = Member(peer, join, self._now(), adopted=join.adopted)
        self._wake.set()

    def _forget(self, name: str, why: str) -> None:
        _log.info("%s is off the weight bus: %s", name, why)
        self._close_group(self._members.pop(name))

    def _close_group(self, member: Member) -> None:
        if member.group is not None:
            group, member.group = member.group, None
            group.close()

    def _drop_silent(self) -> None:
        limit = self._now() - self._settings.member_silence_s
        for name in [n for n, m in self._members.items() if m.heard_s < limit]:
            self._forget(name, f"silent for {self._settings.member_silence_s:.0f} s")

    # ---- one publish ---------------------------------------------------------

    async def _publish_once(self) -> None:
        """Bring everyone who lags behind to the newest version, or wait for a reason to."""
        self._drop_silent()
        snapshot = self._newest
        due = []
        if snapshot is not None:
            now = self._now()
            due = [
                member
                for member in self._members.values()
                if member.adopted != snapshot.version and member.not_before_s <= now
            ]
        if snapshot is None or not due:
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), _RETRY_S)
            except TimeoutError:
                return
            return
        await self._publish_to(due, snapshot)

    async def _publish_to(self, members: list[Member], snapshot: WeightSnapshot) -> None:
        manifest = await asyncio.to_thread(
            snapshot.manifest, bucket_bytes=self._settings.bucket_bytes
        )
        expected = await asyncio.to_thread(expected_checksums, snapshot.tensors)
        at_s = time.time()
        reports = await asyncio.gather(
            *(self._transact(member, snapshot, manifest, expected) for member in members)
        )
        by_name = {m.join.name: r for m, r in zip(members, reports, strict=True)}
        phases: dict[str, float] = {}
        for report in reports:
            for phase, seconds in report.phase_seconds.items():
                phases[phase] = max(phases.get(phase, 0.0), seconds)
        await self._on_record(
            PublishRecord(
                version=snapshot.version,
                at_s=at_s,
                adopted_by={n: r.seconds for n, r in by_name.items() if not r.error},
                failed={n: r.error for n, r in by_name.items() if r.error},
                num_in_flight={n: r.num_in_flight for n, r in by_name.items() if not r.error},
                engine_digests={n: r.engine_digest for n, r in by_name.items() if not r.error},
                phase_seconds=phases,
                num_bytes=manifest.num_bytes,
            )
        )

    async def _transact(
        self,
        member: Member,
        snapshot: WeightSnapshot,
        manifest: WeightManifest,
        expected: dict[str, str],
    ) -> TransferReport:
        report = TransferReport()
        started = self._now()
        try:
            await self._transfer(member, snapshot, manifest, expected, report)
        except PublishError as error:
            report.error = str(error)
            _log.warning("%s left out of %s: %s", member.join.name, snapshot.version.label, error)
            await self._abandon(member, str(error))
        else:
            member.adopted = snapshot.version
        report.seconds = self._now() - started
        return report

    async def _transfer(
        self,
        member: Member,
        snapshot: WeightSnapshot,
        manifest: WeightManifest,
        expected: dict[str, str],
        report: TransferReport,
    ) -> None:
        clock = _Laps(self._now, report.phase_seconds)
        await self._tell(member, lambda n: Offer(command_id=n, manifest=manifest))
        group = member.group or await self._open_group(member)
        clock.lap("offer")
        paused = await self._tell(member, lambda n: Pause(command_id=n))
        report.num_in_flight = paused.num_in_flight
        clock.lap("pause")
        for index, bucket in enumerate(manifest.buckets):
            receiving = self._send(member, _load_bucket(index, group.name))
            future = await receiving
            await group.broadcast(snapshot.flat(bucket), peer_failed=_has_failed(future))
            await self._outcome(member, future, "LoadBucket")
        clock.lap("transfer")
        verified = await self._tell(member, lambda n: Verify(command_id=n))
        report.engine_digest = digest_of(verified.checksums)
        if member.join.device == "cpu":
            wrong = differing(expected, verified.checksums)
            if wrong:
                raise PublishError(f"{len(wrong)} tensors differ in the engine: {wrong[:3]}")
        clock.lap("verify")
        await self._tell(member, lambda n: Commit(command_id=n))
        clock.lap("commit")

    async def _abandon(self, member: Member, reason: str) -> None:
        """After a failure: destroy our group first, which frees the engine, then let it clean up.

        The engine stays paused; the next attempt sends everything again over a new group.
        """
        group, member.group = member.group, None
        member.adopted = None
        member.not_before_s = self._now() + _RETRY_S
        name = ""
        if group is not None:
            name = group.name
            group.close()
        try:
            await self._tell(
                member, lambda n: CloseGroup(command_id=n, group_name=name, reason=reason)
            )
        except PublishError as error:
            _log.warning("%s did not clean up: %s", member.join.name, error)

    async def _open_group(self, member: Member) -> EngineGroup:
        settings = self._settings
        backend: Literal["gloo", "nccl"] = "nccl" if member.join.device == "cuda" else "gloo"
        group = EngineGroup(
            f"{member.join.name}-{member.join.incarnation}-{next(self._group_numbers)}",
            host=settings.host,
            world_size=1 + member.join.num_ranks,
            timeout_s=settings.timeout_s,
        )
        member.group = group
        joined = asyncio.create_task(asyncio.to_thread(group.join, backend))
        try:
            await self._tell(
                member,
                lambda n: OpenGroup(
                    command_id=n,
                    host=settings.host,
                    port=group.port,
                    group_name=group.name,
                    backend=backend,
                ),
            )
        finally:
            await joined
        return group

    # ---- commands ------------------------------------------------------------

    async def _tell(self, member: Member, command: Callable[[int], Command]) -> Outcome:
        future = await self._send(member, command)
        return await self._outcome(member, future, "command")

    async def _send(
        self, member: Member, command: Callable[[int], Command]
    ) -> asyncio.Future[Outcome]:
        if self._socket is None:
            raise PublishError("the publisher is not running")
        number = next(self._command_ids)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._outcomes[number] = future
        future.add_done_callback(lambda _: self._outcomes.pop(number, None))
        await self._socket.send_multipart([member.peer, encode(command(number))])
        return future

    async def _outcome(self, member: Member, future: asyncio.Future[Outcome], what: str) -> Outcome:
        try:
            outcome = await asyncio.wait_for(future, self._settings.timeout_s)
        except TimeoutError as error:
            raise PublishError(
                f"{member.join.name} did not answer {what} in {self._settings.timeout_s:.0f} s "
                "(weightbus.timeout_s)"
            ) from error
        if outcome.error:
            raise PublishError(f"{member.join.name}: {outcome.error}")
        return outcome


def _load_bucket(index: int, group_name: str) -> Callable[[int], Command]:
    return lambda number: LoadBucket(command_id=number, index=index, group_name=group_name)


def _has_failed(future: asyncio.Future[Outcome]) -> Callable[[], bool]:
    return lambda: future.done() and (future.cancelled() or bool(future.result().error))


class _Laps:
    """Seconds between calls, by name."""

    def __init__(self, now: Callable[[], float], seconds: dict[str, float]) -> None:
        self._now = now
        self._seconds = seconds
        self._since = now()

    def lap(self, phase: str) -> None:
        now = self._now()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
        self._since = now
