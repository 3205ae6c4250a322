"""A broker that delivers given batches to real learners, and notes all that they ask.

It uses the real wire over a real socket, decides nothing, and holds an answer back where a test
wants something else to happen first.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

import zmq

from slipstream.wire.files.trajectory_file import RecordedGroup
from slipstream.wire.messages.broker import (
    Answer,
    BatchDelivered,
    BatchNotReady,
    Done,
    FetchPayloads,
    GetLedgerSnapshot,
    Hello,
    LedgerSnapshotAnswer,
    Payloads,
    Refusal,
    RejectBatch,
    RelayHeard,
    RelayReport,
    Request,
    RequestBatch,
    RunComplete,
    StepCommit,
    StepCommitted,
    TakeOver,
    TookOver,
    Welcome,
)
from slipstream.wire.messages.codec import decode_request, encode
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.waiting import HANG_S

_NOT_READY_S = 0.1  # until a learner that waits is told so; it asks again at once
R = TypeVar("R")
Key = tuple[int, int]
Batch = Sequence[RecordedGroup]


def keys_of(batch: Batch) -> list[Key]:
    """Return the keys of all payloads of a batch."""
    return [
        (group.group.group_id, sibling) for group in batch for sibling in range(len(group.payloads))
    ]


@dataclass
class Script:
    """What there is to train: by step, the batches that take each other's place when rejected."""

    batches: dict[int, list[Batch]]
    steps: int
    epoch: int = 0  # of the learner before
    awaits_prefetch: bool = False  # a commit is answered when the next batch has been fetched
    refuses_payloads_to: str = ""
    known: dict[Key, bytes] = field(default_factory=dict)
    generator_keys: dict[str, str] = field(default_factory=dict)  # public key -> name

    def __post_init__(self) -> None:
        for alternatives in self.batches.values():
            for batch in alternatives:
                payloads = [payload for group in batch for payload in group.payloads]
                self.known.update(zip(keys_of(batch), payloads, strict=True))


class ScriptedBroker:
    """Answers on a thread of its own. Use as a context manager."""

    def __init__(self, endpoint: str, script: Script) -> None:
        self.requests: list[tuple[str, Request]] = []  # client and request, in order
        self._script = script
        self._step = 0
        self._epoch = script.epoch
        self._names: dict[bytes, str] = {}
        self._held: list[tuple[Callable[[], bool], list[bytes], Answer]] = []
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self._thread = threading.Thread(target=self._serve, name="broker", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=HANG_S)
        self._socket.close()
        self._context.term()

    def of(self, kind: type[R]) -> list[R]:
        """Return all requests of one kind so far."""
        return [request for _, request in self.requests if isinstance(request, kind)]

    def keys_asked(self, name: str) -> list[Key]:
        """Return every payload that a client asked for, as often as it did."""
        return [
            key
            for asker, request in self.requests
            if asker == name and isinstance(request, FetchPayloads)
            for key in request.keys
        ]

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Wait until something is true of the requests."""
        with self._changed:
            assert self._changed.wait_for(happened, HANG_S), self.requests[-5:]

    def _serve(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(50):
                peer, request_id, _session, body, *_ = self._socket.recv_multipart()
                request = decode_request(body)
                if isinstance(request, Hello):
                    self._names[peer] = request.name
                with self._changed:
                    self.requests.append((self._names[peer], request))
                    self._changed.notify_all()
                answer, frames, when = self._answer(self._names[peer], request)
                if when():
                    self._send([peer, request_id], answer, frames)
                else:
                    self._held.append((when, [peer, request_id], answer))
            for held in [held for held in self._held if held[0]()]:
                self._held.remove(held)
                self._send(held[1], held[2], [])

    def _send(self, envelope: list[bytes], answer: Answer, frames: Sequence[bytes]) -> None:
        self._socket.send_multipart([*envelope, encode(answer), *frames])

    def _answer(
        self, name: str, request: Request
    ) -> tuple[Answer, Sequence[bytes], Callable[[], bool]]:
        """Return an answer, its frames, and when it may be given."""
        match request:
            case FetchPayloads(keys=keys):
                if name == self._script.refuses_payloads_to:
                    return Refusal(reason="as scripted"), [], _at_once
                frames = [self._script.known[key] for key in keys]
                return Payloads(num_frames=len(frames)), frames, _at_once
            case StepCommit():
                return self._commit(request)
            case RequestBatch(step=step):
                answer = self._deliver(request)
                if not isinstance(answer, BatchNotReady):
                    return answer, [], _at_once
                until_s = time.monotonic() + _NOT_READY_S

                def has_come_or_waited() -> bool:
                    return bool(self._script.batches.get(step)) or time.monotonic() >= until_s

                return answer, [], has_come_or_waited
            case _:
                return self._control(request), [], _at_once

    def _control(self, request: Request) -> Answer:
        match request:
            case Hello():
                return Welcome(
                    run_name="a", session=b"s" * 16, learner_step=self._step, heartbeat_s=5.0
                )
            case TakeOver(step=step):
                self._epoch, self._step = self._epoch + 1, step
                return TookOver(version=PolicyVersion(self._epoch, step))
            case RejectBatch(step=step):
                self._script.batches[step].pop(0)
                return Done()
            case RelayReport():
                return RelayHeard(generator_keys=self._script.generator_keys)
            case GetLedgerSnapshot():
                return LedgerSnapshotAnswer(data=b"ledger")
            case _:
                return Done()

    def _deliver(self, request: RequestBatch) -> Answer:
        own = PolicyVersion(self._epoch, self._step)
        if request.version != own or request.step not in {own.step, own.step + 1}:
            return Refusal(reason=f"the learner is {own.label}")
        if request.step >= self._script.steps:
            return RunComplete()
        alternatives = self._script.batches.get(request.step)
        if not alternatives:
            return BatchNotReady(waiting_for=(), reason="no one", last_step=self._script.steps)
        groups = tuple(group.group for group in alternatives[0])
        return BatchDelivered(step=request.step, groups=groups)

    def _commit(self, request: StepCommit) -> tuple[Answer, Sequence[bytes], Callable[[], bool]]:
        step = request.version.step
        if request.version != PolicyVersion(self._epoch, self._step + 1):
            return Refusal(reason=f"step {self._step} is not trained yet"), [], _at_once
        wanted: set[Key] = set()
        if self._script.awaits_prefetch and step in self._script.batches:
            wanted = set(keys_of(self._script.batches[step][0]))

        def is_prefetched() -> bool:
            asked = {key for name in self._names.values() for key in self.keys_asked(name)}
            if not wanted <= asked:
                return False
            self._step = step
            return True

        return StepCommitted(evaluations=(), last_step=self._script.steps), [], is_prefetched


def _at_once() -> bool:
    return True
