"""Free ports of this machine."""

import random
import socket
from pathlib import Path

from slipstream.wire.errors import ConfigError

_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_FIRST_GIVEN = 32_768
_LOWEST_PORT = 20_000  # above the ports of Ray's workers
_TRIES = 100


def free_port(host: str = "127.0.0.1", count: int = 1, *, given_ports: Path = _GIVEN_PORTS) -> int:
    """Return the first of ``count`` neighboring ports that are free on an address of this host.

    They are outside the range from which the system gives ports to connections: a listener binds
    seconds later, and one of that range may be taken meanwhile, even by the probe for the listener,
    which would connect to itself. ``given_ports`` is the file with the range.

    Raises:
        ConfigError: the host is no address of this machine, or has no such ports.
    """
    try:
        first = int(given_ports.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = _USUAL_FIRST_GIVEN
    if first < _LOWEST_PORT + _TRIES + count:
        first = _USUAL_FIRST_GIVEN
    for port in random.sample(range(_LOWEST_PORT, first - count), _TRIES):
        if all(_is_free(host, port + i) for i in range(count)):
            return port
    raise ConfigError(f"no port between {_LOWEST_PORT} and {first} is free at {host}")


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        try:
            listener.bind((host, port))
        except OSError:
            return False
    return True
