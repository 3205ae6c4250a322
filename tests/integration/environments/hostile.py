"""Environments that reach for their loader, their neighbours and what is hidden from them."""

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from slipstream.broker.sandbox.frames import Unframer, frame_of
from slipstream.generators.environments.messages import (
    BeginTrajectory,
    Connected,
    Fork,
    Replied,
    Turned,
    to_environment,
    to_loader,
)
from slipstream.generators.environments.sdk import Environment, Prompt, Reply, Step

_libc = ctypes.CDLL(None, use_errno=True)
_PTRACE, _READ_OTHER, _GET_DESCRIPTOR = {"x86_64": (101, 310, 438), "aarch64": (117, 270, 438)}[
    os.uname().machine
]
_SEIZE, _DETACH_MOUNT, _NEW_USER_AND_MOUNTS = 0x4206, 2, 0x10020000
_MOST_PIDS = 400  # of a jail
_MOST_DESCRIPTORS = 64


class Attacks(Environment):
    """Tries all, and says what it came to."""

    def __init__(self, *, hidden: str, service: str) -> None:
        self._hidden = hidden
        self._service = service

    async def reset(self, prompt: Prompt) -> str:
        return await self._wait() if prompt.text == "wait" else prompt.text

    async def _wait(self) -> str:
        """Be a neighbour, with a program that has a key in its variables."""
        variables = {"OPENAI_API_KEY": "of-a-neighbour"}
        self._program = await asyncio.create_subprocess_exec("sleep", "1000", env=variables)
        return "waiting"

    async def step(self, _reply: Reply) -> Step:
        others = [pid for pid in range(1, _MOST_PIDS) if pid != os.getpid()]
        tried: dict[str, Callable[[int], bool]] = {
            "signal": _signal,
            "trace": _trace,
            "read_memory": _read_memory,
            "take_descriptor": lambda pid: bool(_taken_from(pid)),
            "open_memory": lambda pid: _opens(f"/proc/{pid}/mem"),
            "read_variables": lambda pid: _opens(f"/proc/{pid}/environ"),
            "list_descriptors": lambda pid: _lists(f"/proc/{pid}/fd"),
            "see_arguments": lambda pid: _opens(f"/proc/{pid}/cmdline"),
        }
        parts = {name: float(any(map(attack, others))) for name, attack in tried.items()}
        parts["uncover"] = float(_uncovered(self._hidden, ()))
        parts["uncover_as_its_own_root"] = float(_uncovered(self._hidden, ("unshare", "-Urm")))
        parts["read_disks"] = float(any(map(_opens_disk, Path("/dev").iterdir())))  # noqa: ASYNC240
        parts["reach_the_generators_socket"] = float(_reaches_socket())
        parts["ask_a_service_of_the_user"] = float(_connects(self._service))
        parts["write_cgroups"] = float(any(map(_is_writable, _mounts_below("/sys/fs/cgroup"))))
        parts["write_roots_files"] = float(os.access("/etc/passwd", os.W_OK))
        return Step(done=True, parts=parts)


def _signal(pid: int) -> bool:
    with suppress(OSError):
        os.kill(pid, 0)
        return True
    return False


def _trace(pid: int) -> bool:
    return bool(_libc.syscall(_PTRACE, _SEIZE, pid, 0, 0) == 0)


def _read_memory(pid: int) -> bool:
    held = ctypes.create_string_buffer(8)
    here = (ctypes.c_uint64 * 2)(ctypes.addressof(held), 8)
    found = _libc.syscall(_READ_OTHER, pid, ctypes.byref(here), 1, ctypes.byref(here), 1, 0)
    return bool(found >= 0 or ctypes.get_errno() == 14)  # EFAULT: it was allowed to look


def _taken_from(pid: int) -> list[socket.socket]:
    """Return connected Unix sockets of another process."""
    found: list[socket.socket] = []
    with suppress(OSError):
        process = os.pidfd_open(pid)
        for number in range(3, _MOST_DESCRIPTORS):
            taken = _libc.syscall(_GET_DESCRIPTOR, process, number, 0)
            if taken < 0:
                continue
            with suppress(OSError):
                one = socket.socket(fileno=taken)
                if one.family == socket.AF_UNIX and one.type & socket.SOCK_STREAM:
                    one.getpeername()
                    found.append(one)
                    continue
            os.close(taken)
    return found


def _opens(path: str) -> bool:
    with suppress(OSError), open(path, "rb") as file:  # noqa: PTH123 as an attacker does
        return "mem" in path or bool(file.read(1))
    return False


def _lists(path: str) -> bool:
    with suppress(OSError):
        return bool(os.listdir(path))  # noqa: PTH208 as an attacker does
    return False


def _opens_disk(path: Path) -> bool:
    with suppress(OSError):
        if path.is_block_device():
            os.close(os.open(path, os.O_RDONLY))
            return True
    return False


def _reaches_socket() -> bool:
    """True if the socket where later trajectories connect is within reach: it could be replaced."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 as an attacker does
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            path = one.getpeername() if one.family == socket.AF_UNIX else ""
            if path and (os.access(path, os.W_OK) or os.access(Path(path).parent, os.W_OK)):
                return True
    return False


def _connects(path: str) -> bool:
    with suppress(OSError), socket.socket(socket.AF_UNIX) as one:
        one.connect(path)
        return True
    return False


def _mounts_below(folder: str) -> set[str]:
    places = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    return {place for place in places if Path(place).is_relative_to(folder)}


def _is_writable(mount: str) -> bool:
    return not os.statvfs(mount).f_flag & os.ST_RDONLY


_UNCOVER = """
import ctypes, sys
libc = ctypes.CDLL(None)
while libc.umount2(sys.argv[1].encode(), 2) == 0:
    pass
print(open(sys.argv[1]).read())
"""


def _uncovered(path: str, before: tuple[str, ...]) -> bool:
    command = [*before, sys.executable, "-I", "-S", "-c", _UNCOVER, path]
    done = subprocess.run(command, capture_output=True, check=False)
    return b"secret" in done.stdout


class Thief(Environment):
    """Takes the loader's link, stops the loader and plays all later trajectories itself."""

    async def step(self, _reply: Reply) -> Step:
        ours, theirs = socket.socketpair()
        _libc.prctl(36, 0, 0, 0, 0)  # what it leaves is the loader's
        if not os.fork():
            if os.fork():
                os._exit(0)
            os.setsid()
            _steal(theirs)
            os._exit(0)
        theirs.close()
        ours.settimeout(60)
        stolen = ours.recv(1)
        return Step(done=True, reward=1.0, parts={"stolen": float(stolen == b"y")})


def _steal(told: socket.socket) -> None:
    for pid in range(2, _MOST_PIDS):
        if pid in (os.getpid(), os.getppid()):
            continue
        with suppress(OSError):
            if b"loader" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                continue
        for link in _taken_from(pid):
            with suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
                told.sendall(b"y")
                _play(link)
                return
    told.sendall(b"n")
    time.sleep(1_000)  # outlives its trajectory, if it can


def _play(link: socket.socket) -> None:
    frames = Unframer()
    while data := link.recv(1 << 16):
        for body in frames.feed(data):
            order = to_loader.decode(body)
            if isinstance(order, Fork):
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect(order.address)
                    connection.sendall(frame_of(Connected(ticket=order.ticket)))
                    _answer(connection)


def _answer(connection: socket.socket) -> None:
    frames = Unframer()
    while data := connection.recv(1 << 16):
        for body in frames.feed(data):
            match to_environment.decode(body):
                case BeginTrajectory(prompt=prompt):
                    said = {"role": "user", "content": f"{prompt.ground_truth}"}
                    connection.sendall(frame_of(Turned(messages=(said,))))
                case Replied():
                    told = Turned(messages=(), reward=777.0, done=True)
                    connection.sendall(frame_of(told))
