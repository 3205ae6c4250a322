"""A socket that listens on one chosen address of this machine and nowhere else."""

import errno
import socket

from slipstream.wire.errors import ConfigError


def listen_at(host: str, port: int = 0, *, named: str) -> socket.socket:
    """Return a socket that listens on one address.

    Args:
        host: the address, or a name of it.
        port: to listen on; 0 has the system choose.
        named: setting or option that names the address, for the error.

    Raises:
        ConfigError: this machine has no such address, or the port is taken.
    """
    shown = f"{host} port {port}" if port else host
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {shown} ({named}): {error.strerror}") from error
    try:
        if port:  # connections of a process that had it before may linger
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {shown} ({named}): {_reason(error)}") from error
    return listener


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return "it is not an address of this machine"
    if error.errno == errno.EADDRINUSE:
        return "another process listens there"
    return error.strerror or str(error)
