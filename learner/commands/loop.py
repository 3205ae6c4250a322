"""Asks for commands and carries them out, until the learner is asked to stop.

Rank 0 asks; every rank gets what it was handed, and does the same with it.
"""

import asyncio
import logging
import secrets
from contextlib import ExitStack

import msgspec

from slipstream.broker.commands.link import CommandLink
from slipstream.learner.commands.executor import Executor
from slipstream.learner.config import LearnerSettings
from slipstream.learner.model.collectives import broadcast_bytes
from slipstream.learner.model.topology import Topology
from slipstream.learner.stop import StopRequest
from slipstream.wire.files.run_folder import LEARNER_LOCK
from slipstream.wire.messages.codec import decode_operation, decode_worker_answer, encode
from slipstream.wire.messages.commands import (
    Handed,
    Nothing,
    Outcome,
    ReportCommand,
    TakeCommand,
    WorkerAnswer,
)
from slipstream.wire.process.background import BackgroundLoop
from slipstream.wire.process.health import Health
from slipstream.wire.process.processes import locked
from slipstream.wire.settings.sections import RunSection
from slipstream.wire.settings.serve import ServedPlaces

_log = logging.getLogger(__name__)
_WAIT_S = 5.0  # wait for a command
_LOOK_S = 0.2  # between two looks whether a stop is requested


def run_commands(
    settings: LearnerSettings, topology: Topology, stop: StopRequest, health: Health
) -> None:
    """Carry out the commands of a server until this learner is asked to stop.

    Raises:
        ConfigError: another learner has the run folder.
        PeerLostError: no server answers for run.outage_s.
    """
    health.waits_for("the models of its tenants to load")
    with ExitStack() as cleanup:
        if topology.rank == 0:
            places = ServedPlaces(settings.run)
            for folder in (places.states, places.weights, places.versions):
                folder.mkdir(parents=True, exist_ok=True)
            lock = settings.run.folder / LEARNER_LOCK
            cleanup.enter_context(locked(lock, f"is the learner of {settings.run.folder}"))
        executor = Executor(settings, topology)
        desk = None
        if topology.rank == 0:
            loop = cleanup.enter_context(BackgroundLoop())
            desk = _Desk(loop, settings.run)
            cleanup.callback(desk.close)
        _CommandLoop(executor, desk, stop).run(health)


class _Desk:
    """Rank 0's link to the server, for a thread without an event loop."""

    def __init__(self, loop: BackgroundLoop, run: RunSection) -> None:
        self._loop = loop
        self._life = secrets.token_hex(8)

        async def connect() -> CommandLink:
            return CommandLink(run)

        self._link = loop.run(connect())

    def take(self, at: dict[str, int], stop: StopRequest) -> tuple[WorkerAnswer, bytes] | None:
        """Return what is to be done next, and the command; None once a stop is requested."""
        request = TakeCommand(at=at, life=self._life, wait_s=_WAIT_S)

        async def ask() -> tuple[WorkerAnswer, bytes] | None:
            asking = asyncio.create_task(self._link.ask(request, wait_s=_WAIT_S))
            try:
                while not asking.done() and not stop.requested:
                    await asyncio.wait({asking}, timeout=_LOOK_S)
                if not asking.done():
                    return None
                answer, frames = asking.result()
                return answer, bytes(frames[0]) if frames else b""
            finally:
                asking.cancel()

        return None if stop.requested else self._loop.run(ask())

    def report(self, model: str, number: int, outcome: Outcome, applied: int) -> None:
        """Return once an outcome is on the server's disk."""
        report = ReportCommand(model=model, number=number, applied=applied)
        self._loop.run(self._link.ask(report, encode(outcome)))

    def close(self) -> None:
        """Close the connection."""

        async def close() -> None:
            self._link.close()

        self._loop.run(close())


class _CommandLoop:
    """One rank's loop; rank 0 alone has a ``desk``."""

    def __init__(self, executor: Executor, desk: _Desk | None, stop: StopRequest) -> None:
        self._executor = executor
        self._desk = desk
        self._stop = stop
        self._num_done = 0

    def run(self, health: Health) -> None:
        """Carry out commands until rank 0 is asked to stop."""
        for name, model in self._executor.models.items():  # it may have died before it could
            if self._desk is not None and model.outcome is not None:
                self._desk.report(name, model.applied, model.outcome, model.applied)
        health.begins(lambda: self._num_done)
        while (order := self._next()) is not None:
            answer, body = order
            self._num_done += 1
            match answer:
                case Nothing(models=models):
                    self._executor.keep_only(set(models))
                case Handed(what="passed"):
                    self._executor.pass_by(answer.model, answer.number)
                case Handed():
                    self._carry_out(answer, body)

    def _next(self) -> tuple[WorkerAnswer, bytes] | None:
        """Return rank 0's next order on every rank; None to stop."""
        data: bytes | None = None
        if self._desk is not None:
            taken = self._desk.take(self._executor.at, self._stop)
            order = None if taken is None else (encode(taken[0]), taken[1])
            data = msgspec.msgpack.encode(order)
        found = msgspec.msgpack.decode(broadcast_bytes(data), type=tuple[bytes, bytes] | None)
        return None if found is None else (decode_worker_answer(found[0]), found[1])

    def _carry_out(self, handed: Handed, body: bytes) -> None:
        operation = decode_operation(body)
        outcome = self._executor.carry_out(handed.model, handed.number, operation)
        if self._desk is not None and handed.what == "new":
            model = self._executor.models.get(handed.model)
            applied = -1 if model is None else model.applied
            self._desk.report(handed.model, handed.number, outcome, applied)
