"""A ROUTER that listens: what a connection can take before its key is checked, and how many."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Generic, TypeVar

import zmq
import zmq.asyncio

from slipstream.broker.listening.gate import (
    BACKLOG,
    NO_LIMIT,
    ConnectionCount,
    Gate,
    Limit,
    TcpGate,
    UnixGate,
    listening_socket,
)
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.pieces import PIECE_BYTES

_HANDSHAKE_MS = 5_000  # a connection has so long to prove its key
_ENVELOPE_BYTES = 256  # more than CURVE adds to a piece
S = TypeVar("S", zmq.Socket[bytes], zmq.asyncio.Socket)


class ListeningRouter(Generic[S]):
    """A ROUTER socket behind a gate. Close it."""

    def __init__(
        self,
        context: "zmq.Context[S]",
        endpoint: str,
        *,
        setting: str,
        limit: Limit = NO_LIMIT,
        max_frame_bytes: int = PIECE_BYTES,
        prepare: Callable[[S], None] = lambda _: None,
    ) -> None:
        """Listen.

        ``prepare`` sets what else the socket needs before it listens, such as the keys it takes.
        ``max_frame_bytes`` limits frames of every connection, with and without a key.

        Raises:
            ConfigError: the address cannot be listened at.
        """
        self.connections: ConnectionCount | None = None  # none are counted within a process
        self.socket: S = context.socket(zmq.ROUTER)
        self._cleanup = ExitStack()
        self._cleanup.callback(self.socket.close)
        with ExitStack() as undo:
            undo.push(self._cleanup)
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes + _ENVELOPE_BYTES)
            self.socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
            self.socket.setsockopt(zmq.BACKLOG, BACKLOG)
            prepare(self.socket)
            bound, gate = self._gate_of(endpoint, setting)
            if gate is not None:
                self.connections = ConnectionCount(self.socket, gate, limit, where=bound)
                self._cleanup.callback(self.connections.stop)
            try:
                self.socket.bind(bound)
            except zmq.ZMQError as error:
                raise ConfigError(f"cannot listen at {endpoint} ({setting}): {error}") from error
            undo.pop_all()
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self, linger_ms: int = 0) -> None:
        """Stop listening; what was sent may still leave for so long."""
        if not self.socket.closed:
            self.socket.setsockopt(zmq.LINGER, linger_ms)
        self._cleanup.close()

    def _gate_of(self, endpoint: str, setting: str) -> tuple[str, Gate | None]:
        """Return the address to bind, and the gate before it; none within a process."""
        if endpoint.startswith("ipc://"):
            unix = UnixGate(Path(endpoint.removeprefix("ipc://")))
            self._cleanup.callback(unix.close)
            return endpoint, unix
        if not endpoint.startswith("tcp://"):
            return endpoint, None
        listening = listening_socket(endpoint, setting)
        tcp = TcpGate(listening)
        self._cleanup.callback(tcp.close)
        host, port = listening.getsockname()[:2]
        self.socket.setsockopt(zmq.USE_FD, listening.detach())  # from here on it is the socket's
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}", tcp
