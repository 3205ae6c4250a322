"""Starts and watches one role on a host of a cluster, for a supervisor on another host.

Nothing here knows which cluster it is: `ray.py` makes an actor of it. What goes in and out are
bytes of the structs below, in JSON, so that no object of ours is unpickled anywhere.
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
from slipstream.deploy.launch.host_program import HostProgram
from slipstream.deploy.launch.plan import RolePlan
from slipstream.deploy.launch.starters import LocalProcess, LocalStarter
from slipstream.generators.sglang.process import remove_leftovers
from slipstream.wire.files.keys import ClientKey, write_client_key, write_private
from slipstream.wire.messages.broker import Role
from slipstream.wire.process.patience import END_AT_MOST, Patience, Signs, signs_of
from slipstream.wire.process.processes import keep_folder, remove_abandoned

PYTHON, SETTINGS = "{python}", "{settings}"  # in a command: what they are is known on the host
_PREFIX = "slipstream-"
_OWNER, _OURS = "owner", "role host"  # a file in a folder of ours, and what it says
_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 20_000  # those of Ray's workers are below
_MEMORY = Path("/dev/shm")  # noqa: S108 files there are never on a disk
_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
_END_S = 10.0  # without a sign of life, for what outlives a role
_MOST_LOG_BYTES = 256 << 10  # of one answer


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a host says of itself."""

    hostname: str
    sees: bool  # the file that it was asked about


class StartRole(msgspec.Struct, frozen=True, kw_only=True):
    """A role to be started."""

    name: str
    command: tuple[str, ...]  # with PYTHON and SETTINGS in it
    settings: str  # what the settings file is to hold
    environment: dict[str, str]
    folder: str  # to run in; empty is that of the host's process
    cores: tuple[int, ...]
    key: ClientKey | None  # that the role is to prove to the broker


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """A role as it is now."""

    code: int | None  # exit code, None while it runs
    words: str  # the line that it ended with
    cpu_s: float
    page_ins: int
    log_bytes: int  # that it has written so far
    sockets: tuple[str, ...]  # that are in its folder of sockets


class RoleHost:
    """A folder for temporary files, one of memory for a key, and at most one process of a role."""

    def __init__(self, *, end_s: float = _END_S) -> None:
        """Make the folders.

        Args:
            end_s: without a sign of life, for what outlives a role as it is closed.
        """
        self._end_s = end_s
        _remove_those_of_the_dead()
        self.scratch = _own_folder(None)
        self._memory = _own_folder(_MEMORY if _MEMORY.is_dir() else self.scratch)
        self._starter = LocalStarter(self.scratch)
        self._process: LocalProcess | None = None
        self._program: HostProgram | None = None  # that looks at this host
        self._log = self.scratch / "role.log"
        # The kernel ends a role with the thread that forked it: this one stays.
        self._forks = ThreadPoolExecutor(1, thread_name_prefix="forks")
        self._others = set(psutil.Process().children())  # that are not ours to end
        _adopt_orphans(True)  # what outlives a role becomes a child of this process

    def facts(self, path: str) -> bytes:
        """Return HostFacts; ``path`` is that of the file it is asked about."""
        facts = HostFacts(hostname=socket.gethostname(), sees=Path(path).is_file())
        return msgspec.json.encode(facts)

    def free_port(self, address: str, count: int) -> int:
        """Return the first of ``count`` neighboring ports that are free on an address now.

        The system gives none of them to a connection that leaves this host before they are used.
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
        """Ask a program that looks at this host; it is started the first time.

        Args:
            module: of the program.
            folder: to run in; empty is that of this process.
            request: for HostProgram.ask, as is ``limit_s``.
            limit_s: that it may wait for others.

        Raises:
            ChildDiedError: it ended.
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
        """Start a role and return its process id. The one before has ended."""
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
        """Return an Observation, and what the role has logged from byte ``offset`` on.

        Args:
            offset: of its log, over all processes that were started here.
            wait_s: for anything new at most.
        """
        process = self._process
        if process is None:
            raise RuntimeError("no role was started here")
        until = time.monotonic() + wait_s
        while time.monotonic() < until and process.poll() is None:
            if self._log.stat().st_size > offset:
                break
            time.sleep(_POLL_S)
        code = process.poll()  # before the log is read: nothing comes after it
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
        """End the role and all that it left, and remove the folders."""
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
    """Make a folder that is locked until this process ends, and says so once it is."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    keep_folder(folder)
    (folder / _OWNER).write_text(_OURS)
    return folder


def _remove_those_of_the_dead() -> None:
    """Remove the folders of role hosts that were killed, which nobody has locked.

    One that lives may be in another container that shares them: no process id tells.
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
