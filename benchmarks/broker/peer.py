"""A lean client: one thread, no event loop, many requests on their way."""

import secrets
import time
from itertools import count
from typing import TypeVar

import zmq

from slipstream.wire.errors import PeerLostError, RefusedError
from slipstream.wire.messages.broker import Answer, Hello, Refusal, Request, Role, Welcome
from slipstream.wire.messages.codec import Frame, decode_answer, encode
from slipstream.wire.messages.pieces import cut

A = TypeVar("A", bound=Answer)
Received = tuple[bytes, Answer, list[zmq.Frame]]


class Peer:
    """A DEALER socket that has sent its hello."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        role: Role,
        name: str,
        *,
        hello_s: float = 30.0,
    ) -> None:
        self._ids = count(1)
        self._session = b""
        self.may_refuse: set[bytes] = set()  # requests whose refusal is an answer
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self.socket.connect(endpoint)
        hello = Hello(role=role, name=name, incarnation=secrets.token_hex(4))
        try:
            self.welcome = self.ask(hello, Welcome, timeout_s=hello_s)
            self._session = self.welcome.session
        except BaseException:
            self.close()
            raise

    def send(self, request: Request, *frames: Frame) -> bytes:
        """Send a request; return its id."""
        request_id = next(self._ids).to_bytes(8, "big")
        large = bool(frames)
        message = [request_id, self._session, *cut([encode(request), *frames])]
        self.socket.send_multipart(message, copy=not large)
        return request_id

    def receive(self, timeout_s: float) -> Received | None:
        """Return the next answer, or None if none comes in time."""
        if timeout_s and not self.socket.poll(int(timeout_s * 1000) or 1):
            return None
        try:
            request_id, body, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        answer = decode_answer(body.buffer)
        if isinstance(answer, Refusal) and request_id.bytes not in self.may_refuse:
            raise RefusedError(answer.reason)
        self.may_refuse.discard(request_id.bytes)
        return request_id.bytes, answer, frames

    def ask(self, request: Request, kind: type[A], *frames: Frame, timeout_s: float = 60.0) -> A:
        """Send one request while no other is on its way, and return its answer."""
        request_id = self.send(request, *frames)
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            received = self.receive(left)
            if received is not None and received[0] == request_id:
                if not isinstance(received[1], kind):
                    raise TypeError(f"{request} was answered by {received[1]}")
                return received[1]
        raise PeerLostError(f"no answer to {type(request).__name__} in {timeout_s:.1f} s")

    def close(self) -> None:
        self.socket.close()
