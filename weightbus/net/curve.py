"""Where engines on other hosts reach the relay. Both sides prove a key (CurveZMQ)."""

import logging
from collections.abc import Mapping

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.weightbus import RelayDoor

_log = logging.getLogger(__name__)
_DOMAIN = "slipstream-weights"
_HANDSHAKE_MS = 5_000  # whoever has connected has so long to prove its key
_HEARTBEAT_MS = 2_000  # of a connection: a host that is gone is noticed
_DEAD_AFTER_MS = 10_000
_KEEPALIVE_S = 10  # of one that carries buckets: no heartbeat comes through while one is moving
MAX_WAITING = 8  # buckets that a peer asked for and does not read
_MAX_BYTES = 16 << 20  # of a message from an agent: checksums of all its tensors
_MAX_BULK_BYTES = 4 << 10  # of a request for a bucket
_TCP = "tcp://"


class FarDoor:
    """Lets in whoever proves a key that the broker knows. Its own key lives as long as it does."""

    def __init__(self, listen: str) -> None:
        """Make a key; listen nowhere yet.

        Args:
            listen: tcp://ADDRESS:PORT; buckets go over the port after it, or any if it is 0.
        """
        self._listen = listen
        self._public, self._secret = zmq.curve_keypair()
        self._holders: dict[str, str] = {}
        self._doorkeeper: AsyncioAuthenticator | None = None
        self.place: RelayDoor | None = None  # once it listens

    def admit(self, holders: Mapping[str, str]) -> None:
        """Let in these and nobody else: names by public key (Z85)."""
        self._holders = dict(holders)

    def name_of(self, key: str) -> str | None:
        """Return the name of a key; None if it is not let in, or no longer."""
        return self._holders.get(key)

    def callback(self, _domain: str, key: bytes) -> bool:
        """Tell whether a connection that proved this key may begin; for zmq.auth."""
        return key.decode() in self._holders

    def open(self, context: zmq.asyncio.Context) -> tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]:
        """Listen; return the socket of commands and that of buckets.

        Raises:
            ConfigError: the address cannot be listened at.
        """
        self._doorkeeper = AsyncioAuthenticator(context)
        self._doorkeeper.start()
        self._doorkeeper.configure_curve_callback(_DOMAIN, credentials_provider=self)
        host, _, port = self._listen.removeprefix(_TCP).rpartition(":")
        after = int(port) + 1 if int(port) else 0
        socket = self._bind(context, self._listen, has_buckets=False)
        try:
            bulk = self._bind(context, f"{_TCP}{host}:{after}", has_buckets=True)
        except ConfigError:
            socket.close()
            raise
        self.place = RelayDoor(
            endpoint=socket.getsockopt_string(zmq.LAST_ENDPOINT),
            bulk_endpoint=bulk.getsockopt_string(zmq.LAST_ENDPOINT),
            key=self._public.decode(),
        )
        _log.info("other hosts find this relay at %s", self.place.endpoint)
        return socket, bulk

    def _bind(
        self, context: zmq.asyncio.Context, endpoint: str, *, has_buckets: bool
    ) -> zmq.asyncio.Socket:
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BULK_BYTES if has_buckets else _MAX_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        socket.setsockopt(zmq.ROUTER_MANDATORY, int(not has_buckets))  # who is gone?
        keep_watch(socket, has_buckets=has_buckets)
        socket.curve_secretkey = self._secret
        socket.curve_server = True
        socket.zap_domain = _DOMAIN.encode()
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(f"cannot listen at {endpoint} (weightbus.listen): {error}") from error
        return socket

    def close(self) -> None:
        """Check no more keys; the sockets are closed by whoever opened the door."""
        if self._doorkeeper is not None:
            self._doorkeeper.stop()
            self._doorkeeper = None
        self.place = None


def keep_watch(socket: zmq.asyncio.Socket, *, has_buckets: bool) -> None:
    """Have a socket notice that the host on the other side is gone."""
    if has_buckets:
        socket.setsockopt(zmq.SNDHWM, MAX_WAITING)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_S)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_S)
    else:
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _DEAD_AFTER_MS)


def connect(
    socket: zmq.asyncio.Socket,
    endpoint: str,
    *,
    server_key: str,
    key: ClientKey | None,
    has_buckets: bool = False,
) -> None:
    """Connect to one of a relay's sockets, proving ``key`` if the relay proves one.

    Args:
        socket: a DEALER.
        endpoint: of the relay.
        server_key: that it proves; empty on a Unix socket.
        key: of this host.
        has_buckets: it is the bulk socket.

    Raises:
        ConfigError: there is no key to show.
    """
    if server_key:
        if key is None:
            raise ConfigError(f"{endpoint} is on another host: run.key_file must name a key")
        keep_watch(socket, has_buckets=has_buckets)
        socket.curve_serverkey = server_key.encode()
        socket.curve_publickey = key.public.encode()
        socket.curve_secretkey = key.secret.encode()
    socket.connect(endpoint)
