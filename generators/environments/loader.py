"""The process that has an environment imported, and forks a process for each trajectory.

A fork takes milliseconds where an import takes seconds, and each trajectory has a process that may
hang, leak or crash for itself. Run with ``--link DESCRIPTOR``.
"""

import argparse
import os
import resource
import select
import signal
import socket
import sys
from contextlib import suppress

from slipstream.broker.sandbox.frames import Unframer, frame_of
from slipstream.broker.sandbox.process_table import process_table
from slipstream.generators.environments.acting import (
    act,
    become_a_reaper,
    keep_memory_private,
    own_session,
)
from slipstream.generators.environments.loading import LoadedEnvironment, load_environment
from slipstream.generators.environments.messages import (
    Ended,
    EnvironmentLoaded,
    Fork,
    Forked,
    FromLoader,
    LoadEnvironment,
    LoadFailed,
    to_loader,
)
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.bounds import shortened
from slipstream.wire.process.processes import die_with_parent

_READ_BYTES = 1 << 16


class Loader:
    """Forks processes and reports their ends."""

    def __init__(self, link: socket.socket, wake: int) -> None:
        self._link = link
        self._wake = wake  # readable when a process has ended
        self._frames = Unframer()
        self._numbers: dict[int, int] = {}  # of trajectories, by process id

    def receive(self) -> LoadEnvironment | Fork | None:
        """Return the generator's next order; None when it is gone."""
        while True:
            for body in self._frames.feed(b""):
                return to_loader.decode(body)
            link = self._link.fileno()
            readable, _, _ = select.select([link, self._wake], [], [])
            if self._wake in readable:
                os.read(self._wake, _READ_BYTES)
                self._collect()
            if link in readable:
                data = self._link.recv(_READ_BYTES)
                if not data:
                    return None
                for body in self._frames.feed(data):
                    return to_loader.decode(body)

    def send(self, message: FromLoader) -> None:
        """Send a message to the generator."""
        self._link.sendall(frame_of(message))

    def fork(self, environment: LoadedEnvironment, order: Fork) -> None:
        """Start the process of a trajectory."""
        ours = os.getpid()
        pid = os.fork()
        if pid:
            self._numbers[pid] = order.number
            self.send(Forked(number=order.number, pid=pid))
            return
        code = 1
        try:
            self._link.close()
            self._frames = Unframer()  # the orders of others
            keep_memory_private()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent(ours)
            own_session()
            become_a_reaper()
            act(environment, order)
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _collect(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            number = self._numbers.pop(pid, None)
            if number is not None:
                self.send(Ended(number=number, code=os.waitstatus_to_exitcode(status)))
            self._kill_orphans()

    def _kill_orphans(self) -> None:
        """Kill what was left by trajectories whose process ended by itself: it came to us."""
        for row in process_table().values():
            if row.parent == os.getpid() and row.pid not in self._numbers and not row.is_zombie:
                with suppress(ProcessLookupError):
                    os.kill(row.pid, signal.SIGKILL)


def main() -> int:
    """Load, then fork until the generator is gone."""
    parser = argparse.ArgumentParser(prog="python -m slipstream.generators.environments.loader")
    parser.add_argument("--link", type=int, required=True, metavar="DESCRIPTOR")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(arguments.link, False)
    become_a_reaper()
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    loader = Loader(socket.socket(fileno=arguments.link), wake)
    order = loader.receive()
    if not isinstance(order, LoadEnvironment):
        return 1
    try:
        environment = load_environment(order.function, order.options)
    except ConfigError as error:
        loader.send(LoadFailed(message=shortened(str(error))))
        return 1
    if environment.rollout is not None:
        import openai  # noqa: F401 slow: before the fork
    drives_itself = environment.rollout is not None
    loader.send(
        EnvironmentLoaded(
            version=environment.version,
            drives_itself=drives_itself,
            may_reward=environment.may_reward,
        )
    )
    while isinstance(fork := loader.receive(), Fork):
        loader.fork(environment, fork)
    return 0


if __name__ == "__main__":
    sys.exit(main())
