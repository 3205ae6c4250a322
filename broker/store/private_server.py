"""A private Redis-compatible server in the run folder, for runs that bring none of their own."""

import asyncio
import errno
import fcntl
import logging
import os
import secrets
import shutil
import socket as sockets
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.broker.store.server_binary import find_server
from slipstream.wire.errors import ChildDiedError, ConfigError
from slipstream.wire.process.patience import AT_MOST, END_AT_MOST, Patience, signs_of
from slipstream.wire.process.processes import bound_to_me, last_lines

_log = logging.getLogger(__name__)
_START_TIMEOUT_S = 30.0  # without a sign of life, as the next one
_STOP_TIMEOUT_S = 10.0
_STOP_POLL_S = 0.02
_ANSWER_S = 5.0  # the server may be starved of CPU; its death ends the wait
_LOCK_TIMEOUT_S = 5.0  # wait for a server that has a broker
_DYING_S = 60.0  # wait for a server whose broker was just killed: the kernel will end it
_POLL_S = 0.1
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 2.0
_STEADY_S = 5.0
_ROOM_BYTES = 1024 * 1024
_FULL_DISK = ("No space left on device", "Short write while writing to the AOF")
_DAMAGED = "Bad file format reading the append only file"


@dataclass(slots=True)
class Restarts:
    """Decides how long to wait before a server is started again. Times in seconds.

    A server that came up counts as well only after ``_STEADY_S`` of answering with room on its
    disk: on a full one it starts, answers and ends at the first write, over and over.
    """

    down_since: float | None = None
    answering_since: float | None = None
    pause_s: float = _FIRST_PAUSE_S

    def ended(self, now_s: float) -> float:
        """Note that the server ended, or did not start; return the pause before the next try."""
        self.answering_since = None
        if self.down_since is None:
            self.down_since, self.pause_s = now_s, _FIRST_PAUSE_S
        pause_s, self.pause_s = self.pause_s, min(2 * self.pause_s, _MAX_PAUSE_S)
        return pause_s

    def answered(self, now_s: float) -> bool:
        """Note that the server answers; True once it has done so long enough to be well."""
        if self.answering_since is None:
            self.answering_since = now_s
        if now_s - self.answering_since < _STEADY_S:
            return False
        self.down_since = None
        return True

    def down_s(self, now_s: float) -> float:
        """Return for how long the server has not been well."""
        return 0.0 if self.down_since is None else now_s - self.down_since


@dataclass(slots=True)
class RedisServer:
    """A running child; its password is neither in argv nor in a file."""

    binary: Path
    socket: Path
    folder: Path
    log_file: Path
    fsync: str
    password: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    process: "subprocess.Popen[bytes]" = field(init=False, repr=False)

    @classmethod
    def launch(
        cls,
        *,
        socket: Path,
        folder: Path,
        log_file: Path,
        fsync: str,
        binary: Path | None = None,
        lock_timeout_s: float = _LOCK_TIMEOUT_S,
    ) -> "RedisServer":
        """Start a server that will listen on a Unix socket only; on the main thread.

        No other user reads its files, which hold every prompt, answer and ground truth. For
        ``lock_timeout_s`` it waits for another server in the folder to end.

        Raises:
            ConfigError: another server runs in the folder, or there is no server to start.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        server = cls(find_server(binary), socket.absolute(), folder.resolve(), log_file, fsync)
        server._start(lock_timeout_s)
        return server

    @property
    def url(self) -> str:
        """URL that it listens on."""
        return f"unix://{self.socket}"

    async def until_listening(self, socket: Path) -> None:
        """Return once the server listens.

        Raises:
            ChildDiedError: it ended, or shows no sign of life.
        """
        patience = self._patience("the Redis server to listen", _START_TIMEOUT_S)
        while not _listens(socket):
            self.check_alive()
            if patience.is_over():
                raise ChildDiedError(
                    f"the Redis server does not listen: it {patience.why}; {self.log_file}:\n"
                    f"{last_lines(self.log_file)}"
                )
            await asyncio.sleep(0.01)

    def _patience(self, what: str, limit_s: float, *, at_most: float = AT_MOST) -> Patience:
        signs = signs_of(lambda: [self.process.pid], self.log_file)
        return Patience(what, limit_s, signs, at_most=at_most)

    def check_alive(self) -> None:
        """Raise ChildDiedError if the server ended; ConfigError if a person has to do something."""
        if self.process.poll() is None:
            return
        if _DAMAGED in (tail := last_lines(self.log_file, 8)):
            raise ConfigError(
                f"the store in {self.folder} is damaged: see docs/operations.md, "
                f"A damaged store; {self.log_file}:\n{tail}"
            )
        if self._disk_is_full():
            raise ConfigError(f"{self._end()} (run.dir)")
        raise ChildDiedError(self._end())

    async def keep_alive(self, *, outage_s: float) -> None:
        """Start the server again whenever it ends; runs until cancelled, on the main thread.

        Raises:
            ChildDiedError: it could not be kept up.
            ConfigError: because the disk is full, or another server took the folder.
        """
        restarts = Restarts()
        while True:
            await asyncio.sleep(_POLL_S)
            if self.process.poll() is not None:
                await self._start_again(restarts, outage_s)
            elif restarts.down_since is None or not await self._answers():
                continue
            elif not self.has_room():
                if restarts.down_s(time.monotonic()) >= outage_s:
                    raise ConfigError(f"the disk is full: {self.folder} (run.dir)")
            else:
                if restarts.answering_since is None:
                    away_s = restarts.down_s(time.monotonic())
                    _log.info("the Redis server is back after %.1f s", away_s)
                restarts.answered(time.monotonic())

    def stop(self) -> None:
        """End the server in order; by force, if it does nothing to that end."""
        self.process.terminate()
        patience = self._patience("the Redis server to end", _STOP_TIMEOUT_S, at_most=END_AT_MOST)
        while self.process.poll() is None:
            if patience.is_over():
                _log.warning("the Redis server %s after SIGTERM and is killed", patience.why)
                self.process.kill()
                self.process.wait()
            time.sleep(_STOP_POLL_S)

    async def _start_again(self, restarts: Restarts, outage_s: float) -> None:
        """Wait, then start the server once; or give up."""
        level = logging.WARNING if restarts.down_since is None else logging.INFO
        pause_s = restarts.ended(time.monotonic())
        if restarts.down_s(time.monotonic()) >= outage_s:
            self.check_alive()
        _log.log(level, "%s; starting it again in %.1f s", self._end(), pause_s)
        await asyncio.sleep(pause_s)
        try:
            self._start(0.0)
        except (ConfigError, OSError) as error:
            _log.log(level, "the Redis server could not be started: %s", error)
            if restarts.down_s(time.monotonic()) >= outage_s:
                raise

    def _start(self, lock_timeout_s: float) -> None:
        """Start the child; it holds the folder's lock until it ends."""
        settings = (
            f"port 0\nunixsocket {_quoted(self.socket)}\nunixsocketperm 700\n"
            f"dir {_quoted(self.folder)}\n"
            f'appendonly yes\nappendfsync {self.fsync}\naof-load-truncated yes\nsave ""\n'
            "auto-aof-rewrite-percentage 100\nauto-aof-rewrite-min-size 64mb\n"
            f"daemonize no\nrequirepass {self.password}\n"
        )
        with _locked(self.folder, lock_timeout_s) as lock, self.log_file.open("ab") as log:
            self.socket.unlink(missing_ok=True)
            self.process = subprocess.Popen(  # noqa: S603 our own binary, settings through stdin
                [str(self.binary), "-"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                preexec_fn=bound_to_me(),
                process_group=0,
                pass_fds=(lock,),
                umask=0o077,
            )
            with suppress(OSError):  # used in a message only, and the disk may be full
                os.pwrite(lock, f"{self.process.pid:>10} {os.getpid():>10}\n".encode(), 0)
        if self.process.stdin is not None:
            with suppress(BrokenPipeError), self.process.stdin as stdin:
                stdin.write(settings.encode())

    async def _answers(self) -> bool:
        """True if the server answers a client at all, also while it loads its file."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self.socket)
                try:
                    writer.write(b"PING\r\n")
                    return bool(await reader.readline())
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False

    def _disk_is_full(self) -> bool:
        """Explain why the server ended; its log may be cut short by the full disk itself."""
        tail = last_lines(self.log_file, 8)
        return not self.has_room() or any(sign in tail for sign in _FULL_DISK)

    def has_room(self) -> bool:
        """False if the disk of its folder is full."""
        return shutil.disk_usage(self.folder).free >= _ROOM_BYTES

    def _end(self) -> str:
        """Describe how the server ended."""
        code = self.process.returncode
        if self._disk_is_full():
            return (
                f"the disk is full: Redis ended with code {code} because it cannot write its log "
                f"in {self.folder}; nothing is acknowledged until there is room"
            )
        tail = last_lines(self.log_file, 5)
        return f"the Redis server ended with code {code}; {self.log_file}:\n{tail}"


def _listens(path: Path) -> bool:
    """True if a server listens there: its file is there earlier, or from a server that died."""
    with sockets.socket(sockets.AF_UNIX) as client:
        client.setblocking(False)
        return client.connect_ex(str(path)) in (0, errno.EAGAIN)  # its backlog may be full


def _quoted(path: Path) -> str:
    """Return a path as one word of a Redis configuration."""
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _is_dying(holder: Sequence[str]) -> bool:
    """True if a server has lost the broker that started it, with which it dies.

    The holder of the lock is two pids, as its file has them: the server's and its broker's.
    """
    try:
        server, broker = map(int, holder)
        state, parent = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return False
    return state in {"Z", "X"} or int(parent) != broker


@contextmanager
def _locked(folder: Path, timeout_s: float) -> Iterator[int]:
    """Hold the folder's lock; a child that inherits the descriptor keeps it for its life.

    Raises:
        ConfigError: another server holds it.
    """
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        began_s, said_s = time.monotonic(), 10.0
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                holder = os.pread(lock, 32, 0).decode(errors="replace").split()
                limit_s = _DYING_S if timeout_s and _is_dying(holder) else timeout_s
                waited_s = time.monotonic() - began_s
                server = holder[0] if holder else "unknown"
                if waited_s >= limit_s:
                    raise ConfigError(
                        f"another Redis server (pid {server}) runs in {folder}"
                    ) from error
                if waited_s >= said_s:
                    said_s *= 2
                    _log.info(
                        "waiting for the Redis server before (pid %s) to end: %.0f s",
                        server,
                        waited_s,
                    )
                time.sleep(0.05)
        yield lock
    finally:
        os.close(lock)
