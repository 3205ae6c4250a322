"""CURVE of ZeroMQ: listeners that admit keys, and clients that prove one."""

import zmq
import zmq.asyncio

from slipstream.wire.files.keys import ClientKey

Socket = zmq.Socket[bytes] | zmq.asyncio.Socket


def require_keys(socket: Socket, *, secret: bytes, domain: str) -> None:
    """Take only connections whose key an authenticator of ``domain`` admits."""
    socket.curve_secretkey = secret
    socket.curve_server = True
    socket.zap_domain = domain.encode()


def prove_key(socket: Socket, key: ClientKey, *, server_key: str) -> None:
    """Prove a key to the listener that proves ``server_key``, a public key as Z85."""
    socket.curve_serverkey = server_key.encode()
    socket.curve_publickey = key.public.encode()
    socket.curve_secretkey = key.secret.encode()


def ping(socket: Socket, *, every_ms: int, dead_after_ms: int) -> None:
    """Close connections to hosts that vanished: those silent for ``dead_after_ms``."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, every_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, dead_after_ms)
