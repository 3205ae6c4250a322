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
import traceback
from collections.abc import Callable
from contextlib import suppress

from slipstream.broker.sandbox.frames import Unframer, frame_of
from slipstream.broker.sandbox.keeper import MOST_KEEPERS, borrow, keep
from slipstream.broker.sandbox.process_table import process_table
from slipstream.generators.environments.acting import act, become_a_reaper, connected
from slipstream.generators.environments.confinement import Confinement, keep_memory_private
from slipstream.generators.environments.loading import LoadedEnvironment, load_environment
from slipstream.generators.environments.messages import (
    Ended,
    EnvironmentLoaded,
    Fork,
    Forked,
    FromLoader,
    Keeping,
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

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        # The first is readable when a process has ended.
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._frames = Unframer()
        self._numbers: dict[int, int] = {}  # of trajectories, by process id
        self._forking: dict[int, tuple[int, socket.socket]] = {}  # those of which are to come
        self._keepers: dict[int, int] = {}  # numbers of whom they run code for, by process id
        self._asking: dict[socket.socket, int] = {}  # and of who may ask for more of them
        self.confinement: Confinement | None = None  # of trajectories

    def receive(self) -> LoadEnvironment | Fork | None:
        """Return the generator's next order; None when it is gone."""
        while True:
            for body in self._frames.feed(b""):
                return to_loader.decode(body)
            readable, _, _ = select.select([self._link, self._wake, *self._asking], [], [])
            if self._wake in readable:
                self._wake.recv(_READ_BYTES)
                self._collect()
            for asking in self._asking.keys() & set(readable):
                self._lend_keeper(asking)
            if self._link in readable:
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
        asking, lent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        told, tells = socket.socketpair()
        confinement = self.confinement

        def begin() -> None:
            told.close()
            if confinement is not None:
                confinement.leave()
                if confinement.has_namespaces and (pid := os.fork()):
                    tells.sendall(str(pid).encode())
                    return  # ours has become the loader's child
            tells.close()
            os.setsid()
            become_a_reaper()
            connection = connected(order)
            if confinement is not None:
                confinement.enter()
                borrow(lent)
            act(environment, connection, order.ticket)

        if confinement is not None:
            self._asking[asking] = order.number
        with lent, tells:
            pid = self._forked(begin)
        if confinement is not None and confinement.has_namespaces:
            self._forking[pid] = (order.number, told)
        else:
            told.close()
            self._numbers[pid] = order.number
        self.send(Forked(number=order.number, pid=pid))

    def _lend_keeper(self, asking: socket.socket) -> None:
        """Start a process that runs code for a trajectory, which sent its end of a connection."""
        data, descriptors, _, _ = socket.recv_fds(asking, 1, 1)
        number = self._asking[asking]
        if not data:
            del self._asking[asking]
            asking.close()
        elif descriptors and list(self._keepers.values()).count(number) < MOST_KEEPERS:
            pid = self._forked(lambda: keep(descriptors[0]))
            self._keepers[pid] = number
            self.send(Keeping(number=number, pid=pid))
        for descriptor in descriptors:
            os.close(descriptor)

    def _forked(self, begin: Callable[[], None]) -> int:
        """Fork a process that has nothing of ours but the environment; return its id."""
        ours = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            forking = [told for _, told in self._forking.values()]
            for one in (self._link, self._wake, self._woken, *self._asking, *forking):
                one.close()
            self._frames = Unframer()  # the orders of others
            die_with_parent(ours)
            begin()
            code = 0
        except Exception:  # noqa: BLE001 whatever it is ends this process alone
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _collect(self) -> None:
        ended: list[tuple[int, int]] = []
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended.append(found)
        for pid in self._forking.keys() & dict(ended):
            number, told = self._forking.pop(pid)
            with told:
                said = told.recv(_READ_BYTES)
            # Without a word it failed: it is the trajectory's process that ended.
            self._numbers[int(said or pid)] = number
            if said:
                self.send(Forked(number=number, pid=int(said)))
        for pid, status in ended:
            self._keepers.pop(pid, None)
            if pid in self._numbers:
                code = os.waitstatus_to_exitcode(status)
                self.send(Ended(number=self._numbers.pop(pid), code=code))
        if ended and not self._forking:
            self._kill_orphans()

    def _kill_orphans(self) -> None:
        """Kill what was left by processes that ended by themselves: it came to us."""
        ours = {*self._numbers, *self._keepers}
        for row in process_table().values():
            if row.parent == os.getpid() and row.pid not in ours and not row.is_zombie:
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
    keep_memory_private()
    loader = Loader(socket.socket(fileno=arguments.link))
    order = loader.receive()
    if not isinstance(order, LoadEnvironment):
        return 1
    gaps: tuple[str, ...] = ()
    if order.apart:  # tried before foreign code may have hooks in forks
        loader.confinement = Confinement.found()
        gaps = loader.confinement.gaps
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
            gaps=gaps,
        )
    )
    while isinstance(fork := loader.receive(), Fork):
        loader.fork(environment, fork)
    return 0


if __name__ == "__main__":
    sys.exit(main())
