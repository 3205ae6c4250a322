"""A role's connection to the broker: one request, one answer, with deadlines.

The client waits for a broker that died: once reconnected, it sends its hello again and
repeats every request that was not answered. All requests may be repeated; an answer to the first
sending that still arrives is ignored, so that the client's state and the broker's grants
agree again from the hello on.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import random
from typing import Self, TypeVar

import zmq
import zmq.asyncio
from msgspec.structs import replace
from zmq.utils.monitor import parse_monitor_message

from slipstream.broker.listening.curve import ping, prove_key
from slipstream.wire.errors import (
    ConfigError,
    ForbiddenError,
    NameTakenError,
    PeerLostError,
    ProtocolError,
    RefusedError,
    SlipstreamError,
    SlowDownError,
    SupersededError,
)
from slipstream.wire.files.keys import ClientKey, read_client_key
from slipstream.wire.messages.broker import (
    Answer,
    Hello,
    Refusal,
    RefusalCode,
    Request,
    Role,
    Welcome,
)
from slipstream.wire.messages.codec import Frame, decode_answer, encode
from slipstream.wire.messages.pieces import cut
from slipstream.wire.process.patience import log_wait

_log = logging.getLogger(__name__)
A = TypeVar("A", bound=Answer)
_SEND_LIMIT = 1_000
_REPEAT_S = 20.0  # a request whose answer is lost without a lost connection is repeated
_HELLO_S = 5.0  # time until a hello is repeated, in case it was lost; doubled each time
_MAX_HELLO_S = 80.0
_NAME_TAKEN_S = 1.0  # between hellos while another process has the name
_NAME_PATIENCE_S = 30.0
_FAR_NAME_PATIENCE_S = 90.0  # on another host than the broker
_SLOW_DOWN_S = 0.2  # pause before a repetition, up to twice that
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_HEARTBEAT_MS = 2_000  # pings of the connection, so that a stopped broker counts as gone
_DEAD_AFTER_MS = 10_000
OUTAGE_S = 300.0
_REFUSALS: dict[RefusalCode, type[SlipstreamError]] = {
    "superseded": SupersededError,
    "forbidden": ForbiddenError,
    "slow_down": SlowDownError,
    "name_taken": NameTakenError,
}
_PASSERS_BY = ("observer", "operator")  # their patience is no setting


@dataclass(slots=True)
class _Pending:
    """A request that has no answer yet."""

    request_id: bytes
    pieces: list[Frame]  # without the id and the session
    is_hello: bool
    answer: "asyncio.Future[tuple[Answer, list[Frame]]]"


class BrokerClient:
    """A DEALER socket with many requests in flight. Use it from one event loop."""

    def __init__(
        self,
        endpoint: str,
        hello: Hello,
        *,
        timeout_s: float,
        outage_s: float,
        key: ClientKey | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._hello = hello
        self._timeout_s = timeout_s
        self._outage_s = outage_s
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_LIMIT)
        ping(self._socket, every_ms=_HEARTBEAT_MS, dead_after_ms=_DEAD_AFTER_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        self._key = key
        if key is not None:
            prove_key(self._socket, key, server_key=key.broker)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._session = b""
        self.run_id = ""  # run of the broker that welcomed us; another run is never served
        self._sending_again: set[asyncio.Task[None]] = set()
        self._ids = count(1)
        self._pending: dict[bytes, _Pending] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._returning: asyncio.Task[None] | None = None
        self._is_welcome = False
        self._failure: SlipstreamError | None = None
        self.held: Callable[[], Iterable[int]] = tuple  # leases that this role works on

    @classmethod
    async def connect(
        cls,
        endpoint: str,
        *,
        role: Role,
        name: str,
        packages: dict[str, str] | None = None,
        tokenizer: str = "",
        timeout_s: float | None = None,
        outage_s: float = OUTAGE_S,
        key_file: str = "",
        name_patience_s: float | None = None,
    ) -> tuple[Self, Welcome]:
        """Return a client that the broker welcomed.

        Args:
            endpoint: Address of the broker.
            role: Role of this process.
            name: Name, stable over restarts.
            packages: Versions worth recording.
            tokenizer: A tokenizer_hash.
            timeout_s: Limit of the first hello, and of a request while the broker is there; None is
                ``outage_s``.
            outage_s: Time to wait later for a broker that is gone.
            key_file: Key of this host; needed for a broker on another host.
            name_patience_s: Time for another process to give up this name; None is 30 s, and 90 s
                if the broker is on another host.

        Raises:
            PeerLostError: no broker answers within ``timeout_s``.
            NameTakenError: another connected process has this name.
            ConfigError: the broker does not want this client: another wire revision, another
                tokenizer, a key that it does not know. Or there is no key to show.
        """
        hello = Hello(
            role=role,
            name=name,
            incarnation=secrets.token_hex(4),
            packages=packages or {},
            tokenizer=tokenizer,
        )
        timeout_s = outage_s if timeout_s is None else timeout_s
        key = _key_for(endpoint, key_file)
        client = cls(endpoint, hello, timeout_s=timeout_s, outage_s=outage_s, key=key)
        try:
            return client, await client._open(name_patience_s)
        except BaseException as error:
            client.close()
            if isinstance(error, RefusedError) and not isinstance(error, NameTakenError):
                raise ConfigError(str(error)) from error
            raise

    async def _open(self, name_patience_s: float | None) -> Welcome:
        """Connect and be welcomed."""
        try:
            self._socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"{self._endpoint} is no address of a broker (run.broker)") from error
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        welcome = await self._first_hello(name_patience_s)
        self._session, self.run_id = welcome.session, welcome.run_id
        self._is_welcome = True
        return welcome

    async def _first_hello(self, patience_s: float | None) -> Welcome:
        """Send a hello, and repeat it for a while if another process has this name.

        The connection of a dead process is gone at once, that of a vanished host after a
        minute. A longer wait means the other process is alive.
        """
        if patience_s is None:
            patience_s = _NAME_PATIENCE_S if self._key is None else _FAR_NAME_PATIENCE_S
        give_up_s: float | None = None
        while True:
            try:
                async with log_wait(f"the broker at {self._endpoint}"):
                    answer, _ = await self._ask(self._hello, self._timeout_s)
                return _expect(answer, Welcome, self._hello)
            except NameTakenError as error:
                now = time.monotonic()
                if give_up_s is None:
                    give_up_s = now + patience_s
                    _log.warning("%s; waiting up to %.0f s for that", error, patience_s)
                if now >= give_up_s:
                    raise
            await asyncio.sleep(_NAME_TAKEN_S)

    async def ask(
        self,
        request: Request,
        kind: type[A],
        *,
        frames: Sequence[Frame] = (),
        extra_wait_s: float = 0.0,
    ) -> tuple[A, list[Frame]]:
        """Send a request and return its answer, which must be of the given kind.

        Raises:
            RefusedError: the broker refused, with its reason.
            SupersededError: another process took this name.
            PeerLostError: no answer in time.
        """
        answer, attached = await self.ask_any(request, frames=frames, extra_wait_s=extra_wait_s)
        return _expect(answer, kind, request), attached

    async def ask_any(
        self, request: Request, *, frames: Sequence[Frame] = (), extra_wait_s: float = 0.0
    ) -> tuple[Answer, list[Frame]]:
        """Send a request that has answers of several kinds; a refusal is raised."""
        patience_s = max(self._timeout_s, self._outage_s) + extra_wait_s
        return await self._ask(request, patience_s, frames, repeat_s=_REPEAT_S + extra_wait_s)

    async def _ask(
        self,
        request: Request,
        patience_s: float,
        frames: Sequence[Frame] = (),
        *,
        repeat_s: float = float("inf"),
    ) -> tuple[Answer, list[Frame]]:
        if self._failure is not None:
            raise self._failure
        future: asyncio.Future[tuple[Answer, list[Frame]]] = (
            asyncio.get_running_loop().create_future()
        )
        is_hello = isinstance(request, Hello)
        pending = _Pending(b"", cut([encode(request), *frames]), is_hello, future)
        deadline = time.monotonic() + patience_s
        what = type(request).__name__
        try:
            if self._returning is None or is_hello:
                await self._send(pending, deadline)
            else:  # it is sent after the hello that is under way
                self._register(pending)
            while (left := deadline - time.monotonic()) > 0:
                done, _ = await asyncio.wait({future}, timeout=min(left, repeat_s))
                if done:
                    break
                if left > repeat_s:
                    self._come_back()  # the hello lists the grants that have arrived
            else:
                raise PeerLostError(
                    f"the broker at {self._endpoint} did not answer {what} "
                    f"within {patience_s:.0f} s{self._hint()}"
                )
        finally:
            self._pending.pop(pending.request_id, None)
            future.cancel()
        answer, attached = future.result()
        if isinstance(answer, Refusal):
            kind = _REFUSALS.get(answer.code, RefusedError)
            raise kind(f"the broker refused {what}: {answer.reason}")
        return answer, attached

    def _hint(self) -> str:
        setting = "" if self._hello.role in _PASSERS_BY else " (run.outage_s)"
        if self._key is None:
            return setting
        hint = "is run.broker its address, and run.key_file a key that this very broker made?"
        return f"{setting}; {hint}"

    async def _send(self, pending: _Pending, deadline: float) -> None:
        """Send a request under a new id: from now on only the answer to this sending counts."""
        self._register(pending)
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline - time.monotonic()):
                session = b"" if pending.is_hello else self._session
                await self._socket.send_multipart([pending.request_id, session, *pending.pieces])

    def _register(self, pending: _Pending) -> None:
        self._pending.pop(pending.request_id, None)
        pending.request_id = next(self._ids).to_bytes(8, "big")
        self._pending[pending.request_id] = pending

    async def _receive(self) -> None:
        while True:
            request_id, body, *attached = await self._socket.recv_multipart(copy=False)
            pending = self._pending.get(request_id.bytes)
            if pending is None or pending.answer.done():
                continue  # its deadline has passed, or it was sent again
            try:
                answer = decode_answer(body.buffer)
            except ProtocolError as error:
                pending.answer.set_exception(error)
                continue
            if isinstance(answer, Refusal) and answer.code == "hello_first" and self._is_welcome:
                self._come_back()
                continue
            if isinstance(answer, Refusal) and answer.code == "slow_down":
                task = asyncio.create_task(self._send_later(pending))
                self._sending_again.add(task)
                task.add_done_callback(self._sending_again.discard)
                continue
            pending.answer.set_result((answer, [frame.buffer for frame in attached]))

    async def _send_later(self, pending: _Pending) -> None:
        """Resend a request that came too early; its deadline stays."""
        await asyncio.sleep(_SLOW_DOWN_S * (1 + random()))  # noqa: S311 so that not all come at once
        if not pending.answer.done():
            await self._send(pending, time.monotonic() + self._timeout_s)

    # ---- a broker that was gone ----------------------------------------------

    async def _watch(self) -> None:
        """Send the hello again on every new connection."""
        has_connected = False
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH and self._key is not None:
                self._fail(
                    ForbiddenError(
                        f"the broker at {self._endpoint} does not take the key {self._key.name} "
                        "(run.key_file): it was revoked, or made for another run"
                    )
                )
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                # Messages on the former connection may be lost; deadlines stay.
                for pending in [*self._pending.values()] if has_connected else ():
                    if pending.is_hello and not pending.answer.done():
                        await self._send(pending, time.monotonic() + self._timeout_s)
                has_connected = True
            if not self._is_welcome:
                continue
            if event["event"] == zmq.EVENT_DISCONNECTED:
                looks_on = self._hello.role == "observer"  # it reports that itself
                level = logging.DEBUG if looks_on else logging.WARNING
                _log.log(level, "the broker at %s is gone; waiting for it", self._endpoint)
            else:
                self._come_back()

    def _come_back(self) -> None:
        if self._returning is None or self._returning.done():
            self._returning = asyncio.create_task(self._return())

    async def _return(self) -> None:
        """Send the hello until the broker answers, then resend unanswered requests."""
        try:
            answer_s = _HELLO_S
            while not await self._is_welcome_again(answer_s):
                _log.debug("the broker at %s does not answer yet", self._endpoint)
                answer_s = min(2 * answer_s, _MAX_HELLO_S)
            deadline = time.monotonic() + self._outage_s
            waiting = [pending for pending in self._pending.values() if not pending.answer.done()]
            self._returning = None  # from here on requests are sent as they come
            _log.info("the broker is back; %d requests are sent again", len(waiting))
            for pending in waiting:
                await self._send(pending, deadline)
        except SlipstreamError as error:
            self._fail(error)
        finally:
            if self._returning is asyncio.current_task():
                self._returning = None

    async def _is_welcome_again(self, answer_s: float) -> bool:
        held = tuple(self.held())
        hello = replace(self._hello, reconnects=True, held=held, run_id=self.run_id)
        try:
            answer, _ = await self._ask(hello, answer_s)
        except PeerLostError:
            return False
        self._session = _expect(answer, Welcome, hello).session
        return True

    def _fail(self, error: SlipstreamError) -> None:
        self._failure = error
        for pending in list(self._pending.values()):
            if not pending.answer.done():
                pending.answer.set_exception(error)

    def close(self) -> None:
        """Drop the connection."""
        if self._returning is not None:
            self._returning.cancel()
        for task in (*self._tasks, *self._sending_again):
            task.cancel()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()


def _key_for(endpoint: str, key_file: str) -> ClientKey | None:
    """Return the key to prove at an endpoint; None on this host.

    Raises:
        ConfigError: there is no key to show.
    """
    if endpoint.startswith("ipc://"):
        return None
    if not key_file:
        raise ConfigError(
            f"{endpoint} is not on this host: run.key_file must name a key that "
            "`slipstream keys make` wrote on the broker's host"
        )
    return read_client_key(Path(key_file))


def _expect(answer: Answer, kind: type[A], request: Request) -> A:
    if not isinstance(answer, kind):
        raise ProtocolError(f"{type(request).__name__} was answered by {answer!r}")
    return answer
