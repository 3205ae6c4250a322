"""Answers the learner and the engines of a command server, over ZeroMQ.

The holders of samples are known in memory alone: a generator names those it has whenever it asks,
and loses them when it is silent. Samples may be drawn twice then, and count once.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import zmq

from slipstream.broker.commands.log import CommandLog
from slipstream.broker.commands.waiting import ENGINES, LEARNER, LogThread, Waiters
from slipstream.broker.server.keyring import KeyRing
from slipstream.broker.server.router import Peer
from slipstream.wire.errors import ForbiddenError, ProtocolError, RefusedError
from slipstream.wire.messages.codec import Frame, decode_outcome, decode_worker_request, encode
from slipstream.wire.messages.commands import (
    FetchVersion,
    Handed,
    HandedSamples,
    Noted,
    Nothing,
    ReportCommand,
    ReportSample,
    TakeCommand,
    TakeSamples,
    WorkerAnswer,
    WorkerRefused,
    WorkerRequest,
)
from slipstream.wire.messages.pieces import cut, joined
from slipstream.wire.models.adapters import CONFIG, TENSORS
from slipstream.wire.settings.serve import ServedPlaces

_log = logging.getLogger(__name__)
_SILENCE_S = 20.0  # silence of a generator, after which others get its samples
_LONGEST_WAIT_S = 10.0
_ROLES = {TakeCommand: "learner", ReportCommand: "learner"}  # the others are of generators
Answered = tuple[WorkerAnswer, list[Frame]]


@dataclass(slots=True)
class _Generator:
    seen_s: float
    held: set[str] = field(default_factory=set)


class WorkerDesk:
    """Requests of workers. ``on_message`` takes what arrives at a socket."""

    def __init__(
        self,
        log: CommandLog,
        thread: LogThread,
        waiters: Waiters,
        places: ServedPlaces,
        keys: KeyRing | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._thread = thread
        self._waiters = waiters
        self._places = places
        self._keys = keys
        self._now = now
        self._generators: dict[str, _Generator] = {}
        self._tasks = set[asyncio.Task[None]]()

    def on_message(self, peer: Peer, frames: Sequence[zmq.Frame]) -> None:
        """Begin to answer a request: its id, and what was cut of the rest."""
        if len(frames) < 2 or len(frames[0]) != 8:
            return
        pieces = [frame.buffer for frame in frames[1:]]
        task = asyncio.create_task(self._answer(peer, frames[0].bytes, pieces))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, peer: Peer, request_id: bytes, pieces: list[memoryview]) -> None:
        attached: list[Frame] = []
        try:
            body, *attached = joined(pieces)
            request = decode_worker_request(body)
            self._refuse_other_role(peer, request)
            answer, attached = await self._carried_out(request, attached)
        except (ProtocolError, RefusedError, ValueError, OSError) as error:
            _log.warning("a request of a worker is refused: %s", error)
            answer, attached = WorkerRefused(reason=str(error)), []
        except sqlite3.Error as error:  # a full disk, maybe: it will be asked again
            _log.error("a request of a worker is not answered: %s", error)
            return
        peer.send([request_id, *cut([encode(answer), *attached])])

    def _refuse_other_role(self, peer: Peer, request: WorkerRequest) -> None:
        if not peer.key:
            return  # the socket folder is private
        holder = self._keys.holder(peer.key) if self._keys is not None else None
        role = _ROLES.get(type(request), "generator")
        if holder is None or holder.role != role:
            raise ForbiddenError(f"a key of the role {role} is needed")

    async def _carried_out(self, request: WorkerRequest, attached: list[Frame]) -> Answered:
        match request:
            case TakeCommand():
                return await self._waited(LEARNER, request.wait_s, lambda: self._next(request))
            case ReportCommand():
                outcome = decode_outcome(_one(attached))
                await self._thread(
                    self._log.report,
                    request.model,
                    request.number,
                    outcome,
                    applied=request.applied,
                    now=time.time(),
                )
                self._waiters.wake(f"{request.model}:{request.number}", LEARNER)
                return Noted(), []
            case TakeSamples():
                return await self._waited(ENGINES, request.wait_s, lambda: self._samples(request))
            case ReportSample():
                outcome = decode_outcome(_one(attached))
                await self._thread(
                    self._log.report_sample, request.request, outcome, now=time.time()
                )
                sampler = request.request.rpartition(":")[0]
                self._waiters.wake(request.request, sampler)
                return Noted(), []
            case FetchVersion(version=version):
                if not version.isalnum():
                    raise ProtocolError(f"{version!r} is no digest")
                folder = self._places.version(version)
                return Noted(), [
                    await asyncio.to_thread((folder / name).read_bytes)
                    for name in (CONFIG, TENSORS)
                ]

    async def _waited(
        self, name: str, wait_s: float, look: Callable[[], Awaitable[Answered | None]]
    ) -> Answered:
        """Return what there is to do as soon as there is, or nothing after a while."""
        deadline = asyncio.get_running_loop().time() + min(wait_s, _LONGEST_WAIT_S)
        event = self._waiters.entered(name)
        try:
            while True:
                event.clear()
                if (answer := await look()) is not None:
                    return answer
                async with asyncio.timeout_at(deadline):
                    await event.wait()
        except TimeoutError:
            live = await self._thread(lambda: self._log.live_models)
            return Nothing(models=live), []
        finally:
            self._waiters.leave(name, event)

    async def _next(self, request: TakeCommand) -> Answered | None:
        found = await self._thread(
            self._log.next_command, request.at, life=request.life, now=time.time()
        )
        live = await self._thread(lambda: self._log.live_models)
        if found is None:
            return None if set(request.at) <= set(live) else (Nothing(models=live), [])
        handed = Handed(model=found.model, number=found.number, what=found.what)
        return handed, [] if found.what == "passed" else [found.body]

    async def _samples(self, request: TakeSamples) -> Answered | None:
        now_s = self._now()
        mine = self._generators.setdefault(request.name, _Generator(now_s))
        mine.seen_s, mine.held = now_s, set(request.held)
        others = {
            name: other
            for name, other in self._generators.items()
            if now_s - other.seen_s < _SILENCE_S
        }
        self._generators = others
        taken = set[str]().union(*(other.held for other in others.values()))
        found = await self._thread(self._log.waiting_samples, taken, request.room)
        gone = [name for name in request.held if not await self._thread(self._log.is_waiting, name)]
        if not found and not gone:
            return None
        mine.held |= {name for name, _ in found}
        names = tuple(name for name, _ in found)
        return HandedSamples(requests=names, cancelled=tuple(gone)), [body for _, body in found]


def _one(attached: list[Frame]) -> Frame:
    if len(attached) != 1:
        raise ProtocolError(f"one outcome is attached to a report, got {len(attached)}")
    return attached[0]
