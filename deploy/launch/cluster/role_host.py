"""Starts and watches one role on a host of a cluster, for a supervisor on another host.

Nothing here knows the kind of cluster: `ray_calls.py` makes an actor of it. Inputs and outputs are
bytes of the structs below, in JSON, so no object of ours is ever unpickled.
"""

import ctypes
import os
import shutil
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil

from slipstream.broker.server.keyring import authorize
from slipstream.deploy.launch.cluster.host_program import HostProgram
from slipstream.deploy.launch.plan import RolePlan
from slipstream.deploy.launch.scratch import MEMORY, own_folder, remove_folders_of_the_dead
from slipstream.deploy.launch.starters import LocalProcess, LocalStarter
from slipstream.wire.files.keys import ClientKey, write_client_key, write_private
from slipstream.wire.messages.broker import Role
from slipstream.wire.process.patience import END_AT_MOST, Patience, Signs, signs_of
from slipstream.wire.process.ports import free_port

PYTHON, SETTINGS = "{python}", "{settings}"  # placeholders in a command, replaced on the host
_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
_END_S = 10.0  # limit without a sign of life, for what outlives a role
_MOST_LOG_BYTES = 256 << 10  # limit for one answer


class HostFacts(msgspec.Struct, frozen=True):
    """What a host says of itself."""

    hostname: str
    sees: bool  # True if the host sees the file in question
    node: str  # id in the cluster; empty without one
    niceness: int  # niceness of its role; above 0 other processes of the host come first


class StartRole(msgspec.Struct, frozen=True, kw_only=True):
    """A role to be started."""

    plan: RolePlan  # its command includes PYTHON and SETTINGS
    settings: str  # content of the settings file
    folder: str  # working folder; empty for the host process's own
    key: ClientKey | None  # key that the role proves to the broker


class RoleState(msgspec.Struct, frozen=True, kw_only=True):
    """A role as it is now."""

    code: int | None  # exit code, None while it runs
    words: str  # last line of the role
    signs: Signs
    sockets: tuple[str, ...]  # names in its folder of sockets


def take_niceness(pid: int) -> None:
    """Give this process the niceness of another one, where it may: lowering takes CAP_SYS_NICE."""
    niceness = os.getpriority(os.PRIO_PROCESS, pid)
    for thread in psutil.Process().threads():  # each has its own; those to come inherit
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread.id, niceness)


class RoleHost:
    """A folder for temporary files, one of memory for a key, and at most one process of a role."""

    node = ""  # id in the cluster; empty without one

    def __init__(self, *, end_s: float = _END_S) -> None:
        """Make the folders. At closing, what outlives a role has ``end_s`` to end."""
        self._end_s = end_s
        remove_folders_of_the_dead()
        self.scratch = own_folder()
        self._memory = own_folder(MEMORY if MEMORY.is_dir() else self.scratch)
        self._starter = LocalStarter(self.scratch)
        self._process: LocalProcess | None = None
        self._program: HostProgram | None = None  # program that looks at this host
        self._log, self._sockets = self.scratch / "role.log", self.scratch / "sockets"
        # the kernel ends a role with the thread that forked it: this thread stays
        self._forks = ThreadPoolExecutor(1, thread_name_prefix="forks")
        self._others = set(psutil.Process().children())  # processes that this host must not end
        _adopt_orphans(True)  # children of a dead role become children of this process

    def facts(self, path: str) -> bytes:
        """Return HostFacts; ``path`` is the file in question."""
        sees = Path(path).is_file()
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        return msgspec.json.encode(HostFacts(socket.gethostname(), sees, self.node, niceness))

    def free_port(self, address: str, count: int) -> int:
        """Return the first of ``count`` neighboring ports that are free on an address now.

        Until they are used, the system gives them to no outgoing connection.
        """
        return free_port(address, count)

    def make_key(self, folder: str, name: str, role: Role) -> bytes:
        """Authorize a key with the broker's folder of keys; return it as a ClientKey.

        Raises:
            ConfigError: the folder cannot be used.
        """
        return msgspec.json.encode(authorize(Path(folder), name, role))

    def look(self, module: str, folder: str, request: bytes, limit_s: float) -> bytes:
        """Ask the program of a module that looks at this host, as HostProgram.ask does.

        The first call starts it in ``folder``; empty for this process's.
        """
        if self._program is None:
            where = Path(folder) if folder else None
            self._program = self._forks.submit(HostProgram, module, folder=where).result()
        return self._program.ask(request, limit_s)

    def start(self, request: bytes) -> int:
        """Start a role and return its process id. The previous role has ended."""
        role = msgspec.json.decode(request, type=StartRole)
        settings = self.scratch / "settings.toml"
        write_private(settings, role.settings)
        names = {PYTHON: sys.executable, SETTINGS: str(settings)}
        command = [names.get(word, word) for word in role.plan.command]
        command.append(f"run.socket_dir={self._sockets}")
        if role.key is not None:
            key_file = self._memory / f"{role.plan.name}.key"
            write_client_key(key_file, role.key)
            command.append(f"run.key_file={key_file}")
        plan = replace(role.plan, command=tuple(command))
        folder = Path(role.folder) if role.folder else None
        if self._process is not None:
            self._process.release()
        self._process = self._forks.submit(
            self._starter.start, plan, (), self._log, folder
        ).result()
        return self._process.pid

    def observe(self, offset: int, wait_s: float) -> tuple[bytes, bytes]:
        """Return a RoleState, and the log of all processes started here from byte ``offset`` on.

        Waits up to ``wait_s`` for something new.
        """
        process = self._process
        if process is None:
            raise RuntimeError("no role was started here")
        until = time.monotonic() + wait_s
        while time.monotonic() < until and process.poll() is None:
            if self._log.stat().st_size > offset:
                break
            time.sleep(_POLL_S)
        code = process.poll()  # read before the log: nothing comes after it
        with self._log.open("rb") as file:
            file.seek(offset)
            log = file.read(_MOST_LOG_BYTES)
        seen = RoleState(
            code=code,
            words=process.last_words(),
            signs=process.signs(),
            sockets=tuple(path.name for path in self._sockets.glob("*.sock")),
        )
        return msgspec.json.encode(seen), log

    def signal(self, signum: int) -> None:
        """Send the role a signal, unless it has ended."""
        if self._process is not None:
            self._process.send_signal(signum)

    def close(self) -> None:
        """End the role and everything that it left, and remove the folders."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.release()
        if self._program is not None:
            self._program.close()
        self._starter.close()
        self._forks.shutdown()
        self._end_children()
        _adopt_orphans(False)
        for folder in (self.scratch, self._memory):
            shutil.rmtree(folder, ignore_errors=True)

    def _end_children(self) -> None:
        """Wait for what outlived the role, such as the weight relay; kill what does not end."""
        me = psutil.Process()

        def left() -> list[psutil.Process]:
            return [child for child in me.children() if child not in self._others]

        patience = Patience(
            "what a role left to end",
            self._end_s,
            signs_of(lambda: [child.pid for child in left()]),
            at_most=END_AT_MOST,
        )
        while children := left():
            if patience.is_over():
                for child in children:
                    with suppress(psutil.NoSuchProcess):
                        child.send_signal(signal.SIGKILL)
            psutil.wait_procs(children, timeout=_POLL_S)


def _adopt_orphans(wanted: bool) -> None:
    with suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(wanted))
