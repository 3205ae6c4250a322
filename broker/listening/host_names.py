"""Names by which a page may be asked: any other may be a foreign page's that had it point here."""

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """True if only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return plain(host) == "localhost"


def is_any(host: str) -> bool:
    """True if an address means all addresses of this machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def machine_names() -> set[str]:
    """Return the names of this machine; may block on a name server."""
    return {plain(name) for name in (socket.gethostname(), socket.getfqdn())}


def known_names(host: str, others: Iterable[str] = ()) -> frozenset[str]:
    """Return the host names that requests for a page at an address may use."""
    return frozenset({plain(host), *_LOOPBACK, *map(plain, others)})


def reachable(host: str) -> str:
    """Return the host to put into the address of a page that listens at ``host``."""
    name = socket.gethostname() if is_any(host) else host
    return f"[{name}]" if ":" in name else name


def name_of(authority: str) -> str:
    """Return the name in a Host header, as ``plain`` writes it; empty if that is not a name."""
    if not authority or set(authority) & set("/\\@?#%"):
        return ""
    try:
        parts = urlsplit(f"//{authority}")
        return plain(parts.hostname or "") if parts.port is None or parts.port else ""
    except ValueError:
        return ""


def plain(name: str) -> str:
    """Normalize a name or address for comparison: ::ffff:127.0.0.1 is 127.0.0.1."""
    name = name.partition("%")[0].rstrip(".").lower()
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
