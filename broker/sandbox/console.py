"""A Python interpreter under bubblewrap that keeps its state from one call to the next."""

import fcntl
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from typing_extensions import override

from slipstream.broker.sandbox import console_driver
from slipstream.broker.sandbox.bubblewrap import SandboxUnavailableError
from slipstream.broker.sandbox.sandbox import End, Limits, Mode, StartedRun

MAX_SOURCE_BYTES = 128 << 10
_PIPE_BYTES = 1 << 20  # room for a request as JSON
_REASONS: Mapping[str, str] = MappingProxyType(
    {
        "memory": "it took too much memory",
        "processes": "it started too many processes",
        "failed": "it takes no more code",
    }
)


@dataclass(frozen=True, slots=True)
class ConsoleResult:
    """Result of one call."""

    text: str
    own_s: float  # time in which the call had a core, or wanted none
    ended: str = ""  # why the interpreter ended and lost its state


class ShortenedOutput:
    """Keeps the beginning and the end of what is written, and counts the rest. Pure."""

    def __init__(self, max_bytes: int, mark: bytes) -> None:
        """Keep ``max_bytes``; the end of the output is recognized by ``mark``."""
        self._most = max(1, max_bytes // 2)
        self._mark = mark
        self._first, self._last = bytearray(), bytearray()
        self._num_dropped = 0

    def add(self, data: bytes) -> None:
        """Add output."""
        room = max(0, self._most - len(self._first)) if not self._last else 0
        self._first += data[:room]
        self._last += data[room:]
        if (excess := len(self._last) - self._most - len(self._mark)) > 0:
            del self._last[:excess]
            self._num_dropped += excess

    @property
    def is_complete(self) -> bool:
        """True once the mark was written."""
        return self._tail.endswith(self._mark)

    @property
    def _tail(self) -> bytes:
        return bytes(self._first[-len(self._mark) :] + self._last)

    @property
    def text(self) -> str:
        """The text without the mark, with a count of what is left out."""
        parts = [self._first, self._last]
        if self._num_dropped:
            parts.insert(
                1, bytearray(f"\n... {self._num_dropped} bytes are left out ...\n".encode())
            )
        whole = b"".join(parts)
        return whole.removesuffix(self._mark).decode(errors="replace")


class Console(StartedRun):
    """A started interpreter. Use it on the thread that made it, with which it ends."""

    def __init__(self, limits: Limits, *, mode: Mode = "namespaces") -> None:
        """Start it.

        Args:
            limits: Limits of all calls together, but ``own_s`` of one call, and
                ``max_output_bytes`` of the part of its output that is kept.
            mode: ``none`` sets limits but does not protect.
        """
        given, self._requests = os.pipe()
        self._shown = ShortenedOutput(limits.max_output_bytes, b"")
        try:
            os.set_blocking(self._requests, False)
            with suppress(OSError):  # the system allows no larger ones
                fcntl.fcntl(self._requests, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            source = Path(console_driver.__file__).read_bytes()
            super().__init__({"main.py": source}, given, limits, mode)
        except BaseException:
            os.close(self._requests)
            raise
        finally:
            os.close(given)

    @override
    def __exit__(self, *_: object) -> None:
        os.close(self._requests)
        super().__exit__()

    def run(self, source: str, *, own_s: float) -> ConsoleResult:
        """Run code in the interpreter, which ends if the code exceeds its time or another limit.

        Raises:
            SandboxUnavailableError: the interpreter did not start, or the machine is too busy.
        """
        mark = f"\0{secrets.token_hex(16)}\0"
        self._limits = replace(self._limits, own_s=own_s)
        self._own = None
        self._shown = ShortenedOutput(self._limits.max_output_bytes, mark.encode())
        request = json.dumps({"source": source, "mark": mark}).encode() + b"\n"
        try:
            is_sent = os.write(self._requests, request) == len(request)
        except OSError:
            is_sent = False
        return self._said(self._until_the_end() if is_sent else "failed")

    def _said(self, status: End | None) -> ConsoleResult:
        own_s = self._own.seconds if self._own is not None else 0.0
        if status is None and self._shown.is_complete:
            return ConsoleResult(self._shown.text, own_s)
        self._end()
        for name in ("report", *self._output):
            while self._read(name):
                pass
        report = self._report.decode()
        if "started" not in report or status == "starved":
            why = "the machine is too busy" if status == "starved" else "it did not start"
            raise SandboxUnavailableError(f"the interpreter of Python cannot be used: {why}")
        if status == "timeout":
            ended = f"it took longer than {self._limits.own_s:.3g} s"
        elif status is not None:
            ended = _REASONS.get(status, status)
        else:
            ended = "it ended by itself"
        return ConsoleResult(self._shown.text, own_s, ended)

    @override
    def _keep(self, name: str, data: bytes) -> None:
        self._shown.add(data)

    @override
    def _has_finished(self) -> bool:
        return self._shown.is_complete
