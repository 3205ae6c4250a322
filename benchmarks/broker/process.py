"""The processes that are measured: a real broker, a Redis as the broker starts it, drivers."""

import asyncio
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import psutil
import redis
import zmq

from benchmarks.broker.peer import Peer
from slipstream.broker.store.private_server import RedisServer
from slipstream.wire.errors import PeerLostError
from slipstream.wire.process.processes import bound_to_me, die_with_parent, last_lines

ROOT = Path(__file__).parents[2]
_START_S = 120.0
_NUM_ROWS = 1_000
_LONGEST_RESPONSE = 32 * 1024  # more tokens than the largest payload holds


@contextmanager
def work_folder() -> Iterator[Path]:
    """A short path, because sockets are in it; gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="bb-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()  # what is freed must not hold up the writes that are measured next


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and all its threads, without its children."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def rss_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


class BrokerProcess:
    """``start-broker`` with its private Redis, in a folder of its own."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self._folder = folder
        self._log = folder / "broker.txt"
        rows = ({"prompt": f"{i}+{i}=", "ground_truth": str(2 * i)} for i in range(_NUM_ROWS))
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "run.toml").write_text("")
        given = {
            "run.name": "r",
            "run.dir": folder,
            "run.steps": 10_000_000,
            "data.file": folder / "train.jsonl",
            "logging.trackers": "[]",
            "sampling.max_response_tokens": _LONGEST_RESPONSE,
        } | {name.replace("__", "."): value for name, value in settings.items()}
        config = ["--config", str(folder / "run.toml")]
        overrides = [f"{name}={value}" for name, value in given.items()]
        self._command = [sys.executable, "-m", "slipstream.broker.main", *config]
        self._overrides = overrides
        self.endpoint = f"ipc://{folder / 'r' / 'sockets' / 'broker.sock'}"
        self.redis_folder = folder / "r" / "redis"
        self.process: subprocess.Popen[bytes] | None = None
        self.pid = -1
        self.redis_pid = -1

    def __enter__(self) -> "BrokerProcess":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def launch(self, *, restarted: bool = False) -> None:
        """Start it and return at once."""
        option = ["--restarted"] if restarted else []
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._command, *option, *self._overrides],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                preexec_fn=bound_to_me(),
            )
        self.pid = self.process.pid

    def start(self, *, restarted: bool = False) -> None:
        """Start it and wait for the answer to a hello."""
        self.launch(restarted=restarted)
        self.until_welcome()

    def until_welcome(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        deadline = time.monotonic() + _START_S
        try:
            while True:
                self.check_alive()
                try:
                    Peer(context, self.endpoint, "observer", "looker", hello_s=0.5).close()
                    break
                except PeerLostError:
                    if time.monotonic() > deadline:
                        raise
        finally:
            context.term()
        self.redis_pid = self.find_redis()

    def find_redis(self) -> int:
        return next((child.pid for child in psutil.Process(self.pid).children()), -1)

    def check_alive(self) -> None:
        if self.process is None or self.process.poll() is not None:
            raise RuntimeError(f"the broker ended:\n{last_lines(self._log, 20)}")

    def kill(self) -> None:
        """Kill -9 the broker and its Redis."""
        for pid in (self.pid, self.redis_pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
        with suppress(psutil.NoSuchProcess):
            psutil.Process(self.redis_pid).wait(20)

    def stop(self) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process = None

    def aof_bytes(self) -> int:
        """Bytes of the append-only files on disk, those being rewritten too."""
        total = 0
        for path in self.redis_folder.rglob("*"):
            with suppress(OSError):
                total += path.stat().st_size if path.is_file() else 0
        return total

    def log_tail(self) -> str:
        return last_lines(self._log, 20)


@contextmanager
def bare_redis(folder: Path) -> Iterator[RedisServer]:
    """A server that is set up as the broker's own: Unix socket, appendfsync always."""
    socket = folder / "bare.sock"
    server = RedisServer.launch(
        socket=socket, folder=folder / "bare", log_file=folder / "bare.log", fsync="always"
    )
    try:
        asyncio.run(server.until_listening(socket))
        with suppress(redis.BusyLoadingError):
            redis_client(server).ping()
        yield server
    finally:
        server.stop()


def redis_client(server: RedisServer) -> redis.Redis:
    return redis.Redis.from_url(server.url, password=server.password)


_spawn = multiprocessing.get_context("spawn")


class SharedNumber(Protocol):
    """An integer that drivers share."""

    value: int


def shared_number(start: int = 0) -> SharedNumber:
    number: SharedNumber = _spawn.Value("q", start, lock=False)
    return number


class Driver:
    """A function in a process of its own; its result comes back, its error too."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._receiver, sender = _spawn.Pipe(duplex=False)
        self._process = _spawn.Process(
            target=_drive, args=(os.getpid(), sender, function, arguments), daemon=True
        )
        self._process.start()
        sender.close()
        self.pid = self._process.pid or -1

    def result(self, timeout_s: float) -> Any:  # noqa: ANN401 what the function returned
        if not self._receiver.poll(timeout_s):
            self.stop()
            raise TimeoutError(f"a driver took longer than {timeout_s:.0f} s")
        try:
            ok, value = self._receiver.recv()
        except EOFError as error:
            raise RuntimeError("a driver ended without a result") from error
        self._process.join()
        if not ok:
            raise RuntimeError(f"a driver failed: {value}")
        return value

    @property
    def is_running(self) -> bool:
        return self._process.is_alive() and not self._receiver.poll(0)

    def stop(self) -> None:
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextmanager
def drivers(*started: Driver) -> Iterator[tuple[Driver, ...]]:
    """End the drivers that still run."""
    try:
        yield started
    finally:
        for driver in started:
            driver.stop()


def _drive(
    parent_pid: int,
    sender: Any,  # noqa: ANN401 a Connection
    function: Callable[..., object],
    arguments: tuple[object, ...],
) -> None:
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        sender.send((True, function(*arguments)))
    except Exception as error:  # noqa: BLE001 it is reported to the parent
        sender.send((False, repr(error)))
