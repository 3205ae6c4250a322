"""What a process without a key can do to whatever listens: it fills, floods and mumbles."""

import ctypes
import re
import resource
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.support.listening import Listener, listeners_of
from tests.support.waiting import HANG_S

_CLONE_NEWNET = 0x40000000
_CURVE = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0" + b"CURVE".ljust(20, b"\0") + bytes(32)
_CHUNK = bytes(64 * 1024)
_LONG, _LONG_COMMAND = 2, 6  # flags of ZMTP: the length has 8 bytes
PATIENCE_S = 15.0  # of one connection that is not answered


def resident_bytes(pid: int) -> int:
    """Return what a process has in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def num_descriptors(pid: int) -> int:
    """Return how many files a process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


@contextmanager
def silent(address: tuple[str, int], count: int) -> Iterator[int]:
    """Open connections that say nothing; yield how many the kernel has taken."""
    held: list[socket.socket] = []
    try:
        for _ in range(count):
            one = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
            one.setblocking(False)
            held.append(one)
            with suppress(OSError):  # it is under way
                one.connect(address)
        yield len(held)
    finally:
        for one in held:
            one.close()


@contextmanager
def filled(address: tuple[str, int], count: int, num_bytes: int) -> Iterator[int]:
    """Send the start of a message of ZeroMQ over each of many connections; yield what went in.

    The message is one byte longer than what is sent, so that it never ends.
    """
    taken = 0
    held: list[socket.socket] = []
    try:
        for n in range(count):
            try:
                one = socket.create_connection(address, 1.0)
            except OSError:  # the gate is shut
                continue
            held.append(one)
            flags = _LONG if n % 2 else _LONG_COMMAND
            with suppress(OSError):
                one.sendall(_CURVE + bytes([flags]) + struct.pack(">Q", num_bytes + 1))
                one.settimeout(2.0)
                for _ in range(0, num_bytes, len(_CHUNK)):
                    one.sendall(_CHUNK)
                    taken += len(_CHUNK)
        yield taken
    finally:
        for one in held:
            one.close()


MALFORMED = {
    "a key that is no text": b"GET /v1/models HTTP/1.1\r\nHost: %s\r\nAuthorization: \xff\r\n\r\n",
    "a token that is no text": b"GET /?token=%%ff%%ed%%a0%%80 HTTP/1.1\r\nHost: %s\r\n\r\n",
    "a cookie that is no text": b"GET / HTTP/1.1\r\nHost: %s\r\nCookie: \xff=\xfe; =\r\n\r\n",
    "no key": b"GET /v1/models HTTP/1.1\r\nHost: %s\r\n\r\n",
    "an expectation": b"GET /v1/models HTTP/1.1\r\nHost: %s\r\nExpect: x\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "a host that is none": b"GET / HTTP/1.1\r\nHost: [::1\xff\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00%s\r\n\r\n",
    "two lengths": b"POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nContent-Length: 5\r\n"
    b"Content-Length: 6\r\n\r\nhello",
    "a negative length": b"POST / HTTP/1.1\r\nHost: %s\r\nContent-Length: -1\r\n\r\n",
    "a chunk that is none": b"POST / HTTP/1.1\r\nHost: %s\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"x\r\n",
}
"""Requests without a key, by what is wrong with them; %s is the host."""


def status_of(address: tuple[str, int], request: bytes) -> int:
    """Return the status of the answer to a request; 0 if it was hung up on."""
    host = b"%s:%d" % (address[0].encode(), address[1])
    return exchanged(address, request % host if b"%s" in request else request)


def exchanged(address: tuple[str, int], request: bytes) -> int:
    """Return the status of the answer to these bytes; 0 if there is none."""
    with socket.create_connection(address, PATIENCE_S) as one:
        received = b""
        with suppress(OSError):
            one.sendall(request)
            received = one.recv(4096)
    words = received.split(b" ", 2)
    return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") else 0


def all_said(address: tuple[str, int], request: bytes) -> bytes:
    """Return all that is said after these bytes, until the connection is closed."""
    said = b""
    with socket.create_connection(address, HANG_S) as one, suppress(ConnectionError):
        one.sendall(request)
        while piece := one.recv(4096):
            said += piece
    return said


@contextmanager
def filled_heads(address: tuple[str, int], count: int, num_bytes: int) -> Iterator[int]:
    """Send heads of HTTP that do not end over many connections; yield how much went in."""
    taken = 0
    line = b"X-%08d: " + b"x" * 4_000 + b"\r\n"
    held: list[socket.socket] = []
    try:
        for _ in range(count):
            try:
                one = socket.create_connection(address, 1.0)
            except OSError:
                continue
            held.append(one)
            # What only the kernel keeps says nothing about who reads.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(_CHUNK))
            with suppress(OSError):
                one.settimeout(2.0)
                one.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
                for number in range(num_bytes // len(line)):
                    one.sendall(line % number)
                    taken += len(line)
        yield taken
    finally:
        for one in held:
            one.close()


# ---- whole runs ------------------------------------------------------------------

# Libraries listen, too: SGLang's and Redis' by their programs, torch's store, gloo and NCCL by
# saying nothing that ZeroMQ or HTTP says.
_OTHERS = re.compile(r"\b(sglang|redis|valkey|ray|raylet|gcs_server)\b")
_COUNT, _EACH_BYTES = 30, 15 << 20
_FEW_FILES = 5_000  # of a process whose descriptors are attacked
_SPARE_FILES = 1_000  # of this process
_LOOKS, _LOOK_S = 15, 0.1
_MOST_GROWTH = 128 << 20  # a quarter of what is sent, beside what a role itself makes meanwhile
REFUSED = {0, 400, 401, 403, 404, 405, 417}  # 0 is hung up on


@dataclass(frozen=True)
class Attacked:
    """One listener of ours, and what an attack without a key found."""

    program: str
    port: int
    kind: str  # ROUTER or HTTP
    grown_bytes: int
    answered: dict[str, int]  # statuses that are no refusals
    most_files: int  # that it may open
    files_left: int  # beside as many connections as get in


def attack(pids: Iterable[int]) -> list[Attacked]:
    """Attack what of ours these processes listen at, without a key; return what was found."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # for many connections at a time
    places = {one: pid for pid in pids for one in listeners_of([pid])}
    ours = {one: pid for one, pid in places.items() if not is_of_others(one.program)}
    count = (hard - _SPARE_FILES) // max(1, len(ours))
    with ThreadPoolExecutor(max(1, len(ours))) as threads:
        found = threads.map(partial(_attack_inside, count), ours.values(), ours)
        return [one for one in found if one is not None]


def is_of_others(program: str) -> bool:
    """True if a program is a library's."""
    return _OTHERS.search(program) is not None


def _attack_inside(count: int, pid: int, listener: Listener) -> Attacked | None:
    """Attack a listener from a thread in the network of its process; None if it is a library's."""
    _enter_network(pid)
    address = listener.address, listener.port
    kind = _kind(address)
    if not kind:
        return None
    before = private_bytes(pid)
    answered: dict[str, int] = {}
    with filled(address, _COUNT, _EACH_BYTES), filled_heads(address, _COUNT, _EACH_BYTES):
        grown = private_bytes(pid) - before
    if kind == "HTTP":
        found = {what: status_of(address, request) for what, request in MALFORMED.items()}
        answered = {what: status for what, status in found.items() if status not in REFUSED}
    most = resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
    left = _files_left(pid, address, most, min(count, most)) if most <= _FEW_FILES else most
    return Attacked(listener.program, listener.port, kind, grown, answered, most, left)


def _files_left(pid: int, address: tuple[str, int], most: int, count: int) -> int:
    """Return how many of its files a process may still open beside connections that say nothing."""
    left = most
    with silent(address, count):
        for _ in range(_LOOKS):
            left = min(left, most - num_descriptors(pid))
            time.sleep(_LOOK_S)
    return left


def assert_held(found: Iterable[Attacked]) -> None:
    """No stranger got an answer, or made a process much larger."""
    for one in found:
        assert one.answered == {}, one
        assert one.grown_bytes < _MOST_GROWTH, one
        assert one.files_left >= one.most_files // 16, one


def _kind(address: tuple[str, int]) -> str:
    """Return what listens by the first that it says: ROUTER, HTTP or nothing of these."""
    for asked in (_CURVE[:10], b"GET / HTTP/1.1\r\nHost: stranger\r\n\r\n"):
        with suppress(OSError), socket.create_connection(address, PATIENCE_S) as one:
            one.sendall(asked)
            said = one.recv(5)
            if said[:1] == _CURVE[:1]:
                return "ROUTER"
            if said == b"HTTP/":
                return "HTTP"
    return ""


def private_bytes(pid: int) -> int:
    """Return what a process has in memory for itself alone; 0 if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    return 0


def _enter_network(pid: int) -> None:
    """Have this thread open sockets in the network of a process; it must end afterwards."""
    with suppress(OSError):
        other = Path(f"/proc/{pid}/ns/net")
        if other.readlink() != Path("/proc/thread-self/ns/net").readlink():
            with other.open() as opened:
                ctypes.CDLL(None, use_errno=True).setns(opened.fileno(), _CLONE_NEWNET)
