"""Health of a role, for probes on its host.

`GET /health/live` is 200 while the role's main loop makes progress, `/health/ready` from the start
of its work until it is asked to end; both are 503 with the reason otherwise; `/health` has both.
They are served by broker/listening/health_port.py.

As a program it is a probe: `python -m slipstream.wire.process.health --port 8081 ready`.
"""

import argparse
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Literal, NamedTuple

HOST = "127.0.0.1"
_LONGEST_GAP_S = 5.0  # longer gaps are time in which this process did not run
EXCHANGE_S = 5.0  # longest time for a request to arrive, and for its answer to leave
_MAX_ANSWER_BYTES = 65_536
MAX_PORT = 65_535

State = Literal["starting", "running", "ended"]


class HealthObservation(NamedTuple):
    """State of a role for the judgment of its health."""

    state: State  # state of its main loop
    idle_s: float  # since the last sign of progress; before the main loop, since the start
    missing: str  # condition that its work still waits for; empty if it waits for none
    is_draining: bool  # asked to end


def why_not_live(seen: HealthObservation, stuck_s: float) -> str:
    """Return why a role no longer works; empty if it works.

    Other limits apply at its start. With a ``stuck_s`` of 0 only the end of its loop counts.
    """
    if seen.state == "ended":
        return "its main loop has ended"
    if seen.state == "running" and stuck_s and seen.idle_s >= stuck_s:
        return f"no progress for {seen.idle_s:.0f} s (run.stuck_s = {stuck_s:g})"
    return ""


def why_not_ready(seen: HealthObservation, stuck_s: float) -> str:
    """Return why a role does not work now; empty if it works."""
    if seen.is_draining:
        return "it was asked to end"
    if why := why_not_live(seen, stuck_s):
        return why
    if seen.missing or seen.state == "running":
        return seen.missing
    return "it starts"


class Health:
    """Health of one role: its main thread reports, the server's threads read."""

    def __init__(
        self, role: str = "", *, stuck_s: float = 0.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Start before the role's main loop.

        Args:
            role: Name for the answers.
            stuck_s: seconds without progress until a running role is not live; 0 for never.
            now: monotonic seconds.
        """
        self.role = role
        self.stuck_s = stuck_s
        self._now = now
        self._state: State = "starting"
        self._waits_for = ""
        self._missing: Callable[[], str] = str
        self._signs: Callable[[], object] = object
        self._is_draining: Callable[[], bool] = bool
        self._lock = threading.Lock()  # guards the fields below
        self._seen: object = None
        self._observed_s = now()
        self._idle_s = 0.0

    def waits_for(self, what: str) -> None:
        """Set what a starting role waits for, as in "waits for WHAT"."""
        self._waits_for = f"it waits for {what}"

    def drains_when(self, is_draining: Callable[[], bool]) -> None:
        """Use ``is_draining`` to ask if the role should end; any thread may call it."""
        self._is_draining = is_draining

    def begins(self, signs: Callable[[], object], missing: Callable[[], str] = str) -> None:
        """Judge the role by its main loop from now on.

        Args:
            signs: Value that changes only when the loop makes progress; any thread may call it.
            missing: Reason why the role does not work now, or empty; any thread may call it.
        """
        with self._lock:
            self._signs, self._missing = signs, missing
            self._seen, self._idle_s, self._observed_s = signs(), 0.0, self._now()
            self._state = "running"

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Report the end of the main loop at the end of the block."""
        try:
            yield
        finally:
            self._state = "ended"

    @contextmanager
    def main_loop(
        self, signs: Callable[[], object], missing: Callable[[], str] = str
    ) -> Iterator[None]:
        """Judge the role by its main loop, the block: ``begins``, then ``ending``."""
        self.begins(signs, missing)
        with self.ending():
            yield

    def observe(self) -> HealthObservation:
        """Return the state now. Call it at least every few seconds."""
        with self._lock:
            now_s = self._now()
            self._idle_s += min(now_s - self._observed_s, _LONGEST_GAP_S)
            self._observed_s = now_s
            if self._state == "running" and (seen := self._signs()) != self._seen:
                self._seen, self._idle_s = seen, 0.0
            missing = self._missing() if self._state == "running" else self._waits_for
            return HealthObservation(self._state, self._idle_s, missing, self._is_draining())

    def answer(self, path: str) -> tuple[int, dict[str, object]]:
        """Return the HTTP status and the JSON of the answer to a GET."""
        seen = self.observe()
        live, ready = why_not_live(seen, self.stuck_s), why_not_ready(seen, self.stuck_s)
        figures = {"role": self.role, "state": seen.state, "idle_s": round(seen.idle_s, 1)}
        match path:
            case "/health/live":
                return _status(live), {"live": not live, "reason": live, **figures}
            case "/health/ready":
                return _status(ready), {"ready": not ready, "reason": ready, **figures}
            case "/health":
                reason = live or ready
                return 200, {"live": not live, "ready": not ready, "reason": reason, **figures}
        return 404, {"reason": "there are /health, /health/live and /health/ready"}


def _status(why_not: str) -> int:
    return 503 if why_not else 200


def received(
    connection: socket.socket,
    most: int,
    *,
    is_whole: Callable[[bytes], bool],
    timeout_s: float = EXCHANGE_S,
) -> bytes:
    """Return a peer's data until it is whole, ends, or has ``most`` bytes or more.

    Raises:
        TimeoutError: the data took longer than ``timeout_s``.
    """
    until_s = time.monotonic() + timeout_s
    data = b""
    while len(data) < most and not is_whole(data):
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"nothing whole within {timeout_s:g} s")
        connection.settimeout(left_s)
        piece = connection.recv(most)
        if not piece:
            break
        data += piece
    return data


# ---- the probe -----------------------------------------------------------------


def probe(port: int, kind: str, *, timeout_s: float) -> tuple[bool, str]:
    """Ask a role on this host; return whether it is live or ready, and its answer in a line."""
    try:
        with closing(socket.create_connection((HOST, port), timeout_s)) as connection:
            connection.sendall(f"GET /health/{kind} HTTP/1.0\r\n\r\n".encode())
            answer = received(
                connection, _MAX_ANSWER_BYTES, is_whole=lambda _: False, timeout_s=timeout_s
            )
    except OSError as error:
        why = error.strerror or str(error)
        reason = f"no answer at {HOST}:{port}: {why}"
        return False, json.dumps({kind: False, "reason": reason})
    head, _, body = answer.decode("utf-8", "replace").partition("\r\n\r\n")
    return head.split(" ")[1:2] == ["200"], body.strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Probe; print the answer; return 0 for yes, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m slipstream.wire.process.health",
        description="Ask a role on this host that was started with --health PORT.",
    )
    parser.add_argument("--port", type=int, required=True, help="of the role")
    parser.add_argument(
        "--timeout-s", type=float, default=EXCHANGE_S, metavar="S", help="default %(default)g"
    )
    parser.add_argument("kind", choices=["live", "ready"])
    arguments = parser.parse_args(argv)
    is_so, line = probe(arguments.port, arguments.kind, timeout_s=arguments.timeout_s)
    print(line)  # noqa: T201
    return 0 if is_so else 1


if __name__ == "__main__":
    raise SystemExit(main())
