"""Access to the page: its token and port, kept over restarts, and its host names."""

import hmac
import ipaddress
import logging
import re
import secrets
import socket
import stat
from collections.abc import Iterable
from pathlib import Path

from yarl import URL

from slipstream.wire.files.keys import write_private
from slipstream.wire.files.run_folder import PAGE_PORT, PAGE_TOKEN

_log = logging.getLogger(__name__)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,64}")
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_MAX_PORT = 65_535


class Door:
    """The token of a page, and the port that it was served at before."""

    def __init__(self, folder: Path | None) -> None:
        """Reuse the token and port kept in a run folder, so that an open page reconnects.

        Args:
            folder: of the run; None keeps nothing.
        """
        self._folder = folder
        self._token = (_kept_token(folder) if folder else "") or secrets.token_urlsafe(16)
        self.port = _kept_port(folder) if folder else 0  # 0 if none is kept

    @property
    def token(self) -> str:
        """Token that a request must carry."""
        return self._token

    def opens_to(self, text: str) -> bool:
        """True if this is the token."""
        return hmac.compare_digest(text.encode(errors="replace"), self._token.encode())

    def keep(self, port: int) -> None:
        """Write the token and the port down."""
        self.port = port
        if self._folder is None:
            return
        try:
            (self._folder / PAGE_TOKEN).parent.mkdir(parents=True, exist_ok=True)
            write_private(self._folder / PAGE_TOKEN, self._token)
            write_private(self._folder / PAGE_PORT, str(port))
        except OSError as error:
            _log.warning(
                "the page will have another address after a restart: %s in %s",
                error.strerror,
                self._folder,
            )


def _kept_token(folder: Path) -> str:
    """Return the token that is kept; empty if there is none, or others could read it."""
    path = folder / PAGE_TOKEN
    try:
        text = "" if path.stat().st_mode & _OTHERS else path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return text if _TOKEN.fullmatch(text) else ""


def _kept_port(folder: Path) -> int:
    try:
        text = (folder / PAGE_PORT).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return 0
    return int(text) if text.isdecimal() and len(text) <= 5 and int(text) <= _MAX_PORT else 0


# ---- names -------------------------------------------------------------------


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
    """Return the host names that requests for a page at an address may use.

    Any other name may belong to a foreign page that had it point here.
    """
    return frozenset({plain(host), *_LOOPBACK, *map(plain, others)})


def reachable(host: str) -> str:
    """Return the host to put into the address of a page that listens at ``host``."""
    name = socket.gethostname() if is_any(host) else host
    return f"[{name}]" if ":" in name else name


def name_of(authority: str) -> str:
    """Return the name in a Host header, as ``plain`` writes it; empty if it is none."""
    if not authority or set(authority) & set("/\\@?#%"):
        return ""
    try:
        return plain(URL(f"http://{authority}").host or "")
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
