"""The port at which probes of this host ask for a role's health; `Health` has the answers.

It listens on loopback, in a thread of its own, without authentication, and says nothing secret.
"""

import json
import logging
import socketserver
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from typing_extensions import override

from slipstream.broker.listening.host_names import known_names, name_of
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.health import EXCHANGE_S, HOST, Health, received

_log = logging.getLogger(__name__)
_OBSERVE_S = 0.25  # between two looks at the main loop
_MAX_REQUEST_BYTES = 4096
_MAX_EXCHANGES = 16  # at a time; more are closed unanswered
_NAMES = known_names(HOST)


@contextmanager
def serving(health: Health, port: int) -> Iterator[None]:
    """Answer probes at a port of loopback while the block runs; port 0 serves nothing.

    Raises:
        ConfigError: the port is taken.
    """
    if not port:
        yield
        return
    try:
        server = _Server(health, port)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {HOST}:{port}: {error.strerror} (--health {port})"
        ) from error
    with server:
        thread = threading.Thread(
            target=server.serve_forever, args=(_OBSERVE_S,), name="health", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True  # after a connection that has just ended, never a second listener
    daemon_threads = True
    request_queue_size = _MAX_EXCHANGES

    def __init__(self, health: Health, port: int) -> None:
        self.health = health
        self._free = threading.BoundedSemaphore(_MAX_EXCHANGES)
        super().__init__((HOST, port), _Exchange)

    @override
    def service_actions(self) -> None:
        self.health.observe()

    @override
    def process_request(self, request: object, client_address: object) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)  # type: ignore[arg-type]
        else:
            self.shutdown_request(request)  # type: ignore[arg-type]

    @override
    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._free.release()

    @override
    def handle_error(self, request: object, client_address: object) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):  # a client that went away
            _log.error("no answer to a probe", exc_info=error)


class _Exchange(socketserver.BaseRequestHandler):
    """One request and its answer."""

    server: _Server

    @override
    def handle(self) -> None:
        request = received(
            self.request, _MAX_REQUEST_BYTES, is_whole=lambda data: b"\r\n\r\n" in data
        )
        head = request.decode("latin-1").split("\r\n")
        words = head[0].split()
        if len(words) != 3 or b"\r\n\r\n" not in request:
            status, body = 400, dict[str, object](reason="not a request of HTTP")
        elif words[0] != "GET":
            status, body = 405, {"reason": "only GET is answered"}
        elif not _is_of_this_host(head[1:]):
            status, body = 403, {"reason": "unknown host name"}
        else:
            status, body = self.server.health.answer(words[1])
        text = json.dumps(body).encode() + b"\n"
        answer = (
            f"HTTP/1.0 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(text)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
        )
        self.request.settimeout(EXCHANGE_S)
        self.request.sendall(answer.encode() + text)


_REASONS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}


def _is_of_this_host(lines: Sequence[str]) -> bool:
    """True if a request names loopback or nothing, as no browser does."""
    headers = (line.partition(":") for line in lines)
    hosts = [value.strip() for name, _, value in headers if name.strip().lower() == "host"]
    return all(name_of(host) in _NAMES for host in hosts)
