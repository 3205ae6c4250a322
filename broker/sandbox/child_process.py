"""A child that runs foreign code: starts, measures and ends it, with all that it has started."""

import asyncio
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from typing_extensions import override

from slipstream.broker.sandbox.frames import Unframer, frame_of
from slipstream.broker.sandbox.jail import jailed as in_namespace
from slipstream.broker.sandbox.jail import kept
from slipstream.broker.sandbox.output import OutputLog
from slipstream.broker.sandbox.process_table import (
    ProcessRow,
    Usage,
    children_by_parent,
    descendants,
    kill,
    kill_all,
    process_table,
    usage_of,
)
from slipstream.wire.errors import ProtocolError
from slipstream.wire.process.processes import bound_to_me
from slipstream.wire.unreadable import UNREADABLE

_log = logging.getLogger(__name__)
_END_S = 60.0
_HUNG_UP_S = 1.0
_PUT_AWAY_S = 2.0
_POLL_S = 0.01
_PIPE_BYTES = 1 << 20


class ChildProcess(asyncio.Protocol):
    """A running child. Both callbacks are called in the event loop; ``ended`` once, at the end."""

    def __init__(
        self,
        name: str,
        module: str,
        received: Callable[[bytes], None],
        ended: Callable[[int | None], None],
    ) -> None:
        """Take the module to run, and callbacks for messages and for the exit code.

        If ``received`` raises ProtocolError or an error of msgspec, ``ended`` gets None. The module
        is run with ``--link DESCRIPTOR``, a socket (``frames.connection_of``).
        """
        self._name = name
        self._module = module
        self._received = received
        self._ended = ended
        self._frames = Unframer()
        self._output = OutputLog(name)
        self._transport: asyncio.WriteTransport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._descriptors: list[int] = []
        self._gone = asyncio.Event()
        self._jailed = False
        self._at_load: set[int] = set()
        self._ending = False

    async def start(
        self,
        *,
        jailed: bool,
        hide: Sequence[Path],
        environment: Mapping[str, str],
        shared_bytes: int = 0,
    ) -> None:
        """Start the process with this environment and nothing else.

        With ``shared_bytes`` a jailed process has shared memory of its own, of that size. Call it
        on the main thread: the child dies with the thread that forked it.
        """
        self._jailed = jailed
        ours, theirs = socket.socketpair()
        output, printed = os.pipe()
        command = [sys.executable, "-m", self._module, "--link", str(theirs.fileno())]
        command = (
            in_namespace(command, hide=hide, shared_bytes=shared_bytes) if jailed else kept(command)
        )
        with theirs:
            try:
                process = subprocess.Popen(  # noqa: ASYNC220, S603 it returns at once
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=printed,
                    env=dict(environment),
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    preexec_fn=bound_to_me(),
                )
            except OSError:
                ours.close()
                os.close(output)
                raise
            finally:
                os.close(printed)
        loop = asyncio.get_running_loop()
        os.set_blocking(output, False)
        with suppress(OSError):  # the system allows no larger ones
            fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._process = process
        death = os.pidfd_open(process.pid)
        self._descriptors = [output, death]
        loop.add_reader(output, self._read_output, output)
        loop.add_reader(death, self._died, process, death)
        ours.setblocking(False)
        await loop.create_unix_connection(lambda: self, sock=ours)

    @property
    def pids(self) -> list[int]:
        """The process id, or nothing before the start."""
        return [] if self._process is None else [self._process.pid]

    @property
    def main_pids(self) -> list[int]:
        """The process of the module itself, or nothing once it has ended."""
        children = children_by_parent(process_table())
        reaper = self._reaper(children)
        return list(children.get(reaper, ()))[:1] if reaper is not None else []

    def send(self, message: msgspec.Struct) -> None:
        """Send a message to the child."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame_of(message))

    # ---- asyncio.Protocol ----------------------------------------------------

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        if isinstance(transport, asyncio.WriteTransport):
            self._transport = transport

    @override
    def data_received(self, data: bytes) -> None:
        """Pass on complete messages."""
        try:
            for body in self._frames.feed(data):
                self._received(body)
        except (ProtocolError, *UNREADABLE):
            if self._transport is not None:
                self._transport.close()
            self._ended(None)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """Find out whether the child has ended, or a function has closed its descriptors."""
        asyncio.get_running_loop().call_later(_HUNG_UP_S, self._hung_up)

    def _hung_up(self) -> None:
        if not self._gone.is_set() and not self._ending:
            self._ended(None)

    # ---- the process ---------------------------------------------------------

    def _read_output(self, descriptor: int) -> None:
        if not self._output.read(descriptor):
            asyncio.get_running_loop().remove_reader(descriptor)

    def _died(self, process: "subprocess.Popen[bytes]", descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        self._gone.set()
        self._ended(process.wait())

    @property
    def is_gone(self) -> bool:
        """True once its process has ended."""
        return self._gone.is_set()

    def measure(self, table: Mapping[int, ProcessRow]) -> Usage:
        """Return the usage of the child and its descendants."""
        children = children_by_parent(table)
        reaper = self._reaper(children)
        if self._process is None:
            return usage_of((), table)
        family = descendants(self._process.pid, children)
        return usage_of((pid for pid in family if pid != reaper), table)

    def remember_loaded(self, table: Mapping[int, ProcessRow]) -> None:
        """Treat the processes that run now as permanent processes of the functions."""
        children = children_by_parent(table)
        reaper = self._reaper(children)
        self._at_load = set(children.get(reaper, ()) if reaper is not None else ())

    def kill_left_behind(
        self,
        table: Mapping[int, ProcessRow],
        *,
        before_s: float,
        kill: Callable[[int], None] = kill,
    ) -> int:
        """Kill processes that left the child's tree and started before; return their number."""
        children = children_by_parent(table)
        reaper = self._reaper(children)
        if reaper is None:
            return 0
        orphans = [
            pid
            for pid in children.get(reaper, ())
            if pid not in self._at_load and table[pid].started_s < before_s
        ]
        doomed = [pid for orphan in orphans for pid in (orphan, *descendants(orphan, children))]
        for pid in doomed:
            kill(pid)
        return len(doomed)

    def _reaper(self, children: Mapping[int, list[int]]) -> int | None:
        """Return the process that adopts orphans of the functions; None if it has ended.

        Never 0, which is the parent of process 1 and so has the whole host below it.
        """
        if self._process is None:
            return None
        if not self._jailed:
            return self._process.pid
        return next(iter(children.get(self._process.pid, ())), None)

    async def end(self, *, in_order: bool = False) -> None:
        """Kill it with all that it has started; return when nothing is left, even if cancelled.

        With ``in_order`` its functions first get some time to release their resources.
        """
        ending = asyncio.ensure_future(self._end(in_order=in_order))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise

    async def _end(self, *, in_order: bool) -> None:
        self._ending = True
        process = self._process
        if process is None:
            return
        if in_order and self._transport is not None:
            self._transport.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(_PUT_AWAY_S):
                    await self._gone.wait()
        started: dict[int, float] = {}
        try:
            async with asyncio.timeout(_END_S):
                started = await self._kill(process)
                await self._gone.wait()
        except TimeoutError:
            _log.error("%s does not end", self._name)
            process.kill()
        if left := await kill_all(started, timeout_s=_END_S):
            _log.error("%s left processes behind: %s", self._name, left)
        loop = asyncio.get_running_loop()
        for descriptor in self._descriptors:
            loop.remove_reader(descriptor)
        if self._descriptors:  # its last output
            self._output.read(self._descriptors[0])
        self._output.report_dropped()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []
        if self._transport is not None:
            self._transport.abort()

    async def _kill(self, process: "subprocess.Popen[bytes]") -> dict[int, float]:
        """Kill it; return its descendants with their start times.

        Bubblewrap is not killed before it has started process 1, which is bound to it only some
        time later and would outlive it.
        """
        while not self.is_gone:  # once it is reaped, another process may get its PID
            table = process_table()
            children = children_by_parent(table)
            reaper = self._reaper(children)
            if reaper is None:
                await asyncio.sleep(_POLL_S)
                continue
            if self._jailed:
                kill(reaper)  # the kernel kills all of its namespace before bubblewrap ends
            else:
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
            family = descendants(process.pid, children)
            return {pid: table[pid].started_s for pid in family}
        return {}
