"""Starts agents and learners in a moment: a process that has imported what they import forks them.

It has one thread, so that a fork of it is whole.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from slipstream.wire.process.processes import bound_to_me
from tests.support.waiting import HANG_S

ROOT = Path(__file__).parents[3]
_MAX_BYTES = 1 << 16
_POLL_S = 0.02


class Forked:
    """A process that was forked; its pid is not reused before its end was asked for."""

    def __init__(self, nursery: "Nursery", pid: int) -> None:
        self.pid = pid
        self._nursery = nursery
        self._code: int | None = None

    def send_signal(self, signum: int) -> None:
        if self._code is None:
            os.kill(self.pid, signum)

    def wait(self) -> int:
        """Return the exit code, or minus the signal."""
        hangs_s = time.monotonic() + HANG_S
        while self._code is None:
            self._code = self._nursery.ask({"pid": self.pid})
            assert time.monotonic() < hangs_s, f"process {self.pid} still runs"
            time.sleep(_POLL_S if self._code is None else 0)
        return self._code

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)
        self.wait()


class Nursery:
    """Our end of the process that forks."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.bus.nursery", str(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # noqa: TID251 it makes them early
                pass_fds=[theirs.fileno()],
                preexec_fn=bound_to_me(),
            )

    def close(self) -> None:
        """End it with all that it forked."""
        self._socket.close()
        self._process.wait()

    def start(
        self,
        program: str,
        arguments: Sequence[str],
        log: Path,
        *,
        stdin: int | None = None,
        stdout: int | None = None,
    ) -> Forked:
        """Start tests/``program``.py, with these descriptors or a log in their place."""
        asked = {"program": program, "arguments": [program, *arguments]}
        with log.open("a") as file, Path(os.devnull).open() as nothing:
            fds = [
                nothing.fileno() if stdin is None else stdin,
                file.fileno() if stdout is None else stdout,
                file.fileno(),
            ]
            pid = self.ask(asked, fds)
        assert pid is not None
        return Forked(self, pid)

    def ask(self, asked: dict[str, object], fds: Sequence[int] = ()) -> int | None:
        socket.send_fds(self._socket, [json.dumps(asked).encode()], fds)
        answer = self._socket.recv(_MAX_BYTES)
        assert answer, f"the nursery ended with {self._process.wait()}"
        number: int | None = json.loads(answer)
        return number


def _programs() -> dict[str, Callable[[], None]]:
    from tests.support.bus import agent, learner

    return {"bus_agent": agent.main, "bus_learner": learner.main}


def _serve(door: socket.socket) -> None:
    programs = _programs()
    gc.freeze()
    while True:
        asked, fds, _, _ = socket.recv_fds(door, _MAX_BYTES, 3)
        if not asked:
            return
        question = json.loads(asked)
        if "pid" in question:
            pid, status = os.waitpid(question["pid"], os.WNOHANG)
            door.send(json.dumps(os.waitstatus_to_exitcode(status) if pid else None).encode())
            continue
        num_threads = len(list(Path("/proc/self/task").iterdir()))
        assert num_threads == 1, f"{num_threads} threads: a fork would lack some"
        bind = bound_to_me()
        pid = os.fork()
        if pid == 0:
            door.close()
            bind()
            _become(programs[question["program"]], question["arguments"], fds)
        for fd in fds:
            os.close(fd)
        door.send(json.dumps(pid).encode())


def _become(main: Callable[[], None], arguments: list[str], fds: list[int]) -> NoReturn:
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    sys.argv = arguments
    code = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 whatever ended it
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as ours:
        _serve(ours)
