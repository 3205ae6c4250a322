"""Runs code of a model for a process that is confined itself, and so cannot start a sandbox.

A confined process calls ``borrow``, then sends descriptors over its link. Each becomes the
connection of a keeper: a process that is not confined, and only runs code under bubblewrap.
"""

import os
import socket
import struct
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Self, TypeAlias, TypeVar

import msgspec

from slipstream.broker.sandbox import sandbox
from slipstream.broker.sandbox.bubblewrap import SandboxUnavailableError
from slipstream.broker.sandbox.console import Console, ConsoleResult
from slipstream.broker.sandbox.frames import Link, frame_of
from slipstream.broker.sandbox.sandbox import Limits, Mode, ProgramOutcome
from slipstream.wire.errors import ProtocolError
from slipstream.wire.messages.bounds import Blob, Body, ByName, Count, Figure, Text, shortened
from slipstream.wire.unreadable import UNREADABLE

_MOST_REQUEST_BYTES = 64 << 20
_MOST_FILES = 1_024
_MOST_OUTPUT_BYTES = 8 << 20
_LONGEST_RUN_S = 86_400.0
_LONGEST_START_S = 3_600.0
_MOST_TIMES_OWN_S = 1_000.0
_FILES_PER_FOLDER, _NUM_FOLDERS = 4, 2  # files of the largest size in a sandbox's memory
_ABORT = struct.pack("ii", 1, 0)  # linger of a socket

Numbers: TypeAlias = ByName[Count | Figure]
"""Values of ``Limits`` by field."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Base of all messages."""


class RunProgram(_Message, frozen=True):
    """Run a program."""

    source: Body
    stdin: Blob
    files: ByName[Blob]
    limits: Numbers


class RunInConsole(_Message, frozen=True):
    """Run code in the connection's interpreter, which the first call starts."""

    source: Body
    own_s: Figure
    limits: Numbers  # those of the first call apply


class ProgramRan(_Message, frozen=True):
    """Result of a program."""

    outcome: ProgramOutcome


class ConsoleRan(_Message, frozen=True):
    """Result of a call."""

    result: ConsoleResult


class NothingRan(_Message, frozen=True):
    """Nothing ran, for this reason."""

    reason: Text


_Request: TypeAlias = RunProgram | RunInConsole
_Answer: TypeAlias = ProgramRan | ConsoleRan | NothingRan
_AnswerT = TypeVar("_AnswerT", ProgramRan, ConsoleRan)
requests: msgspec.msgpack.Decoder[_Request] = msgspec.msgpack.Decoder(_Request)
_answers: msgspec.msgpack.Decoder[_Answer] = msgspec.msgpack.Decoder(_Answer)
_link: socket.socket | None = None  # set in a process that is confined


def borrow(link: socket.socket) -> None:
    """From now on, have keepers run what this process runs in a sandbox."""
    global _link  # noqa: PLW0603 a process is confined for good
    _link = link
    sandbox.run_by(_run)


def console(limits: Limits, *, mode: Mode) -> "Console | BorrowedConsole":
    """Start an interpreter in this process, or in a keeper if this process is confined."""
    if _link is None or mode == "none":
        return Console(limits, mode=mode)
    return BorrowedConsole(_link, limits)


def _run(source: str, stdin: bytes, files: Mapping[str, bytes], limits: Limits) -> ProgramOutcome:
    if _link is None:
        raise SandboxUnavailableError("this process is not confined")
    with _Connection(_link) as keeper:
        asked = RunProgram(source=source, stdin=stdin, files=dict(files), limits=asdict(limits))
        return keeper.ask(asked, ProgramRan).outcome


class BorrowedConsole:
    """An interpreter that a keeper has."""

    def __init__(self, link: socket.socket, limits: Limits) -> None:
        """Ask for one."""
        self._keeper = _Connection(link)
        self._limits = asdict(limits)

    def run(self, source: str, *, own_s: float) -> ConsoleResult:
        """Run code as ``Console`` does."""
        request = RunInConsole(source=source, own_s=own_s, limits=self._limits)
        return self._keeper.ask(request, ConsoleRan).result

    def __exit__(self, *_: object) -> None:
        self._keeper.__exit__()


class _Connection:
    """A connection to a keeper of one's own."""

    def __init__(self, link: socket.socket) -> None:
        ours, theirs = socket.socketpair()
        self._ours = Link(ours, _answers)
        with theirs:
            socket.send_fds(link, [b"k"], [theirs.fileno()])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()

    def ask(self, request: _Request, kind: type[_AnswerT]) -> _AnswerT:
        """Return the answer to a request.

        Raises:
            SandboxUnavailableError: the keeper has ended, or the sandbox does not start.
        """
        why = "its keeper has ended"
        with suppress(ConnectionError):  # it may have sent the reason and hung up
            self._ours.send(request)
        with suppress(ConnectionError):
            answer = self._ours.receive()
            if isinstance(answer, kind):
                return answer
            if answer is not None:
                raise SandboxUnavailableError(getattr(answer, "reason", why))
        raise SandboxUnavailableError(f"the sandbox cannot be used: {why}")


def let_go(descriptor: int, refusal: str) -> None:
    """Send a refusal and close the descriptor of a confined process, which may be anything."""
    with suppress(OSError):
        connection = socket.socket(fileno=descriptor)
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
            if refusal:
                connection.send(frame_of(NothingRan(reason=refusal)), socket.MSG_DONTWAIT)
        connection.detach()
    with suppress(OSError):
        os.close(descriptor)


def keepers_limits(memory_mb: int, max_processes: int) -> Limits:
    """Return the highest limits that a keeper grants: honest use reaches none of them.

    Args:
        memory_mb: Memory of the trajectory, also the limit of the files of a sandbox.
        max_processes: Processes of the trajectory.
    """
    memory_bytes = memory_mb << 20
    return Limits(
        own_s=_LONGEST_RUN_S,
        cpu_s=_LONGEST_RUN_S,
        memory_bytes=memory_bytes,
        max_processes=max_processes,
        max_output_bytes=_MOST_OUTPUT_BYTES,
        max_file_bytes=memory_bytes // (_FILES_PER_FOLDER * _NUM_FOLDERS),
        start_s=_LONGEST_START_S,
        at_most=_MOST_TIMES_OWN_S,
    )


def keep(descriptor: int, most: Limits) -> None:
    """Serve a confined process until it hangs up, or announces an absurd frame.

    Args:
        descriptor: Connection to the process.
        most: Highest limits of its runs.
    """
    with suppress(OSError, ProtocolError), ExitStack() as stack:
        connection = stack.enter_context(socket.socket(fileno=descriptor))
        link = Link(connection, requests, max_bytes=_MOST_REQUEST_BYTES)
        opened: Console | None = None
        while True:
            answer: _Answer
            try:
                request = link.receive()
                if request is None:
                    return
                if isinstance(request, RunProgram):
                    answer = ProgramRan(outcome=_outcome_of(request, most))
                else:
                    if opened is None:
                        opened = Console(_bounded(request.limits, most))
                        stack.push(opened)
                    own_s = max(0.0, min(request.own_s, most.own_s))
                    answer = ConsoleRan(result=opened.run(request.source, own_s=own_s))
            except (SandboxUnavailableError, ValueError, OSError, *UNREADABLE) as error:
                answer = NothingRan(reason=shortened(str(error)))
            link.send(answer)


def _outcome_of(request: RunProgram, most: Limits) -> ProgramOutcome:
    if len(request.files) > _MOST_FILES:
        raise SandboxUnavailableError(f"{len(request.files)} files, of {_MOST_FILES} at most")
    limits = _bounded(request.limits, most)
    return sandbox.run(request.source, stdin=request.stdin, files=request.files, limits=limits)


def _bounded(numbers: Numbers, most: Limits) -> Limits:
    """Return the limits that a confined process asks for, cut to the highest."""
    highest = asdict(most)
    known = {name: max(0, min(numbers[name], highest[name])) for name in numbers.keys() & highest}
    return msgspec.convert(known, Limits)
