"""Starts an environment's processes, talks to them, measures them and ends them.

One process, the loader, has the environment imported and forks a process for each trajectory. A
process that takes too long or too much is killed with all that it has started; if the loader ends,
its trajectories fail and another loader is started.
"""

import asyncio
import itertools
import logging
import os
import re
import secrets
import shutil
import socket
import struct
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from slipstream.broker.listening.gate import limit_of
from slipstream.broker.sandbox.child_process import ChildProcess
from slipstream.broker.sandbox.frames import LENGTH_BYTES, frame_of
from slipstream.broker.sandbox.held_memory import held_bytes, sandboxes_bytes
from slipstream.broker.sandbox.jail import check_jail
from slipstream.broker.sandbox.process_table import (
    ProcessRow,
    children_by_parent,
    children_of,
    descendants,
    ids_inside,
    kill,
    kill_all,
    process_table,
    row_of,
    usage_of,
)
from slipstream.generators.environments.messages import (
    MAX_OBSERVATION_BYTES,
    Connected,
    EnvironmentLoaded,
    EnvironmentNotLoaded,
    Fork,
    Forked,
    FromEnvironment,
    FromLoader,
    Keeping,
    LoadEnvironment,
    ProcessEnded,
    ToEnvironment,
    from_environment,
    from_loader,
)
from slipstream.wire.errors import ConfigError, SlipstreamError
from slipstream.wire.messages.trajectory import Json
from slipstream.wire.process.environment import sparing_this_host
from slipstream.wire.process.patience import Patience, signs_of
from slipstream.wire.process.rate_limited_log import RateLimitedLog
from slipstream.wire.unreadable import UNREADABLE

_log = logging.getLogger(__name__)
_IMPORT_S = 120.0  # without a sign of life
_CONNECT_S = 60.0  # without a sign of life
_POLL_S = 0.2
_HELD_EVERY = 5  # measurements; memory of open files is measured less often
_SHARED_TIMES = 4  # memory of a trajectory: size of /dev/shm, for all trajectories
_KILL_S = 60.0
_ENDING_S = 10.0
_LONGEST_BACKOFF_S = 30.0
_MOST_FIRST_BYTES = 4096  # limit of the message that shows a ticket
_SHARE, _MOST_WITHOUT_TICKET = 1 / 16, 256  # share of descriptors, and limit of connections
_DEVICES = (Path("/dev"), Path("/dev/mapper"), Path("/dev/bsg"))
# Devices that pass commands to a disk, though they are no block devices.
_PASSES_COMMANDS = re.compile(r"(sg|ng|nvme|mtd|raw|dax)\d|\d+:\d+:\d+:\d+")
_MODULE = "slipstream.generators.environments.loader"


class EnvironmentFailedError(SlipstreamError):
    """An environment cannot continue a trajectory, for this reason."""


class EnvironmentLostError(EnvironmentFailedError):
    """The server of a trajectory is gone, through no fault of the trajectory."""


@dataclass(slots=True)
class Acting:
    """The process of one trajectory."""

    number: int
    connected: "asyncio.Future[Any]"
    failed: "asyncio.Future[Any]"  # reason why it cannot continue
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = None
    pid: int = 0  # id on this host; 0 until it has connected, or was searched for
    started_s: float = 0.0  # start of that process
    forked: asyncio.Event = field(default_factory=asyncio.Event)  # also set if it never will be
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    inner_pid: int = 0  # id in the loader's namespace
    keepers: dict[int, float] = field(default_factory=dict)  # start of each keeper, by id
    new_keepers: set[int] = field(default_factory=set)  # ids in the loader's namespace

    async def tell(self, message: ToEnvironment) -> None:
        """Send a message to the process."""
        if self.writer is None:
            raise EnvironmentFailedError("the environment's process is not there")
        try:
            self.writer.write(frame_of(message))
            await self.writer.drain()
        except ConnectionError as error:
            raise EnvironmentFailedError(self.reason(str(error))) from error

    async def hear(self) -> FromEnvironment:
        """Return the next message of the process.

        Raises:
            EnvironmentFailedError: no message comes.
        """
        if self.reader is None:
            raise EnvironmentFailedError("the environment's process is not there")
        reading: asyncio.Future[Any] = asyncio.ensure_future(read_message(self.reader))
        try:
            await asyncio.wait({reading, self.failed}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                message: FromEnvironment = reading.result()
                return message
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError) as error:
            with suppress(TimeoutError):  # its end is known once all its descendants have ended
                async with asyncio.timeout(_ENDING_S):
                    await asyncio.shield(self.failed)
            raise EnvironmentFailedError(self.reason(f"it sent nonsense: {error}")) from error
        finally:
            reading.cancel()
        raise EnvironmentFailedError(self.reason())

    def reason(self, otherwise: str = "") -> str:
        """Return the reason why it failed; ``otherwise`` if it has not failed yet."""
        return str(self.failed.result()) if self.failed.done() else otherwise

    def fail(self, reason: str) -> None:
        """Record that it cannot continue; the first reason counts."""
        if not self.failed.done():
            self.failed.set_result(reason)


@dataclass(slots=True)
class ProcessLimits:
    """Limits of one trajectory's processes."""

    memory_mb: int
    max_processes: int
    connect_s: float = _CONNECT_S
    """Time without a sign of life after which a process has failed to connect."""


class EnvironmentHost:
    """Processes of one environment. Make one with ``start``; close it."""

    def __init__(
        self,
        load: LoadEnvironment,
        limits: ProcessLimits,
        *,
        hide: Sequence[Path],
        environment: Mapping[str, str],
        folder: Path,
    ) -> None:
        """Prepare to load an environment; ``folder`` will hold a socket."""
        self.version = ""
        self.drives_itself = False
        self.may_reward = True  # False: a reward function must
        self.replaced: Counter[str] = Counter()  # trajectories' processes killed, by reason
        self._load = load
        self._limits = limits
        self._jailed = load.apart
        self._hide = hide
        self._environment = sparing_this_host(environment)
        self._folder = folder
        self._numbers = itertools.count(1)
        self._acting: dict[int, Acting] = {}
        self._by_ticket: dict[str, Acting] = {}
        self.num_refused = 0  # connections that showed no ticket
        self._without_ticket: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._limit = limit_of(_SHARE, most=_MOST_WITHOUT_TICKET)
        self._rarely = RateLimitedLog(_log)
        self._loader: ChildProcess | None = None
        self._is_sealed = False  # True: the kernel ends all that a trajectory has started
        self._is_below = False  # True: the loader is the only child of the started process
        self._ready = asyncio.Event()
        self._refusal = ""  # reason of the last failed start
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @classmethod
    async def start(
        cls,
        function: str,
        options: Mapping[str, Json],
        limits: ProcessLimits,
        *,
        jailed: bool = True,
        hide: Sequence[Path] = (),
        environment: Mapping[str, str],
    ) -> "EnvironmentHost":
        """Import an environment.

        Call it on the main thread: the loader dies with the thread that forked it.

        Args:
            function: ``MODULE:NAME`` or ``FILE.py:NAME``.
            options: Keyword arguments of the function or class.
            limits: Limits of one trajectory.
            jailed: True for a PID namespace, so that nothing is left of the loader.
            hide: Files and folders that the environment must not see.
            environment: Variables of the loader.

        Raises:
            ConfigError: the environment cannot be imported, or there is no jail here.
        """
        load = LoadEnvironment(
            function=function,
            options=dict(options),
            memory_mb=limits.memory_mb,
            max_processes=limits.max_processes,
            apart=jailed,
        )
        hide = [*hide, *raw_disks(os.geteuid()), *own_services()]
        folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="se-")  # short: paths of sockets
        host = cls(load, limits, hide=hide, environment=environment, folder=Path(folder))
        try:
            if jailed:
                await asyncio.to_thread(check_jail)
            address = str(host._folder / "socket")
            host._server = await asyncio.start_unix_server(host._connected, address)
            await host._start_loader()
        except BaseException:
            await host.close()
            raise
        host._in_background(host._watch())
        return host

    @asynccontextmanager
    async def trajectory(self) -> AsyncIterator[Acting]:
        """Yield the process of a trajectory; afterwards it is killed with all that it started.

        Raises:
            EnvironmentFailedError: the process does not start.
        """
        try:
            async with asyncio.timeout(_CONNECT_S):
                await self._ready.wait()
        except TimeoutError:
            raise EnvironmentFailedError(
                f"the environment does not start: {self._refusal}"
            ) from None
        loop = asyncio.get_running_loop()
        number, ticket = next(self._numbers), secrets.token_hex(16)
        acting = Acting(number, loop.create_future(), loop.create_future())
        self._acting[number] = self._by_ticket[ticket] = acting
        try:
            if self._loader is None:
                raise EnvironmentFailedError("the environment's process has ended")
            fork = Fork(number=number, address=str(self._folder / "socket"), ticket=ticket)
            self._loader.send(fork)
            await self._connecting(acting, self._loader)
            yield acting
        finally:
            self._by_ticket.pop(ticket, None)
            if acting.writer is not None:
                acting.writer.close()
            await asyncio.shield(self._in_background(self._kill(acting)))

    async def _connecting(self, acting: Acting, loader: ChildProcess) -> None:
        """Wait for a trajectory's process to connect, as long as it shows signs of life."""
        ends, patience = {acting.connected, acting.failed}, None
        while True:
            await asyncio.wait(ends, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
            if acting.connected.done():
                return
            if acting.failed.done():
                raise EnvironmentFailedError(acting.reason())
            self._find([acting], process_table())
            patience = patience or Patience(
                "a trajectory's process to connect",
                self._limits.connect_s,
                # Signs of neighbours do not count: a loader that hangs next to them is replaced.
                signs_of(lambda: [acting.pid] if acting.pid else self._pids_of(loader), alone=True),
                log=_log.debug,
            )
            if not patience.is_over():
                continue
            if acting.pid:
                self.replaced["connect"] += 1
                raise EnvironmentFailedError(f"its process does not connect: it {patience.why}")
            _log.error("the environment's process does not fork: it %s", patience.why)
            for pid in loader.pids:  # once it has ended, another loader is started
                kill(pid)
            raise EnvironmentFailedError("the environment's process does not fork")

    async def close(self) -> None:
        """Kill all processes."""
        self._closed = True
        for acting in self._acting.values():
            acting.fail("the generator ends")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._loader is not None:
            await self._loader.end()
        if self._server is not None:
            self._server.close()
        for writer in self._without_ticket:
            writer.transport.abort()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    # ---- the loader --------------------------------------------------------------

    async def _start_loader(self) -> None:
        loaded: asyncio.Future[EnvironmentLoaded] = asyncio.get_running_loop().create_future()

        def received(body: bytes) -> None:
            message: FromLoader = from_loader.decode(body)
            match message:
                case EnvironmentLoaded() if not loaded.done():
                    loaded.set_result(message)
                case EnvironmentNotLoaded(message=reason) if not loaded.done():
                    loaded.set_exception(ConfigError(reason))
                case Forked(number=number, pid=pid):
                    self._forked(number, pid)
                case Keeping(number=number, pid=pid):
                    self._known(number).new_keepers.add(pid)
                case ProcessEnded(number=number, code=code, reason=reason):
                    if (acting := self._acting.get(number)) is not None:
                        acting.pid = acting.inner_pid = 0  # other processes may get these ids
                        acting.forked.set()
                        acting.ended.set()
                        how = f"by signal {-code}" if code < 0 else f"with code {code}"
                        acting.fail(reason or f"its process ended {how}")
                case _:
                    pass

        def ended(code: int | None) -> None:
            if not loaded.done():
                loaded.set_exception(ConfigError(f"its process ended with code {code}"))
            elif self._loader is loader and not self._closed:
                self._lost(loader, code)

        loader = ChildProcess("environment", _MODULE, received, ended)
        try:
            await loader.start(
                jailed=self._jailed,
                hide=self._hide,
                environment=self._environment,
                shared_bytes=_SHARED_TIMES * self._limits.memory_mb << 20,
            )
            loader.send(self._load)
            patience = Patience("the environment to load", _IMPORT_S, signs_of(lambda: loader.pids))
            while not (await asyncio.wait({loaded}, timeout=_POLL_S))[0]:
                if patience.is_over():
                    loaded.set_exception(
                        ConfigError(
                            f"the environment does not load: its process {patience.why} "
                            "(environment.function)"
                        )
                    )
            facts = loaded.result()
        except BaseException:
            await loader.end()
            raise
        self.version, self.drives_itself = facts.version, facts.drives_itself
        self.may_reward = facts.may_reward
        self._is_sealed, self._is_below = facts.is_sealed, facts.is_below
        if facts.gaps:
            _log.warning("trajectories are not wholly apart: %s", "; ".join(facts.gaps))
        self._loader = loader
        self._ready.set()

    def _pids_of(self, loader: ChildProcess) -> list[int]:
        """Return the id of the process that forks, in a list; an empty list if it has ended."""
        pids = loader.main_pids
        return children_of(pids[0])[:1] if pids and self._is_below else pids

    def _lost(self, loader: ChildProcess, code: int | None) -> None:
        self._ready.clear()
        self._loader = None
        self.replaced["loader"] += 1
        _log.error("the environment's process ended with code %s and is started again", code)
        for acting in self._acting.values():
            acting.fail("the environment's process ended")
        self._in_background(self._replace(loader))

    async def _replace(self, loader: ChildProcess) -> None:
        await loader.end()
        failures = 0
        while not self._closed:
            try:
                await self._start_loader()
            except (ConfigError, OSError) as error:
                self._refusal = str(error)
                _log.error("the environment does not start: %s", error)
                await asyncio.sleep(min(2.0**failures, _LONGEST_BACKOFF_S))
                failures += 1
            else:
                return

    # ---- trajectories' processes ---------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._without_ticket[writer] = None
        if len(self._without_ticket) > self._limit.most:  # a trajectory's process shows it at once
            self._refuse(next(iter(self._without_ticket)), f"{self._limit.most} of them are open")
        try:
            async with asyncio.timeout(_CONNECT_S):
                first = await read_message(reader, most=_MOST_FIRST_BYTES)
        except (asyncio.IncompleteReadError, OSError, TimeoutError, *UNREADABLE) as error:
            if writer in self._without_ticket:
                self._refuse(writer, str(error) or f"it says nothing for {_CONNECT_S:g} s")
            return
        ticket = first.ticket if isinstance(first, Connected) else ""
        acting, pid = self._by_ticket.get(ticket), _peer(writer)
        if acting is None or not await self._is_first_of(acting, pid) or acting.connected.done():
            self._refuse(writer, "it is no trajectory's")
            return
        self._by_ticket.pop(ticket, None)
        self._without_ticket.pop(writer, None)
        acting.reader, acting.writer = reader, writer
        acting.pid = pid
        row = row_of(acting.pid)
        acting.started_s = row.started_s if row is not None else 0.0
        acting.connected.set_result(None)

    async def _is_first_of(self, acting: Acting, pid: int) -> bool:
        """True if a process is the one that the loader has forked for a trajectory.

        Tickets can be stolen: from memory that a loader's forks share, or by a process that listens
        in our place.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_CONNECT_S):
                await acting.forked.wait()
        levels = self._jailed + self._is_below
        return ids_inside([pid], levels=levels).get(acting.inner_pid) == pid != 0

    def _refuse(self, writer: asyncio.StreamWriter, reason: str) -> None:
        self.num_refused += 1
        line = "a connection to an environment's socket that shows no ticket is closed: %s"
        self._rarely.say(line, reason)
        self._without_ticket.pop(writer, None)
        writer.transport.abort()

    def _forked(self, number: int, inner_pid: int) -> None:
        acting = self._known(number)
        acting.inner_pid = inner_pid
        acting.forked.set()
        if not acting.connected.done():
            acting.pid = 0  # it was that of the process that forked it

    def _known(self, number: int) -> Acting:
        """Return the process of a trajectory; kill it if the trajectory has ended."""
        if number not in self._acting:
            loop = asyncio.get_running_loop()
            acting = Acting(number, loop.create_future(), loop.create_future())
            self._acting[number] = acting
            self._in_background(self._kill(acting))
        return self._acting[number]

    def _find(self, processes: Collection[Acting], table: Mapping[int, ProcessRow]) -> None:
        """Find processes that the loader has reported; forget keepers that have ended."""
        seen: dict[int, int] = {}
        if self._loader is not None and any(
            acting.new_keepers or (acting.inner_pid and not acting.pid) for acting in processes
        ):
            family = descendants(self._loader.pids[0], children_by_parent(table))
            seen = ids_inside(family, levels=self._jailed + self._is_below)
        for acting in processes:
            if not acting.pid and (pid := seen.get(acting.inner_pid, 0)):
                acting.pid, acting.started_s = pid, table[pid].started_s
            new = [seen[pid] for pid in acting.new_keepers & seen.keys()]
            acting.keepers |= {pid: table[pid].started_s for pid in new}
            acting.keepers = {
                pid: started_s
                for pid, started_s in acting.keepers.items()
                if pid in table and table[pid].started_s == started_s
            }
            acting.new_keepers.clear()  # others began before the table was read, and have ended

    async def _kill(self, acting: Acting) -> None:
        """Kill a trajectory's process, its keepers, and all that these have started."""
        deadline_s = time.monotonic() + _KILL_S
        while not await self._ended_whole(acting) and (started := self._started(acting)):
            left = await kill_all(started, timeout_s=deadline_s - time.monotonic())
            if left or time.monotonic() > deadline_s:
                line = "trajectory %d left processes behind after %g s: %s"
                _log.error(line, acting.number, _KILL_S, left or "it starts further ones")
                break
        self._acting.pop(acting.number, None)

    async def _ended_whole(self, acting: Acting) -> bool:
        """Kill the process of a trajectory; return True if that ended all it had started.

        The kernel ends a PID namespace before its first process.
        """
        if not self._is_sealed:
            return False
        row = row_of(acting.pid) if acting.pid else None
        if row is not None and row.started_s == acting.started_s:
            kill(row.pid)
            with suppress(TimeoutError):  # the loader is busy, or gone
                async with asyncio.timeout(_POLL_S):
                    await acting.ended.wait()
        return acting.ended.is_set() and not acting.keepers and not acting.new_keepers

    def _started(self, acting: Acting) -> dict[int, float]:
        """Return the running processes of a trajectory with their start times."""
        table = process_table()
        self._find([acting], table)
        children = children_by_parent(table)
        family = {acting.pid, *acting.keepers} - {0}
        family |= {pid for root in family for pid in descendants(root, children)}
        rows = [table[pid] for pid in family if pid in table]
        return {row.pid: row.started_s for row in rows if not row.is_zombie}

    async def _watch(self) -> None:
        """Measure trajectories' processes; end those over their limits."""
        for number in itertools.count():
            await asyncio.sleep(_POLL_S)
            if not self._acting:
                continue
            looks = number % _HELD_EVERY == 0
            table = process_table()
            children = children_by_parent(table)
            self._find(self._acting.values(), table)
            for acting in list(self._acting.values()):
                if acting.pid and not acting.failed.done():
                    self._measure(acting, table, children, looks=looks)

    def _measure(
        self,
        acting: Acting,
        table: Mapping[int, ProcessRow],
        children: Mapping[int, list[int]],
        *,
        looks: bool,
    ) -> None:
        family = [acting.pid, *descendants(acting.pid, children)]
        sandboxed = [pid for keeper in acting.keepers for pid in descendants(keeper, children)]
        family += sandboxed  # keepers themselves are ours
        used = usage_of(family, table)
        limits = self._limits
        held = held_bytes(family) + sandboxes_bytes(sandboxed) if looks else 0
        if used.rss_bytes + held > limits.memory_mb << 20:
            self.replaced["memory"] += 1
            reason = f"took more than environment.memory_mb = {limits.memory_mb}"
        elif used.num_tasks > limits.max_processes:
            self.replaced["processes"] += 1
            reason = f"has more than environment.max_processes = {limits.max_processes}"
        else:
            return
        acting.fail(f"killed: it {reason}")

    def _in_background(self, job: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def read_message(
    reader: asyncio.StreamReader, *, most: int = MAX_OBSERVATION_BYTES
) -> FromEnvironment:
    """Return the next message on a stream, of ``most`` bytes at most."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    if length > most:
        raise ConnectionError(f"a message of {length} bytes, at most {most}")
    return from_environment.decode(await reader.readexactly(length))


def raw_disks(uid: int, folders: Iterable[Path] = _DEVICES) -> list[Path]:
    """Return devices in which a user could read hidden files: only root may read them."""
    if uid:
        return []
    nodes = [node for folder in folders if folder.is_dir() for node in folder.iterdir()]
    return [node for node in nodes if node.is_block_device() or _PASSES_COMMANDS.match(node.name)]


def own_services() -> list[Path]:
    """Return folders of sockets at which programs of our user take orders from trajectories.

    Trajectories of root have no right to connect there.
    """
    uid = os.geteuid()
    return [Path(f"/run/user/{uid}"), Path(f"/tmp/tmux-{uid}")] if uid else []  # noqa: S108


def _peer(writer: asyncio.StreamWriter) -> int:
    """Return the id on this host of the process that connected."""
    connection = writer.get_extra_info("socket")
    size = struct.calcsize("3i")
    pid, _, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return pid if pid != os.getpid() else 0
