"""A socket that listens on one chosen address of this machine and nowhere else."""

import errno
import socket

from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.rendezvous import Address

_REASONS = {
    errno.EADDRNOTAVAIL: "it is not an address of this machine",
    errno.EADDRINUSE: "another process listens there",
}


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


def listen_at(host: str, *, named: str) -> socket.socket:
    """Return a socket that listens on one address, at a port that the system chooses.

    Args:
        host: Address, or its name.
        named: Setting or option that names the address, for the error.

    Raises:
        ConfigError: this machine has no such address.
    """
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        if listener is not None:
            listener.close()
        why = why_not_listening(error) or error.strerror
        raise ConfigError(f"cannot listen on {host} ({named}): {why}") from error
    return listener


def why_not_listening(error: BaseException | None) -> str:
    """Return why an address cannot be listened at, in plain words; empty for a rare reason."""
    return _REASONS.get(error.errno or 0, "") if isinstance(error, OSError) else ""
