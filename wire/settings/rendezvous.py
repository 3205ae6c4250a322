"""Where the processes of several hosts meet: an address of one of them and a port."""

import ipaddress
from typing import NamedTuple

from typing_extensions import override

from slipstream.wire.errors import ConfigError

_MAX_PORT = 65_535


class Address(NamedTuple):
    """Where node 0 listens: a name or an address, without brackets, and a TCP port."""

    host: str
    port: int

    @override
    def __str__(self) -> str:
        """Return HOST:PORT, an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_rendezvous(text: str, *, setting: str = "--rendezvous") -> Address:
    """Return the address in HOST:PORT or [IPV6]:PORT.

    Raises:
        ConfigError: it is no address, or one for every interface.
    """

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"{setting} is {text!r}: {why}")

    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdecimal()):
        raise refuse("expected HOST:PORT, as in 10.0.0.1:29400 or [fd00::1]:29400")
    if not 0 < int(port) <= _MAX_PORT:
        raise refuse(f"expected a port from 1 to {_MAX_PORT}, got {port}")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if is_bracketed:
        host = host[1:-1]
    if is_bracketed != (":" in host):
        raise refuse("an IPv6 address stands in brackets, as in [fd00::1]:29400, and nothing else")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        if is_bracketed:
            raise refuse(f"{host!r} is no IPv6 address") from None
    else:
        if address.is_unspecified:
            raise refuse("name the address of node 0 at which the other nodes reach it")
    return Address(host, int(port))
