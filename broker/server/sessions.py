"""The client on the other side of each connection."""

import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.broker.ledger.leases import holder_of
from slipstream.broker.server.keyring import KeyHolder, admits
from slipstream.broker.server.router import Peer
from slipstream.wire.errors import ForbiddenError, NameTakenError, RefusedError, SupersededError
from slipstream.wire.messages.broker import MANY, WIRE_REVISION, Hello, Role

MAX_READERS = 64  # observers and operators; they leave without a word
MAX_CLIENTS = 10_000  # clients with one key, or on the Unix socket
_MAX_NAME = 100  # characters
_COMES_BACK_S = 3.0  # time until the name of a lost connection is free
_SESSION_BYTES = 16


@dataclass(frozen=True, slots=True)
class ClientSession:
    """One process after its hello."""

    name: str
    incarnation: str
    peer: Peer
    role: Role
    token: bytes

    @property
    def holder(self) -> str:
        """Name under which it holds leases."""
        return holder_of(self.name, self.incarnation)


class Sessions:
    """Clients by the token that their hello was answered with.

    A routing id proves nothing: a client under one that another had must send a hello. Neither does
    a token on another connection than that of its hello.
    """

    def __init__(
        self,
        key_of: Callable[[str], KeyHolder | None] = lambda _key: None,
        is_there: Callable[[Peer], bool] = Peer.is_there,
        may_come_back: Callable[[str, str], bool] = lambda _name, _holder: False,
        now: Callable[[], float] = time.monotonic,
        *,
        max_clients: int = MAX_CLIENTS,
    ) -> None:
        """Make an empty list.

        ``may_come_back`` returns True if another holder than this one had a name before this
        broker, and may still reconnect.
        """
        self._max_clients = max_clients
        self._may_come_back = may_come_back
        self._now = now
        # Clients refused because their name is taken -> since when its holder is gone.
        self._waiting: OrderedDict[tuple[str, str], float | None] = OrderedDict()
        self._is_there = is_there
        self._key_of = key_of
        self._by_token: dict[bytes, ClientSession] = {}
        self._by_peer: dict[Peer, ClientSession] = {}
        self._by_name: dict[
            str, dict[str, ClientSession]
        ] = {}  # sessions by key, in the order of hello
        self._readers: OrderedDict[bytes, None] = OrderedDict()  # tokens
        self._num_of: Counter[Role] = Counter()
        self._leaving: set[bytes] = set()  # tokens of clients that sent Goodbye
        self._tokenizer: tuple[str, str] | None = None  # hash, and the first client that sent it

    def find(self, token: bytes, peer: Peer) -> ClientSession | None:
        """Return the session on a connection.

        Raises:
            ForbiddenError: its key was revoked.
        """
        session = self._by_token.get(token)
        if session is None or session.peer != peer:
            return None
        if peer.key:
            self._holder_of(peer.key, session.name)
        return session

    def named(self, peer: Peer) -> str:
        """Return the name of a connection in logs."""
        session = self._by_peer.get(peer)
        return session.name if session else "an unknown peer"

    def is_current(self, session: ClientSession) -> bool:
        """True unless another hello came under this name since."""
        return self._by_token.get(session.token) is session

    def is_connected(self, holder: str) -> bool:
        """True if the holder of leases under this name is connected."""
        return any(
            session.holder == holder and self._is_there(session.peer)
            for session in self._by_token.values()
        )

    def hello(self, peer: Peer, hello: Hello) -> ClientSession:
        """Take note of a connection.

        Raises:
            RefusedError: it does not fit to the others.
            ForbiddenError: its key is not for this role.
            SupersededError: a newer process has this name.
            NameTakenError: a connected process has this name.
        """
        if hello.wire_revision != WIRE_REVISION:
            raise RefusedError(
                f"{hello.name[:_MAX_NAME]} speaks wire revision {hello.wire_revision}, "
                f"this broker {WIRE_REVISION}: install the same version on both sides"
            )
        name = hello.name
        if not name or len(name) > _MAX_NAME or not name.isprintable() or set(name) & set("@/"):
            raise RefusedError(
                f"a client's name is 1 to {_MAX_NAME} printable characters without @ and /, "
                f"got {name[:_MAX_NAME]!r}"
            )
        if len(hello.incarnation) > _MAX_NAME or "@" in hello.incarnation:
            raise RefusedError(f"an incarnation is at most {_MAX_NAME} characters without @")
        if peer.key:  # its name is the prefix of its clients' names: keys cannot share a name
            holder = self._holder_of(peer.key, name)
            if not admits(holder.role, hello.role):
                raise ForbiddenError(
                    f"the key {holder.name} was made for the role {holder.role}, not {hello.role}"
                )
            name = f"{holder.name}/{name}"
        self._check_tokenizer(hello)
        token = secrets.token_bytes(_SESSION_BYTES)
        session = ClientSession(name, hello.incarnation, peer, hello.role, token)
        reads = hello.role in {"observer", "operator"}
        if not reads:
            self._take_name(session, hello)  # it may refuse, and then all stays as it was
        if hello.tokenizer and self._tokenizer is None and not peer.key:
            self._tokenizer = (hello.tokenizer, name)
        if (same := self._by_peer.get(peer)) is not None:
            self._forget(same)
        if reads:
            self._readers[token] = None
            if len(self._readers) > MAX_READERS:
                self._forget(self._by_token[next(iter(self._readers))])
        self._by_token[token] = self._by_peer[peer] = session
        self._num_of[session.role] += 1
        return session

    def num_of(self, role: Role) -> int:
        """Return the number of clients of a role that have not sent Goodbye."""
        return self._num_of[role]

    def leaves(self, session: ClientSession) -> None:
        """Note that a client sent Goodbye; its connection may still be up."""
        if session.token in self._by_token and session.token not in self._leaving:
            self._leaving.add(session.token)
            self._num_of[session.role] -= 1

    def end(self, key: str) -> list[ClientSession]:
        """Forget all connections with a key; return their sessions."""
        ended = [session for session in self._by_token.values() if session.peer.key == key]
        for session in ended:
            self._forget(session)
        self._by_name.pop(key, None)
        return ended

    def _take_name(self, session: ClientSession, hello: Hello) -> None:
        names = self._by_name.setdefault(session.peer.key, {})
        before = names.get(session.name)
        if not hello.reconnects and (before is None or before.incarnation != hello.incarnation):
            self._wait_for(before, session, hello)
        if before is None:
            if len(names) >= self._max_clients:  # if it is still there it sends a hello again
                self._forget(names.pop(next(iter(names))))
        elif hello.reconnects and before.incarnation != hello.incarnation:
            raise SupersededError(f"another process took the name {hello.name}")
        else:
            self._forget(before)
        names.pop(session.name, None)  # the newest hello is last
        names[session.name] = session

    def _wait_for(self, before: ClientSession | None, session: ClientSession, hello: Hello) -> None:
        """Have a new process wait while another has its name, or may be about to come back.

        Where no one is connected, the first hello is accepted: a role that died is replaced at
        once.

        Raises:
            NameTakenError: it may send its hello again in a moment.
        """
        waiter = (session.name, hello.incarnation)
        other = " or choose another name (--name)" if hello.role in MANY else ""
        if before is not None and before.peer != session.peer and self._is_there(before.peer):
            self._wait(waiter, None)
            raise NameTakenError(f"another process is connected as {hello.name}: end it{other}")
        if before is None and self._may_come_back(session.name, session.holder):
            self._wait(waiter, None)
            raise NameTakenError(f"another process was {hello.name} and may come back")
        if waiter not in self._waiting:
            return
        gone_s = self._waiting[waiter]
        if gone_s is None:
            self._wait(waiter, self._now())
        if gone_s is None or self._now() - gone_s < _COMES_BACK_S:
            raise NameTakenError(f"{hello.name} was connected a moment ago and may come back")
        del self._waiting[waiter]

    def _wait(self, waiter: tuple[str, str], gone_s: float | None) -> None:
        self._waiting[waiter] = gone_s
        if len(self._waiting) > MAX_READERS:
            self._waiting.popitem(last=False)

    def _forget(self, session: ClientSession) -> None:
        if self._by_token.pop(session.token, None) is not None:
            self._num_of[session.role] -= session.token not in self._leaving
            self._leaving.discard(session.token)
        self._readers.pop(session.token, None)
        if self._by_peer.get(session.peer) is session:
            del self._by_peer[session.peer]

    # ---- keys ----------------------------------------------------------------

    def _holder_of(self, key: str, name: str) -> KeyHolder:
        holder = self._key_of(key)
        if holder is None:
            raise ForbiddenError(f"the key of {name} was revoked")
        return holder

    def _check_tokenizer(self, hello: Hello) -> None:
        """Refuse another tokenizer than that of the first role on the broker's own host."""
        if not hello.tokenizer:
            return
        known, first = self._tokenizer or (hello.tokenizer, hello.name)
        if hello.tokenizer != known:
            raise RefusedError(
                f"the tokenizer of {hello.name} ({hello.tokenizer}) is not that of {first} "
                f"({known}): run.model must name the same files for every role"
            )
