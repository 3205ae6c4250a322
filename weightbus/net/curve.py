"""Listeners for other hosts, and connections to them; both sides prove a CURVE key.

A plain door is not encrypted, and only the side that fetches proves its key there.
"""

import logging
from collections.abc import Mapping, Sequence

import zmq
import zmq.asyncio
from typing_extensions import override

from slipstream.broker.listening.curve import ping, prove_key, require_keys
from slipstream.broker.listening.gate import Limit, limit_of
from slipstream.broker.listening.router import ListeningRouter
from slipstream.weightbus.net.listening import why_not_listening
from slipstream.weightbus.net.proofs import (
    Authenticator,
    DoorRefusals,
    Proof,
    ProofsAtDoor,
    proof_of_member,
)
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.pieces import PIECE_BYTES
from slipstream.wire.messages.weightbus import BulkDoor, RelayAddress
from slipstream.wire.process.processes import spare_cores

_log = logging.getLogger(__name__)
_DOMAIN = "slipstream-weights"
_HEARTBEAT_MS = 2_000  # interval on a connection: notices a host that is gone
_DEAD_AFTER_MS = 10_000
_KEEPALIVE_S = 10  # used instead where buckets would delay heartbeats
MAX_WAITING = 8  # buckets requested by a peer and not read by it
_LEAST_FAR, _MOST_FAR = 4, 16  # connections to a door on another host: one core encrypts each
FETCH_AHEAD = 2  # buckets that an agent requests at a time on a connection
MAX_BYTES = 16 << 20  # largest message of an agent, in pieces: checksums of all its tensors
_MAX_BULK_BYTES = 4 << 10  # largest request for a bucket
_PLAIN_FRAMES = 2  # frames of a request at a plain door: MAC, body
_TCP = "tcp://"
# Shares of the descriptors for connections to a port. A relay uses the first two, and three others.
_COMMANDS, _BUCKETS, _FORWARD, _LEADER = 1 / 8, 1 / 2, 1 / 8, 1 / 4
_MOST_AT_DOOR = 1_024 * _MOST_FAR  # connections for buckets: of a thousand agents, 4 KiB each


class KeyedListener:
    """Listens with a key of its own for clients whose keys were admitted."""

    setting: str  # name of the setting with the address

    def __init__(
        self,
        listen: str,
        *,
        key: ClientKey | None = None,
        is_plain: bool = False,
        refusals: DoorRefusals | None = None,
    ) -> None:
        """Make a key, unless one is given; doors for buckets encrypt nothing if ``is_plain``.

        ``listen`` is tcp://ADDRESS:PORT. ``refusals`` counts connections and requests without an
        answer.
        """
        self._listen = listen
        self.is_plain = is_plain
        self._public, self._secret = zmq.curve_keypair()
        if key is not None:
            self._public, self._secret = key.public.encode(), key.secret.encode()
        self._holders: dict[str, str] = {}
        self._is_informed = False
        self._authenticator: Authenticator | None = None
        self._routers: list[ListeningRouter[zmq.asyncio.Socket]] = []
        self._proofs = ProofsAtDoor(
            public=self._public.decode(),
            secret=self._secret.decode(),
            is_admitted=lambda key: self.name_of(key) is not None,
        )
        self.refusals = refusals or DoorRefusals()

    def admit(self, holders: Mapping[str, str]) -> None:
        """Admit these keys (Z85) only; values are names."""
        self._holders = dict(holders)
        self._is_informed = True

    def name_of(self, key: str) -> str | None:
        """Return the name of a key; None if it is not admitted, or no longer."""
        return self._holders.get(key)

    def callback(self, _domain: str, key: bytes) -> bool:
        """True if a connection that proved this key is admitted; called by zmq.auth."""
        return self.name_of(key.decode()) is not None

    def may_connect(self, key: str, password: str) -> bool:
        """True if a connection to a plain door is admitted."""
        is_known = self.is_plain and self._proofs.may_connect(key, password)
        if not is_known:
            self.refusals.add("a connection without proof of an admitted key")
        return is_known

    def request(self, peer: zmq.Frame, frames: Sequence[zmq.Frame]) -> tuple[str, bytes] | None:
        """Return the key that proved a request for a bucket, and the request.

        None if no key proved it. ``name_of`` tells whether the key is admitted now.
        """
        key = proved(peer)
        if not self.is_plain:
            return key, b"".join(frame.buffer for frame in frames)
        if len(frames) == _PLAIN_FRAMES:
            mac, body = (frame.bytes for frame in frames)
            if self._proofs.sent(key, body, mac):
                return key, body
        self.refusals.add("a request without proof of its key")
        return None

    def admitted_request(
        self, peer: zmq.Frame, frames: Sequence[zmq.Frame]
    ) -> tuple[str, bytes] | None:
        """Return what ``request`` does if the key is admitted now, else None."""
        if (received := self.request(peer, frames)) is None:
            return None
        if self.name_of(received[0]) is None:
            self.refusals.add("a request of a key that was revoked")
            return None
        return received

    def _check_keys(self, context: zmq.asyncio.Context) -> None:
        self._authenticator = Authenticator(context)
        self._authenticator.may_connect = self.may_connect
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, credentials_provider=self)

    def _open(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        *,
        share: float,
        has_buckets: bool,
        max_waiting: int = MAX_WAITING,
    ) -> zmq.asyncio.Socket:
        def prepare(socket: zmq.asyncio.Socket) -> None:
            # A send of a command to a peer that is gone fails.
            socket.setsockopt(zmq.ROUTER_MANDATORY, int(not has_buckets))
            detect_dead_peers(socket, has_buckets=has_buckets)
            if has_buckets:
                socket.setsockopt(zmq.SNDHWM, max_waiting)
            if has_buckets and self.is_plain:
                socket.plain_server = True
                socket.zap_domain = _DOMAIN.encode()
                _log.info("buckets go unencrypted from here (weightbus.bulk)")
            else:
                require_keys(socket, secret=self._secret, domain=_DOMAIN)

        router = ListeningRouter(
            context,
            endpoint,
            setting=self.setting,
            limit=limit_at(share, has_buckets=has_buckets),
            max_frame_bytes=_MAX_BULK_BYTES if has_buckets else PIECE_BYTES,
            prepare=prepare,
        )
        self._routers.append(router)
        return router.socket

    def close(self, linger_ms: int = 0) -> None:
        """Stop listening; sent messages may still leave during ``linger_ms``."""
        for router in self._routers:
            router.close(linger_ms)
        self._routers.clear()
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None


class RemoteListener(KeyedListener):
    """Listens for engines on other hosts; admits keys that the broker knows.

    Each instance makes its own key.
    """

    setting = "weightbus.listen"

    def __init__(
        self, listen: str, *, is_plain: bool = False, refusals: DoorRefusals | None = None
    ) -> None:
        """Make a key. ``open`` starts listening at tcp://ADDRESS:PORT.

        Buckets use the next port, or any port if PORT is 0; with ``is_plain`` unencrypted.
        """
        super().__init__(listen, is_plain=is_plain, refusals=refusals)
        self.address: RelayAddress | None = None  # once it listens
        self._parts: dict[str, int] = {}

    @property
    def holders(self) -> Mapping[str, str] | None:
        """Names by admitted key; None before the first call of ``admit``."""
        return self._holders if self._is_informed else None

    def admit_parts(self, keys: Sequence[str]) -> None:
        """Admit the keys of the learner's parts 1, 2, ... in addition, instead of earlier ones."""
        self._parts = {key: number for number, key in enumerate(keys, 1)}

    def part_of(self, key: str) -> int | None:
        """Return the number of the part that has a key; None if no part has it."""
        return self._parts.get(key)

    @property
    def door(self) -> BulkDoor | None:
        """Door for buckets, once it listens."""
        return self.address.bulk if self.address is not None else None

    @override
    def callback(self, _domain: str, key: bytes) -> bool:
        """True if a connection that proved this key is admitted; called by zmq.auth."""
        return super().callback(_domain, key) or key.decode() in self._parts

    def open(self, context: zmq.asyncio.Context) -> tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]:
        """Listen; return the sockets for commands and for buckets.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._check_keys(context)
        host, _, port = self._listen.removeprefix(_TCP).rpartition(":")
        after = int(port) + 1 if int(port) else 0
        socket = self._open(context, self._listen, share=_COMMANDS, has_buckets=False)
        bulk = self._open(context, f"{_TCP}{host}:{after}", share=_BUCKETS, has_buckets=True)
        self.address = RelayAddress(
            endpoint=socket.getsockopt_string(zmq.LAST_ENDPOINT),
            bulk_endpoint=bulk.getsockopt_string(zmq.LAST_ENDPOINT),
            key=self._public.decode(),
            is_bulk_plain=self.is_plain,
        )
        _log.info("other hosts find this relay at %s", self.address.endpoint)
        return socket, bulk

    def open_bulk(self, context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
        """Listen for requests of buckets alone, at the address itself; return the socket.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._check_keys(context)
        socket = self._open(context, self._listen, share=_BUCKETS, has_buckets=True)
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        key = self._public.decode()
        self.address = RelayAddress(
            endpoint="", bulk_endpoint=endpoint, key=key, is_bulk_plain=self.is_plain
        )
        return socket

    @override
    def close(self, linger_ms: int = 0) -> None:
        super().close(linger_ms)
        self.address = None


class ForwardListener(KeyedListener):
    """Listens for other engines that fetch the buckets that this one has received.

    ``open`` starts listening at tcp://ADDRESS:PORT, or any port if it is 0.
    """

    setting = "weightbus.forward"

    def open(self, context: zmq.asyncio.Context) -> tuple[zmq.asyncio.Socket, BulkDoor]:
        """Listen; return the socket, and its door for others.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._check_keys(context)
        socket = self._open(
            context, self._listen, share=_FORWARD, has_buckets=True, max_waiting=FETCH_AHEAD
        )
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        door = BulkDoor(endpoint=endpoint, key=self._public.decode(), is_plain=self.is_plain)
        return socket, door


class LeaderListener(KeyedListener):
    """Listens for other hosts, which hold the same key as this one."""

    def __init__(self, endpoint: str, key: ClientKey, *, setting: str = "--rendezvous") -> None:
        """Admit the holders of ``key`` alone. ``open`` starts listening.

        ``setting`` is the setting with the value ``endpoint``.
        """
        super().__init__(endpoint, key=key)
        self.setting = setting
        self.admit({key.public: key.name})

    def open(self, context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
        """Listen; return the socket.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._check_keys(context)
        try:
            return self._open(context, self._listen, share=_LEADER, has_buckets=False)
        except ConfigError as error:
            if not (why := why_not_listening(error.__cause__)):
                raise
            at = f"{self._listen} ({self.setting})"
            raise ConfigError(f"cannot listen at {at}: {why}") from error


def limit_at(share: float, *, has_buckets: bool) -> Limit:
    """Return the limit of connections to a port; an agent has many for buckets."""
    return limit_of(share, most=_MOST_AT_DOOR) if has_buckets else limit_of(share)


def num_connections(wanted: int, *, is_far: bool) -> int:
    """Return how many connections carry buckets, each with a thread.

    ``wanted``, or if that is 0 a suitable number: one on this host, to others an eighth of the
    cores that this process may use, at least 4 and at most 16.
    """
    if wanted or not is_far:
        return wanted or 1
    return spare_cores(least=_LEAST_FAR, most=_MOST_FAR)


def proved(frame: zmq.Frame) -> str:
    """Return the public key (Z85) that the sender of a frame proved."""
    return str(frame.get("User-Id"))


def detect_dead_peers(socket: zmq.asyncio.Socket, *, has_buckets: bool) -> None:
    """Make a socket notice that the other host is gone."""
    if has_buckets:
        socket.setsockopt(zmq.SNDHWM, MAX_WAITING)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_S)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_S)
    else:
        ping(socket, every_ms=_HEARTBEAT_MS, dead_after_ms=_DEAD_AFTER_MS)


def connect(
    socket: zmq.asyncio.Socket, endpoint: str, *, server_key: str, key: ClientKey | None
) -> None:
    """Connect a DEALER to a relay's socket for commands; prove ``key`` if the relay proves one.

    ``server_key`` is empty on a Unix socket.

    Raises:
        ConfigError: the relay requires a key, and none is given.
    """
    if server_key:
        detect_dead_peers(socket, has_buckets=False)
        prove_key(socket, _required(key, endpoint), server_key=server_key)
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    socket.connect(endpoint)


def connect_to_door(
    socket: zmq.asyncio.Socket, door: BulkDoor, key: ClientKey | None, *, max_bytes: int = -1
) -> Proof | None:
    """Connect a DEALER to a door for buckets; return the proof of requests that it needs, if any.

    ``max_bytes`` limits a frame from a plain door, which others could forge; -1 is no limit.

    Raises:
        ConfigError: the door requires a key, and none is given; or its key or address is invalid.
    """
    proof: Proof | None = None
    try:
        if door.key:
            known = _required(key, door.endpoint)
            detect_dead_peers(socket, has_buckets=True)
            if door.is_plain:
                proof = proof_of_member(public=known.public, secret=known.secret, door=door.key)
                socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
                socket.plain_username = known.public.encode()
                socket.plain_password = proof.password.encode()
            else:
                prove_key(socket, known, server_key=door.key)
        socket.connect(door.endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{door.endpoint!r} with the key {door.key!r}: {error}") from error
    return proof


def _required(key: ClientKey | None, endpoint: str) -> ClientKey:
    if key is None:
        raise ConfigError(f"{endpoint} is on another host: run.key_file must name a key")
    return key
