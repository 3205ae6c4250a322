"""Limits the connections of a socket; further ones wait in the listen queue.

libzmq has no such limit: it takes connections until the process has no descriptor left, which on a
Unix socket ends the process. So a thread counts them by libzmq's monitor events, and shuts a gate
in front of the listening socket: open connections stay, new ones try again by themselves.
"""

import ctypes
import logging
import os
import resource
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import zmq
import zmq.asyncio
from typing_extensions import override
from zmq.utils.monitor import parse_monitor_message

from slipstream.broker.listening.host_names import plain
from slipstream.wire.errors import ConfigError

_log = logging.getLogger(__name__)
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # asm-generic/socket.h
BACKLOG = 128  # connections that are let in after the gate was shut, at most
_MOST_LINES = 10  # log lines of one socket: connections must not fill the disk
_OPEN_AGAIN = 0.9  # share of the limit, so that the gate does not open for every single connection


class Limit(NamedTuple):
    """Connections at a time, and what sets that."""

    most: int
    setting: str


NO_LIMIT = Limit(1 << 20, "")
_MOST_CONNECTIONS = 4_096  # a bound where there are descriptors for a million


def limit_of(share: float, *, most: int = _MOST_CONNECTIONS) -> Limit:
    """Return a share of the descriptors that this process may open, or ``most`` if that is less.

    Shares of what one process listens at are less than one together: the rest is for all else.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared = most if soft == resource.RLIM_INFINITY else max(1, int(soft * share))
    return Limit(most, "a fixed limit") if most <= shared else Limit(shared, "ulimit -n")


class Gate(Protocol):
    """In front of a listening socket. May be used from any thread."""

    def shut(self) -> None:
        """Accept no more connections; existing ones stay."""
        ...

    def open(self) -> None:
        """Accept new connections again."""
        ...


class TcpGate(Gate):
    """Has the kernel drop connection attempts, so that clients retry a little later."""

    def __init__(self, listening: socket.socket) -> None:
        """Guard a listening socket, which may be handed to libzmq."""
        self._socket = socket.socket(fileno=os.dup(listening.fileno()))
        self._drop_all = ctypes.create_string_buffer(struct.pack("HxxI", 0x06, 0))  # ret 0

    @override
    def shut(self) -> None:
        program = struct.pack("HL", 1, ctypes.addressof(self._drop_all))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)

    @override
    def open(self) -> None:
        with suppress(OSError):  # nothing is attached
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class UnixGate(Gate):
    """Takes the socket's name away for a while."""

    def __init__(self, path: Path) -> None:
        """Guard a socket that listens at a path."""
        self._path = path
        self._aside = path.with_name(f"{path.name}.full")

    @override
    def shut(self) -> None:
        with suppress(FileNotFoundError):
            self._path.rename(self._aside)

    @override
    def open(self) -> None:
        with suppress(FileNotFoundError):
            self._aside.rename(self._path)

    def close(self) -> None:
        """Leave no name behind."""
        self._aside.unlink(missing_ok=True)


def listening_socket(endpoint: str, setting: str) -> socket.socket:
    """Return a TCP socket that listens at tcp://ADDRESS:PORT, the value of a setting.

    Raises:
        ConfigError: it cannot, or that is no address.
    """
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        number = 0 if port == "*" else int(port)
        if not colon or not 0 <= number < 1 << 16:
            raise ValueError(f"{port} is no port")  # noqa: TRY301
        name = "" if host == "*" else host.strip("[]")
        return listening_at(name, number)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot listen at {endpoint} ({setting}): {error}") from error


def listening_at(host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens at an address; at ``::`` also for IPv4.

    Raises:
        OSError: it cannot.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    families = {family for family, *_ in found}
    is_v4 = socket.AF_INET in families and ":" not in host
    family = socket.AF_INET if is_v4 else socket.AF_INET6
    takes_both = plain(host) == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(
        (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=takes_both
    )


class ConnectionCount:
    """Counts the connections of a socket in a thread of its own, and shuts its gate at a limit."""

    def __init__(
        self,
        watched: "zmq.Socket[bytes] | zmq.asyncio.Socket",
        gate: Gate,
        limit: Limit,
        *,
        where: str,
        log: Callable[..., None] = _log.warning,
    ) -> None:
        """Start counting before the socket is bound."""
        self._watched = watched
        self._gate = gate
        self._limit = limit
        self._where = where
        self._log = log
        self.is_shut = False
        self._num_logged = 0
        self.num_connections = 0
        events = f"inproc://connections-{int(watched.getsockopt(zmq.FD))}"
        watched.monitor(events, _EVENTS)
        shadow: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(watched.context.underlying)
        self._monitor = shadow.socket(zmq.PAIR)  # read in a thread, whatever the context is
        self._monitor.connect(events)
        self._thread = threading.Thread(target=self._count, name="connections", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; before the socket is closed."""
        if not self._watched.closed:  # a closed socket ends the thread, too
            self._watched.disable_monitor()
        self._thread.join()

    def _count(self) -> None:
        try:
            while True:
                event = parse_monitor_message(self._monitor.recv_multipart())["event"]
                if event == zmq.EVENT_MONITOR_STOPPED:
                    return
                self.num_connections += 1 if event == zmq.EVENT_ACCEPTED else -1
                try:  # this thread must outlive its socket: libzmq would wait for it for ever
                    self._shut_or_open()
                except OSError as error:
                    self._log_bounded("connections to %s cannot be limited: %s", self._where, error)
        finally:
            self._monitor.close(0)

    def _shut_or_open(self) -> None:
        if not self.is_shut and self.num_connections >= self._limit.most:
            self._gate.shut()
            self.is_shut = True
            self._log_bounded(
                "there are %d connections to %s: further ones wait (%s)",
                self._limit.most,
                self._where,
                self._limit.setting,
            )
        elif self.is_shut and self.num_connections < self._limit.most * _OPEN_AGAIN:
            self.is_shut = False
            self._gate.open()

    def _log_bounded(self, line: str, *words: object) -> None:
        if self._num_logged < _MOST_LINES:
            self._num_logged += 1
            self._log(line, *words)
