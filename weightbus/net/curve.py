"""The relay's listener for other hosts, and connections to it; both sides prove a CURVE key."""

import logging
from collections.abc import Mapping

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from slipstream.broker.curve import ping, prove_key, require_keys
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.weightbus import RelayAddress

_log = logging.getLogger(__name__)
_DOMAIN = "slipstream-weights"
_HANDSHAKE_MS = 5_000  # in which a new connection must prove its key
_HEARTBEAT_MS = 2_000  # of a connection: notices a host that is gone
_DEAD_AFTER_MS = 10_000
_KEEPALIVE_S = 10  # of one that carries buckets, which delay heartbeats
MAX_WAITING = 8  # buckets requested by a peer and not read by it
_MAX_BYTES = 16 << 20  # of a message from an agent: checksums of all its tensors
_MAX_BULK_BYTES = 4 << 10  # of a request for a bucket
_TCP = "tcp://"


class RemoteListener:
    """Listens for engines on other hosts; admits keys that the broker knows.

    Each instance makes its own key.
    """

    def __init__(self, listen: str) -> None:
        """Make a key. ``open`` starts listening at tcp://ADDRESS:PORT.

        Buckets go over the port after it, or any if it is 0.
        """
        self._listen = listen
        self._public, self._secret = zmq.curve_keypair()
        self._holders: dict[str, str] = {}
        self._authenticator: AsyncioAuthenticator | None = None
        self.address: RelayAddress | None = None  # once it listens

    def admit(self, holders: Mapping[str, str]) -> None:
        """Admit these keys (Z85) only; values are names."""
        self._holders = dict(holders)

    def name_of(self, key: str) -> str | None:
        """Return the name of a key; None if it is not admitted, or no longer."""
        return self._holders.get(key)

    def callback(self, _domain: str, key: bytes) -> bool:
        """True if a connection that proved this key is admitted; called by zmq.auth."""
        return key.decode() in self._holders

    def open(self, context: zmq.asyncio.Context) -> tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]:
        """Listen; return the sockets for commands and for buckets.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, credentials_provider=self)
        host, _, port = self._listen.removeprefix(_TCP).rpartition(":")
        after = int(port) + 1 if int(port) else 0
        socket = self._bind(context, self._listen, has_buckets=False)
        try:
            bulk = self._bind(context, f"{_TCP}{host}:{after}", has_buckets=True)
        except ConfigError:
            socket.close()
            raise
        self.address = RelayAddress(
            endpoint=socket.getsockopt_string(zmq.LAST_ENDPOINT),
            bulk_endpoint=bulk.getsockopt_string(zmq.LAST_ENDPOINT),
            key=self._public.decode(),
        )
        _log.info("other hosts find this relay at %s", self.address.endpoint)
        return socket, bulk

    def _bind(
        self, context: zmq.asyncio.Context, endpoint: str, *, has_buckets: bool
    ) -> zmq.asyncio.Socket:
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BULK_BYTES if has_buckets else _MAX_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        # A send of a command to a peer that is gone fails.
        socket.setsockopt(zmq.ROUTER_MANDATORY, int(not has_buckets))
        detect_dead_peers(socket, has_buckets=has_buckets)
        require_keys(socket, secret=self._secret, domain=_DOMAIN)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(f"cannot listen at {endpoint} (weightbus.listen): {error}") from error
        return socket

    def close(self) -> None:
        """Stop checking keys; the caller of ``open`` closes the sockets."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self.address = None


def detect_dead_peers(socket: zmq.asyncio.Socket, *, has_buckets: bool) -> None:
    """Make a socket notice that the host on the other side is gone."""
    if has_buckets:
        socket.setsockopt(zmq.SNDHWM, MAX_WAITING)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_S)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_S)
    else:
        ping(socket, every_ms=_HEARTBEAT_MS, dead_after_ms=_DEAD_AFTER_MS)


def connect(
    socket: zmq.asyncio.Socket,
    endpoint: str,
    *,
    server_key: str,
    key: ClientKey | None,
    has_buckets: bool = False,
) -> None:
    """Connect a DEALER to one of a relay's sockets; prove ``key`` if the relay proves one.

    ``server_key`` is empty on a Unix socket.

    Raises:
        ConfigError: the relay requires a key, and none is given.
    """
    if server_key:
        if key is None:
            raise ConfigError(f"{endpoint} is on another host: run.key_file must name a key")
        detect_dead_peers(socket, has_buckets=has_buckets)
        prove_key(socket, key, server_key=server_key)
    socket.connect(endpoint)
