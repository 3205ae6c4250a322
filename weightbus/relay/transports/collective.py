"""Buckets over a torch.distributed group of the relay and some engines, into live weights."""

import asyncio
import functools
import itertools
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in torch's stubs
from typing_extensions import override

from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.net import groups, threads
from slipstream.weightbus.net.compatibility import Libraries, why_no_collective
from slipstream.weightbus.net.rendezvous import open_store
from slipstream.weightbus.relay.member import Member
from slipstream.weightbus.relay.publication import Publication
from slipstream.weightbus.relay.transports.base import (
    MembersFailedError,
    RelayState,
    Transport,
    all_of,
)
from slipstream.wire.errors import ConfigError, PublishError
from slipstream.wire.messages.weightbus import CommandOutcome, Join, LoadBucket, OpenGroup

_log = logging.getLogger(__name__)
_POLL_S = 0.001  # the next bucket moves meanwhile
_AHEAD = 2  # buckets requested from engines before the current one is done
_group_numbers = itertools.count(1)
Backend = Literal["gloo", "nccl"]


class Collective(Transport):
    """One group of the relay, as rank 0, and some engines."""

    name: ClassVar[str] = "collective"
    needs_digests: ClassVar[bool] = False  # engines are checked as a whole
    shares_group: ClassVar[bool] = True
    writes_live: ClassVar[bool] = True
    prepare_phase: ClassVar[str] = "group"
    load_phase: ClassVar[str] = "transfer"

    def __init__(self, settings: WeightBusSection, state: RelayState) -> None:
        super().__init__(settings, state)
        self._group: EngineGroup | None = None
        self._members: list[Member] = []

    @override
    @classmethod
    def why_not(cls, join: Join, ours: Libraries) -> str:
        """Return why an engine cannot be in a group with this process; empty if it can."""
        return why_no_collective(join, ours)

    @override
    async def prepare(self, publication: Publication, members: Sequence[Member]) -> None:
        """Make the engines join a group, unless they are already in one by themselves."""
        if self._group is None or self._members != list(members):
            await self.close()
            try:
                self._group = await self._open(members)
            except (PublishError, ConfigError, RuntimeError, OSError) as error:
                if isinstance(error, MembersFailedError):
                    raise
                raise MembersFailedError(dict.fromkeys(members, str(error))) from error
            self._members = list(members)
        if self._group.device.type == "cuda":  # now, while engines generate; once per memory
            try:
                await threads.in_own_thread(publication.pin)
            except PublishError as error:
                _log.warning("%s; copies to the GPU are slow", error)

    async def _open(self, members: Sequence[Member]) -> "EngineGroup":
        settings = self._settings
        backend = settings.backend
        if backend == "auto":
            backend = "nccl" if members[0].join.device == "cuda" else "gloo"
        ranks = [1, *itertools.accumulate((m.join.num_ranks for m in members), initial=1)][1:]
        group = EngineGroup(
            f"{members[0].name}-{secrets.token_hex(4)}-{next(_group_numbers)}",
            host=settings.host,
            world_size=ranks[-1],
            timeout_s=settings.timeout_s,
        )
        rank_of = dict(zip(members, ranks, strict=False))
        joined = asyncio.create_task(threads.in_own_thread(lambda: group.join(backend)))
        try:
            await all_of(
                members,
                lambda member: member.request(
                    lambda n: OpenGroup(
                        command_id=n,
                        host=settings.host,
                        port=group.port,
                        group_name=group.name,
                        backend=backend,
                        rank=rank_of[member],
                        world_size=group.world_size,
                    )
                ),
            )
            await joined
        except BaseException:
            joined.add_done_callback(lambda task: _discard(task, group))
            raise
        return group

    @override
    async def load(self, publication: Publication, members: Sequence[Member]) -> None:
        """Broadcast every bucket; the next one is ready while one is under way."""
        group = self._group
        if group is None:
            raise MembersFailedError(dict.fromkeys(members, "it is in no group"))
        sent = _Sent(members, group.name, len(publication.snapshot.layout.buckets))
        try:
            moving: dist.Work | None = None
            for index in range(sent.num_buckets):
                sent.request(up_to=index + _AHEAD)
                # This send waits for engines behind the previous one: no pause between buckets.
                following = await group.start(
                    functools.partial(publication.on_gpu.get, index, group.device)
                )
                if moving is not None:
                    await group.finish(moving, peer_failed=sent.has_failures)
                    await sent.loaded(index - 1)
                moving = following
            if moving is not None:
                await group.finish(moving, peer_failed=sent.has_failures)
                await sent.loaded(sent.num_buckets - 1)
        except PublishError as error:
            await self.close()
            others = error.reasons if isinstance(error, MembersFailedError) else {}
            failed = dict.fromkeys(members, str(error)) | others | sent.failures()
            raise MembersFailedError(failed) from error

    @override
    def close_soon(self) -> None:
        """Leave the group in the background."""
        if self._group is not None:
            group, self._group = self._group, None
            threads.start(group.close)

    @override
    async def close(self) -> None:
        """Leave the group, which also frees engines that wait in it."""
        if self._group is not None:
            group, self._group = self._group, None
            self._members = []
            await group.leave()


class _Sent:
    """The LoadBucket commands of one publish and their outcomes."""

    def __init__(self, members: Sequence[Member], group_name: str, num_buckets: int) -> None:
        self.num_buckets = num_buckets
        self._members = members
        self._group_name = group_name
        self._outcomes: list[dict[Member, asyncio.Future[CommandOutcome]]] = []

    def request(self, *, up_to: int) -> None:
        """Request that engines load further buckets, up to but not including ``up_to``."""
        while len(self._outcomes) < min(self.num_buckets, up_to):
            index = len(self._outcomes)

            def command(number: int, index: int = index) -> LoadBucket:
                return LoadBucket(command_id=number, index=index, group_name=self._group_name)

            outcomes: dict[Member, asyncio.Future[CommandOutcome]] = {}
            self._outcomes.append(outcomes)
            for member in self._members:
                outcomes[member] = member.send(command)

    async def loaded(self, index: int) -> None:
        """Wait until all engines have loaded a bucket."""
        outcomes, what = self._outcomes[index], f"LoadBucket {index}"
        await all_of(self._members, lambda m: m.outcome(outcomes[m], what))

    def failures(self) -> dict[Member, str]:
        """Return the members that could not load a bucket, and why."""
        return {
            member: str(future.exception() or future.result().error)
            for outcomes in self._outcomes
            for member, future in outcomes.items()
            if _has_failed(future)
        }

    def has_failures(self) -> bool:
        """True if a member could not load a bucket."""
        recent = self._outcomes[-_AHEAD - 1 :]  # also the bucket that may not be loaded yet
        return any(_has_failed(future) for outcomes in recent for future in outcomes.values())


def _has_failed(future: asyncio.Future[CommandOutcome]) -> bool:
    if not future.done() or future.cancelled():
        return False
    return future.exception() is not None or bool(future.result().error)


def _discard(task: "asyncio.Task[None]", group: "EngineGroup") -> None:
    """Close a group that this process may have joined after all."""
    if not task.cancelled():
        task.exception()
    threads.start(group.close)


class EngineGroup:
    """A process group besides the default one. Rank 0 is here, engines have all others."""

    def __init__(self, name: str, *, host: str, world_size: int, timeout_s: float) -> None:
        self.name = name
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._store: TCPStore | None = open_store(host, world_size=world_size, timeout_s=timeout_s)
        self.port: int = self._store.port  # engines connect to it
        self._group: dist.ProcessGroup | None = None
        self.device = torch.device("cpu")  # place of the sent bytes

    def join(self, backend: Backend) -> None:
        """Become rank 0; blocks until a byte has reached all engines, or the timeout.

        Raises:
            PublishError: not all have joined in time.
        """
        if self._store is None:
            raise PublishError(f"group {self.name} is closed")
        if backend == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
        try:
            self._group = groups.open_group(
                backend,
                self._store,
                name=self.name,
                rank=0,
                world_size=self.world_size,
                timeout_s=self._timeout_s,
            )
            groups.pass_first_byte(self._group, self.device, timeout_s=self._timeout_s)
        except (RuntimeError, PublishError) as error:
            raise PublishError(f"not all engines joined group {self.name}: {error}") from error

    async def start(self, flat: Callable[[], Tensor]) -> dist.Work:
        """Start to send the result of ``flat`` ([num_bytes] uint8), after all earlier sends.

        On a GPU this runs in a thread: a copy may wait for the GPU, and so may NCCL even in a call
        that only starts work.
        """
        if self._group is None:
            raise PublishError(f"group {self.name} is not open")
        group = self._group

        def broadcast() -> dist.Work:
            work: dist.Work = dist.broadcast(flat(), src=0, group=group, async_op=True)
            return work

        try:
            if self.device.type == "cpu":
                return broadcast()
            async with asyncio.timeout(self._timeout_s):
                return await threads.in_own_thread(broadcast)
        except TimeoutError as error:
            raise PublishError(groups.late(self._timeout_s)) from error
        except RuntimeError as error:
            raise PublishError(f"broadcast to group {self.name} failed: {error}") from error

    async def finish(self, work: dist.Work, *, peer_failed: Callable[[], bool]) -> None:
        """Wait until a send completes; fails as soon as a peer reports a failure, or in time.

        NCCL reports failed work as complete, too: engines know whether the bytes arrived.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                while not work.is_completed():
                    if peer_failed():
                        raise PublishError(f"an engine of group {self.name} stopped receiving")
                    await asyncio.sleep(_POLL_S)
            if self.device.type == "cpu":
                work.wait()  # the work has ended: raises its error; NCCL's delays a stream
        except TimeoutError as error:
            raise PublishError(groups.late(self._timeout_s)) from error
        except RuntimeError as error:
            raise PublishError(f"broadcast to group {self.name} failed: {error}") from error

    async def leave(self) -> None:
        """Leave the group, which frees peers that wait in it; gives up at the timeout."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await threads.in_own_thread(self.close)
        except TimeoutError:
            _log.warning("group %s is not closed after %g s", self.name, self._timeout_s)

    def close(self) -> None:
        """Leave the group and block, for as long as the backend does."""
        group, self._group = self._group, None
        self._store = None  # engines watch the store while they wait
        if group is not None:
            groups.release(group)
