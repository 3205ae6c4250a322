"""Starts learners and programs of tests in a moment: forks of a process that has their imports.

It has one thread, so that a fork of it is whole, and is started once in a process of tests.
"""

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.wire.gpus import usable_gpus
from slipstream.wire.process.processes import bound_to_me
from slipstream.wire.process.stopping import STOP_SIGNALS

ROOT = Path(__file__).parents[2]
IMPORTED = (
    "slipstream.learner.launch",
    "slipstream.learner.loop",
    "slipstream.deploy.predict.memory.learner_rank",
    "slipstream.weightbus.relay.main",
    "tests.support.bus.agent",
    "tests.support.bus.learner",
    "tests.support.ranks.loop",
    "tests.support.ranks.policy",
    "transformers.models.auto.modeling_auto",
)
# What libraries read when they are imported: the same for all that is forked.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",  # it makes them early
    "HF_HUB_OFFLINE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # as a learner on several nodes has it
}
_LEARNER = "slipstream.learner.main"
_RELAY = "slipstream.weightbus.relay.main"
# Beginnings of modules that import torch, Megatron or transformers.
_FORKED = (
    "slipstream.deploy.preflight.align.reference",
    "slipstream.deploy.preflight.check.node",
    "slipstream.learner.",
    _RELAY,
    "tests.integration.engine_",
    "tests.integration.transformers_",
    "tests.support.bus.",
    "tests.support.families",
    "tests.support.in_flight_oracle",
    "tests.support.peft_logprobs",
    "tests.support.ranks.",
    "tests.support.vision_models",
)
_STARTS_OTHERS = (_LEARNER, "tests.support.bus.learner", "tests.support.ranks.loop")
_LONGEST_COMMAND = 1 << 14  # bytes, of which a fork's own takes the place
_MAX_BYTES = 1 << 18
_MAX_FDS = 16
_HIGH_FD = 500


class Forked(subprocess.Popen[Any]):
    """A process that a nursery forked; its pid is not used again before its end was asked for."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        source: "Nursery",
        max_file_bytes: int | None = None,
        **how: Any,  # noqa: ANN401 as there
    ) -> None:
        self._source = source
        self._max_file_bytes = max_file_bytes
        super().__init__(args, **how)

    def _execute_child(self, *args: object) -> None:
        how = inspect.signature(super()._execute_child).bind(*args).arguments  # type: ignore[misc]
        asked = {
            "argv": how["args"][2:],
            "cwd": str(how["cwd"] or Path.cwd()),
            "env": dict(os.environ if how["env"] is None else how["env"]),  # noqa: TID251
            "new_session": how["start_new_session"],
            "max_file_bytes": self._max_file_bytes,
            "is_rank": "--rank" in how["args"],
            "passed": sorted(how["pass_fds"]),
        }
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        with Path(os.devnull).open() as nothing:
            fds = [how["p2cread"], how["c2pwrite"], how["errwrite"]]
            own = (nothing.fileno(), 1, 2)
            fds = [mine if fd < 0 else fd for fd, mine in zip(fds, own, strict=True)]
            self.pid = self._source.ask(asked, [*fds, *sorted(how["pass_fds"])])
        self._child_created = True
        self._ends = os.pidfd_open(self.pid)
        self._close_pipe_fds(*(how[pipe] for pipe in pipes))  # type: ignore[attr-defined]

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        return self._code_within(0)

    def _wait(self, timeout: float | None) -> int:
        code = self._code_within(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def _code_within(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            ending = select.poll()
            ending.register(self._ends, select.POLLIN)
            if ending.poll(None if timeout_s is None else timeout_s * 1000):
                with self._waitpid_lock:  # type: ignore[attr-defined]
                    if self.returncode is None:
                        self.returncode = self._source.ask({"ended": self.pid})
                        os.close(self._ends)
        return self.returncode


class Nursery:
    """Our end of the process that forks."""

    def __init__(self, door: socket.socket) -> None:
        self._door = door
        self._one_asks = threading.Lock()

    def ask(self, asked: Mapping[str, object], fds: Sequence[int] = ()) -> int:
        """Have a process forked, and return its pid; or return the exit code of one that ended."""
        with self._one_asks:
            socket.send_fds(self._door, [json.dumps(asked).encode()], fds)
            answer = self._door.recv(_MAX_BYTES)
        assert answer, "the nursery has ended"
        number: int = json.loads(answer)
        return number


@functools.cache
def nursery() -> tuple[Nursery, subprocess.Popen[bytes]]:
    """Return our end and the process, which is started when it is first asked for."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.support.nursery", str(theirs.fileno())),
                " " * _LONGEST_COMMAND,
            ],
            cwd=ROOT,
            env={**os.environ, **_ENVIRONMENT},  # noqa: TID251 handed on
            pass_fds=[theirs.fileno()],
            preexec_fn=bound_to_me(),
        )

    def end() -> None:  # with all that it forked
        ours.close()
        process.wait()

    atexit.register(end)
    return Nursery(ours), process


def is_forked(command: object) -> bool:
    """Return whether a nursery forks a command: what has looked for a GPU cannot be forked."""
    match command:
        case [sys.executable, "-m", str(module), *_]:
            return module.startswith(_FORKED) and not usable_gpus()
    return False


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    anew: bool = False,
    max_file_bytes: int | None = None,
    **how: Any,  # noqa: ANN401 as there
) -> subprocess.Popen[str]:
    """Start a command as ``subprocess.Popen`` would; `python -m` of learners and tests is forked.

    Args:
        command: program and arguments.
        env: of the process.
        anew: by the command itself: for what forks lack, or share.
        max_file_bytes: writing a larger file fails as on a full disk.
        how: more arguments of Popen.
    """
    how = {"cwd": ROOT, "env": env, "text": True} | how
    if is_forked(command) and not anew:
        return Forked(command, source=nursery()[0], max_file_bytes=max_file_bytes, **how)

    def limit() -> None:
        if max_file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))

    return subprocess.Popen(command, preexec_fn=limit, **how)


def forking(source: Nursery | None = None) -> type[subprocess.Popen[Any]]:
    """Return what takes the place of ``subprocess.Popen`` to have a nursery fork what it can.

    ``source`` is the nursery; None is the one of this process.
    """

    class Popen(subprocess.Popen[Any]):
        def __new__(cls, args: Any, **how: Any) -> Any:  # noqa: ANN401 as there
            if not is_forked(args):
                return super().__new__(cls)
            how.pop("preexec_fn", None)  # _become does what it does
            return Forked(args, source=source or nursery()[0], **how)

    return Popen


# ---- the process that forks --------------------------------------------------


def _serve(door: socket.socket) -> list[str]:
    """Fork what is asked for; return its command in the fork, nothing at the end."""
    gc.freeze()
    while True:
        message, fds, _, _ = socket.recv_fds(door, _MAX_BYTES, _MAX_FDS)
        if not message:
            return []
        asked = json.loads(message)
        if "ended" in asked:
            _, status = os.waitpid(asked["ended"], 0)
            door.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            continue
        num_threads = len(list(Path("/proc/self/task").iterdir()))
        assert num_threads == 1, f"{num_threads} threads: a fork would lack some"
        bind = bound_to_me()
        pid = os.fork()
        if pid == 0:
            if asked["argv"][0] != _RELAY:  # it lingers
                bind()
            door.close()
            _become(asked, fds)
            if asked["argv"][0] not in _STARTS_OTHERS or asked["is_rank"]:
                return asked["argv"]
            ours, door = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            bind = bound_to_me()
            if os.fork():  # the learner; the other is the nursery of its further ranks
                door.close()
                # Further ranks, and its relay.
                subprocess.Popen = forking(Nursery(ours))  # type: ignore[misc]
                return asked["argv"]
            bind()
            _ignore_terminal()  # it ends with the learner
            ours.close()
            with Path(os.devnull).open("r+") as nothing:
                for number in range(3):  # who reads what the learner prints waits for it alone
                    os.dup2(nothing.fileno(), number)
            continue
        for fd in fds:
            os.close(fd)
        door.send(json.dumps(pid).encode())


def _become(asked: dict[str, Any], fds: list[int]) -> None:
    numbers = [0, 1, 2, *asked["passed"]]
    # Each may have the number that another is to get.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH_FD) for fd in fds]
    for fd in fds:
        os.close(fd)
    for number, fd in zip(numbers, high, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    _be_called([sys.executable, "-m", *asked["argv"]])
    if asked["new_session"]:
        os.setsid()
    if asked["max_file_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (asked["max_file_bytes"],) * 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if asked["is_rank"]:  # as learner/launch.py has it
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
    os.chdir(asked["cwd"])
    os.environ.clear()  # noqa: TID251 it is another process's
    os.environ.update(asked["env"])  # noqa: TID251
    for folder in filter(None, asked["env"].get("PYTHONPATH", "").split(os.pathsep)):
        if (customization := Path(folder) / "sitecustomize.py").exists():  # Python's start runs it
            runpy.run_path(str(customization))


def _ignore_terminal() -> None:
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)


def _be_called(command: Sequence[str]) -> None:
    """Show a command as that of this process: some are found by it."""
    first, last = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    words = b"".join(word.encode() + b"\0" for word in command)
    room = last - first
    assert len(words) <= room, f"a command of {len(words)} bytes where {room} can be shown"
    ctypes.memmove(first, words.ljust(room, b"\0"), room)


def _main() -> None:
    _ignore_terminal()  # it ends with who started it
    from slipstream.learner.model import device

    device.prepare()
    for name in IMPORTED:
        importlib.import_module(name)
    argv = _serve(socket.socket(fileno=int(sys.argv[1])))
    if argv:
        sys.argv = argv
        sys.modules.pop(argv[0], None)  # it becomes __main__
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
