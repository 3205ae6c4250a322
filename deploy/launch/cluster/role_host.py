"""Starts and watches one role on a host of a cluster, for a supervisor on another host.

Nothing here knows the kind of cluster: `ray_calls.py` makes an actor of it. Inputs and outputs are
bytes of the structs below, in JSON, so no object of ours is ever unpickled.
"""

import ctypes
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from slipstream.broker.server.keyring import authorize
from slipstream.deploy.launch.cluster.host_program import HostProgram
from slipstream.deploy.launch.plan import RolePlan
from slipstream.deploy.launch.starters import LocalProcess, LocalStarter
from slipstream.generators.sglang.process import remove_leftovers
from slipstream.wire.files.keys import ClientKey, write_client_key, write_private
from slipstream.wire.messages.broker import Role
from slipstream.wire.process.patience import END_AT_MOST, Patience, Signs, signs_of
from slipstream.wire.process.processes import keep_folder, remove_abandoned

PYTHON, SETTINGS = "{python}", "{settings}"  # placeholders in a command, replaced on the host
_PREFIX = "slipstream-"
_OWNER, _OURS = "owner", "role host"  # file in a folder of ours, and its content
_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 20_000  # above the ports of Ray's workers
_MEMORY = Path("/dev/shm")  # noqa: S108 memory, never a disk
_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
_END_S = 10.0  # limit without a sign of life, for what outlives a role
_MOST_LOG_BYTES = 256 << 10  # limit for one answer


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a host says of itself."""

    hostname: str
    sees: bool  # True if the host sees the file in question


class StartRole(msgspec.Struct, frozen=True, kw_only=True):
    """A role to be started."""

    name: str
    command: tuple[str, ...]  # includes PYTHON and SETTINGS
    settings: str  # content of the settings file
    environment: dict[str, str]
    folder: str  # working folder; empty for the host process's own
    cores: tuple[int, ...]
    key: ClientKey | None  # key that the role proves to the broker


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """A role as it is now."""

    code: int | None  # exit code, None while it runs
    words: str  # last line of the role
    cpu_s: float
    page_ins: int
    log_bytes: int  # bytes written to the log so far
    sockets: tuple[str, ...]  # names in its folder of sockets


class RoleHost:
    """A folder for temporary files, one of memory for a key, and at most one process of a role."""

    def __init__(self, *, end_s: float = _END_S) -> None:
        """Make the folders.

        Args:
            end_s: Limit without a sign of life, for what outlives a role at closing.
        """
        self._end_s = end_s
        _remove_those_of_the_dead()
        self.scratch = _own_folder(None)
        self._memory = _own_folder(_MEMORY if _MEMORY.is_dir() else self.scratch)
        self._starter = LocalStarter(self.scratch)
        self._process: LocalProcess | None = None
        self._program: HostProgram | None = None  # program that looks at this host
        self._log = self.scratch / "role.log"
        # the kernel ends a role with the thread that forked it: this thread stays
        self._forks = ThreadPoolExecutor(1, thread_name_prefix="forks")
        self._others = set(psutil.Process().children())  # processes that this host must not end
        _adopt_orphans(True)  # children of a dead role become children of this process

    def facts(self, path: str) -> bytes:
        """Return HostFacts; ``path`` is the file in question."""
        facts = HostFacts(hostname=socket.gethostname(), sees=Path(path).is_file())
        return msgspec.json.encode(facts)

    def free_port(self, address: str, count: int) -> int:
        """Return the first of ``count`` neighboring ports that are free on an address now.

        Until they are used, the system gives them to no outgoing connection.
        """
        given = int(_GIVEN_PORTS.read_text().split()[0])
        ports = range(_FIRST_PORT, (given if given > _FIRST_PORT + 1000 else 1 << 16) - count)
        while True:
            port = secrets.choice(ports)
            if all(_is_free(address, port + i) for i in range(count)):
                return port

    def make_keys(self, folder: str, names: Sequence[tuple[str, Role]]) -> bytes:
        """Authorize keys with the broker's folder of keys; return them as a list of ClientKey.

        Raises:
            ConfigError: the folder cannot be used.
        """
        keys = [authorize(Path(folder), name, role) for name, role in names]
        return msgspec.json.encode(keys)

    def look(self, module: str, folder: str, request: bytes, limit_s: float) -> bytes:
        """Ask a program that looks at this host; the first call starts it.

        Args:
            module: The program's module.
            folder: Working folder; empty for this process's.
            request: Request for HostProgram.ask.
            limit_s: Longest time that the program may wait for other hosts.

        Raises:
            ChildDiedError: the program ended.
        """
        if self._program is None:
            where = Path(folder) if folder else None
            self._program = self._forks.submit(
                HostProgram,
                module,
                folder=where,
                progress=lambda _what: None,  # nobody watches
            ).result()
        return self._program.ask(request, limit_s)

    def start(self, request: bytes) -> int:
        """Start a role and return its process id. The previous role has ended."""
        role = msgspec.json.decode(request, type=StartRole)
        settings = self.scratch / "settings.toml"
        write_private(settings, role.settings)
        names = {PYTHON: sys.executable, SETTINGS: str(settings)}
        command = [names.get(word, word) for word in role.command]
        command.append(f"run.socket_dir={self._sockets}")
        if role.key is not None:
            key_file = self._memory / f"{role.name}.key"
            write_client_key(key_file, role.key)
            command.append(f"run.key_file={key_file}")
        plan = RolePlan(role.name, tuple(command), environment=role.environment, cores=role.cores)
        folder = Path(role.folder) if role.folder else None
        if self._process is not None:
            self._starter.sweep(role.name)
            self._process.release()
        self._process = self._forks.submit(
            self._starter.start, plan, (), self._log, folder
        ).result()
        return self._process.pid

    def observe(self, offset: int, wait_s: float) -> tuple[bytes, bytes]:
        """Return an Observation, and the role's log from byte ``offset`` on.

        Args:
            offset: Position in the log of all processes started here.
            wait_s: Longest wait for something new.
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
        signs: Signs = process.signs()
        seen = Observation(
            code=code,
            words=process.last_words(),
            cpu_s=signs.cpu_s,
            page_ins=signs.page_ins,
            log_bytes=signs.log_bytes,
            sockets=tuple(path.name for path in self._sockets.glob("*.sock")),
        )
        return msgspec.json.encode(seen), log

    def signal(self, signum: int) -> None:
        """Send the role a signal, unless it has ended."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signum)

    def close(self) -> None:
        """End the role and everything that it left, and remove the folders."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._program is not None:
            self._program.close()
        self._starter.let_go()
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

    @property
    def _sockets(self) -> Path:
        return self.scratch / "sockets"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _is_free(address: str, port: int) -> bool:
    with socket.socket(_family(address)) as one:
        try:
            one.bind((address, port))
        except (OSError, OverflowError):
            return False
    return True


def _adopt_orphans(wanted: bool) -> None:
    with suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(wanted))


def _own_folder(parent: Path | None) -> Path:
    """Make a folder that is locked until this process ends, and is marked as ours."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    keep_folder(folder)
    (folder / _OWNER).write_text(_OURS)
    return folder


def _remove_those_of_the_dead() -> None:
    """Remove the folders of killed role hosts, which are no longer locked.

    A living role host may be in another container that shares them: process ids prove nothing.
    """
    for parent in {Path(tempfile.gettempdir()), _MEMORY}:
        for folder in parent.glob(f"{_PREFIX}*"):
            with suppress(OSError, UnicodeDecodeError):
                own = folder.stat().st_uid == os.geteuid()
                if own and (folder / _OWNER).read_text() == _OURS:
                    remove_abandoned(folder, _remove)


def _remove(folder: Path) -> None:
    for left in folder.glob("*-*"):
        remove_leftovers(left)
    shutil.rmtree(folder, ignore_errors=True)
