"""Which addresses processes listen on, read from the kernel."""

import ipaddress
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_LISTENING = "0A"  # the state of a socket in /proc/net/tcp
_SOCKET = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True, order=True)
class Listener:
    """A TCP socket that takes connections."""

    program: str
    address: str
    port: int

    @property
    def on_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback

    def __str__(self) -> str:
        return f"{self.address} port {self.port}: {self.program}"


def listeners_of(pids: Iterable[int]) -> set[Listener]:
    """Return what these processes listen on; one that has ended listens on nothing."""
    tables: dict[str, dict[str, tuple[str, int]]] = {}  # by network namespace
    found: set[Listener] = set()
    for pid in pids:
        try:
            network = str(Path(f"/proc/{pid}/ns/net").readlink())
            if network not in tables:
                tables[network] = _listening_sockets(Path(f"/proc/{pid}/net"))
        except OSError:  # it ended meanwhile
            continue
        sockets, program = tables[network], _program(pid)
        mine = _sockets_of(pid) & sockets.keys()
        if program != _program(pid):  # it was a fork of another, whose sockets it had until then
            continue
        found |= {Listener(program, *sockets[inode]) for inode in mine}
    return found


def parsed_table(table: str) -> dict[str, tuple[str, int]]:
    """Return address and port by inode, of what listens in a table of the kernel's form."""
    found: dict[str, tuple[str, int]] = {}
    for line in table.splitlines()[1:]:
        words = line.split()
        if words[3] == _LISTENING:
            address, _, port = words[1].partition(":")
            found[words[9]] = _address(address), int(port, 16)
    return found


def _listening_sockets(network: Path) -> dict[str, tuple[str, int]]:
    tables = (network / name for name in ("tcp", "tcp6"))
    return {k: v for table in tables if table.exists() for k, v in _parsed_file(table).items()}


def _parsed_file(path: Path) -> dict[str, tuple[str, int]]:
    return parsed_table(path.read_text())


def _address(digits: str) -> str:
    """Return an address from 8 or 32 digits: words of 32 bits in the order of this machine."""
    words = [int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)]
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _sockets_of(pid: int) -> set[str]:
    found: set[str] = set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            match = _SOCKET.match(str(link.readlink()))
            if match:
                found.add(match[1])
    except OSError:  # it ended meanwhile
        return found
    return found


def _program(pid: int) -> str:
    """Return what a process is called, with enough of its arguments to know it by."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return f"process {pid}"
    return " ".join(Path(word.decode(errors="replace")).name for word in words[:4])
