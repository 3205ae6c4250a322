"""The process that has an environment imported, and forks a process for each trajectory.

A fork takes milliseconds, an import seconds, and a trajectory's process may hang, leak or crash
without harm to others. Run with ``--link DESCRIPTOR``.
"""

import os
import resource
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from slipstream.broker.sandbox.frames import Link, connection_of
from slipstream.broker.sandbox.keeper import borrow, keep, keepers_limits, let_go
from slipstream.broker.sandbox.process_table import children_of
from slipstream.broker.sandbox.sandbox import Limits
from slipstream.generators.environments.confinement import Confinement, keep_memory_private
from slipstream.generators.environments.loading import LoadedEnvironment, load_environment
from slipstream.generators.environments.messages import (
    EnvironmentLoaded,
    EnvironmentNotLoaded,
    Fork,
    Forked,
    Keeping,
    LoadEnvironment,
    ProcessEnded,
    to_loader,
)
from slipstream.generators.environments.trajectory_process import act, become_a_reaper, connected
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.bounds import shortened
from slipstream.wire.process.processes import die_with_parent, raise_descriptor_limit

_READ_BYTES = 1 << 16
_MOST_DESCRIPTORS = 253  # the kernel's limit for one message
_MOST_KEEPERS = 16
_MOST_KEEPERS_IN_ALL = 4096


@dataclass(slots=True, eq=False)
class Borrower:
    """A trajectory that may ask for keepers, which run code for it."""

    number: int
    asking: socket.socket
    num_running: int = 0
    num_lent: int = 0

    @property
    def refusal(self) -> str:
        """Reason why it gets no further keeper; empty if it gets one."""
        if self.num_running >= _MOST_KEEPERS:
            return f"{_MOST_KEEPERS} sandboxes of a trajectory may run at a time"
        if self.num_lent >= _MOST_KEEPERS_IN_ALL:
            return f"a trajectory may start {_MOST_KEEPERS_IN_ALL} sandboxes in all"
        return ""


class Loader:
    """Forks processes and reports their ends."""

    def __init__(self, connection: socket.socket) -> None:
        self.link = Link(connection, to_loader)
        self._descriptors = resource.getrlimit(
            resource.RLIMIT_NOFILE
        )  # limits for forked processes
        raise_descriptor_limit(0)
        # The first is readable when a process has ended.
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._numbers: dict[int, int] = {}  # trajectories by process id
        self._keepers: dict[int, Borrower] = {}  # borrowers by process id of the keeper
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.link, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self.confinement: Confinement | None = None  # None: trajectories are not kept apart
        self.keepers_limits = Limits()

    def receive(self) -> LoadEnvironment | Fork | None:
        """Return the generator's next order; None once it is gone."""
        while (order := self.link.next()) is None:
            ready = [key for key, _ in self._selector.select()]
            for key in ready:
                if key.fileobj is self._wake:
                    self._wake.recv(_READ_BYTES)
                    self._collect()
                elif isinstance(key.data, Borrower):
                    self._lend_keeper(key.data)
            if any(key.fileobj is self.link for key in ready) and not self.link.read():
                return None
        return order

    def fork(self, environment: LoadedEnvironment, order: Fork) -> None:
        """Start the process of a trajectory, or report why it does not start."""
        try:
            self._start(environment, order)
        except OSError as error:
            reason = f"its process does not start: {error.strerror or error}"
            self.link.send(ProcessEnded(number=order.number, code=1, reason=reason))

    def _start(self, environment: LoadedEnvironment, order: Fork) -> None:
        confinement = self.confinement
        if confinement is None:
            pid = self._forked(lambda: _act(environment, order))
        else:
            asking, lent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ExitStack() as ours, lent:
                ours.enter_context(asking)
                borrower = Borrower(order.number, asking)
                self._selector.register(asking, selectors.EVENT_READ, borrower)
                ours.callback(self._selector.unregister, asking)
                pid = self._forked(lambda: _act(environment, order, confinement, lent), confinement)
                ours.pop_all()
        self._numbers[pid] = order.number
        self.link.send(Forked(number=order.number, pid=pid))

    def _lend_keeper(self, borrower: Borrower) -> None:
        """Start a process that runs code for a trajectory, which sent its end of a connection."""
        data, descriptors = b"", list[int]()
        with suppress(OSError):
            data, descriptors, _, _ = socket.recv_fds(borrower.asking, 1, _MOST_DESCRIPTORS)
        if not data:
            self._selector.unregister(borrower.asking)
            borrower.asking.close()
        refusal = borrower.refusal
        if data and descriptors and not refusal:
            try:
                pid = self._forked(lambda: keep(descriptors[0], self.keepers_limits))
            except OSError as error:
                refusal = f"its process does not start: {error.strerror or error}"
            else:
                borrower.num_running += 1
                borrower.num_lent += 1
                self._keepers[pid] = borrower
                self.link.send(Keeping(number=borrower.number, pid=pid))
        for descriptor in descriptors:
            let_go(descriptor, refusal)

    def _forked(self, begin: Callable[[], None], confinement: Confinement | None = None) -> int:
        """Fork a process that keeps nothing of ours but the environment; return its id."""
        ours = os.getpid()
        is_outside = confinement is not None and confinement.has_namespaces
        pid = os.fork() if confinement is None else confinement.fork()
        if pid:
            return pid
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            watched = [key.fileobj for key in self._selector.get_map().values()]
            for connection in (*watched, self._selector, self._woken):
                connection.close()  # type: ignore[union-attr] # ours, and those of borrowers
            resource.setrlimit(resource.RLIMIT_NOFILE, self._descriptors)
            die_with_parent(0 if is_outside else ours)
            begin()
            code = 0
        except Exception:  # noqa: BLE001 any error ends this process alone
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _collect(self) -> None:
        # Orphans that were adopted before their parent is reaped; none is a trajectory's first.
        children = _children()
        ended = set[int]()
        with suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = reaped
                ended.add(pid)
                if (borrower := self._keepers.pop(pid, None)) is not None:
                    borrower.num_running -= 1
                elif (number := self._numbers.pop(pid, None)) is not None:
                    self.link.send(
                        ProcessEnded(number=number, code=os.waitstatus_to_exitcode(status))
                    )
        for pid in children - ended - {*self._numbers, *self._keepers}:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)  # left by one that ended by itself


def _act(
    environment: LoadedEnvironment,
    order: Fork,
    confinement: Confinement | None = None,
    link: socket.socket | None = None,
) -> None:
    """Serve one trajectory in this process, which borrows keepers over a link if it is confined."""
    os.setsid()
    become_a_reaper()
    connection = connected(order)
    if confinement is not None and link is not None:
        confinement.enter(cover=Path(order.address).parent)  # the socket of other trajectories
        borrow(link)
    act(environment, connection)


def _children() -> set[int]:
    """Return our children; none if /proc shows another PID namespace."""
    ours = os.getpid()
    return set(children_of(ours)) if Path("/proc/self").readlink() == Path(str(ours)) else set()


def main() -> int:
    """Load, then fork until the generator is gone."""
    connection = connection_of("slipstream.generators.environments.loader")
    become_a_reaper()
    keep_memory_private()
    loader = Loader(connection)
    order = loader.receive()
    if not isinstance(order, LoadEnvironment):
        return 1
    loader.keepers_limits = keepers_limits(order.memory_mb, order.max_processes)
    if order.apart:  # before foreign code may run at forks
        loader.confinement = Confinement.found()
        loader.confinement.settle()
    try:
        environment = load_environment(order.function, order.options)
    except ConfigError as error:
        loader.link.send(EnvironmentNotLoaded(message=shortened(str(error))))
        return 1
    if environment.rollout is not None:
        import openai  # noqa: F401 slow: before the fork
    drives_itself, confinement = environment.rollout is not None, loader.confinement
    loader.link.send(
        EnvironmentLoaded(
            version=environment.version,
            drives_itself=drives_itself,
            may_reward=environment.may_reward,
            gaps=() if confinement is None else confinement.gaps,
            is_sealed=confinement is not None and confinement.has_namespaces,
            is_below=confinement is not None and confinement.continues_in_child,
        )
    )
    while isinstance(fork := loader.receive(), Fork):
        loader.fork(environment, fork)
    return 0


if __name__ == "__main__":
    sys.exit(main())
