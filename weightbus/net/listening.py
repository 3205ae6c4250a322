"""A socket that listens on one chosen address of this machine and nowhere else."""

import errno
import socket

from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.rendezvous import Address


def endpoint_of(address: Address, *, named: str) -> str:
    """Return a numeric ZeroMQ endpoint, to listen at or to connect to.

    ``named`` is the setting or option that names the address, for the error.

    Raises:
        ConfigError: no host has this name.
    """
    try:
        *_, found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no host has such a name"
        raise ConfigError(f"{address} ({named}) is no address: {why}") from error
    return f"tcp://{Address(str(found[0]), address.port)}"


def listen_at(host: str, port: int = 0, *, named: str) -> socket.socket:
    """Return a socket that listens on one address.

    ``named`` is the setting or option that names the address, for the error. The system chooses
    port 0.

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
