"""Who is on the other side of each connection."""

from collections import OrderedDict
from dataclasses import dataclass

from wire.control import WIRE_REVISION, Hello, Role
from wire.errors import RefusedError, SupersededError

MAX_OBSERVERS = 64


@dataclass(frozen=True, slots=True)
class Session:
    """One process that said hello."""

    name: str
    incarnation: str
    peer: bytes
    role: Role

    @property
    def holder(self) -> str:
        """Return the name under which it holds leases."""
        return holder_of(self.name, self.incarnation)


def holder_of(name: str, incarnation: str) -> str:
    """Return what leases of one incarnation of a role are held under."""
    return f"{name}@{incarnation}" if incarnation else name


def name_of(holder: str) -> str:
    """Return the role of a holder."""
    return holder.partition("@")[0]


class Sessions:
    """Connections by routing id. A routing id says nothing until its owner has said hello."""

    def __init__(self) -> None:
        self._by_peer: dict[bytes, Session] = {}
        self._by_name: dict[str, Session] = {}
        self._observers: OrderedDict[bytes, None] = OrderedDict()  # they leave without a word
        self._tokenizer: tuple[str, str] | None = None  # hash, and who said it first

    def find(self, peer: bytes) -> Session | None:
        """Return who speaks on a connection."""
        return self._by_peer.get(peer)

    def is_current(self, session: Session) -> bool:
        """Tell whether nobody has said hello under this name since."""
        return self._by_peer.get(session.peer) is session

    def hello(self, peer: bytes, hello: Hello) -> Session:
        """Take note of a connection.

        Raises:
            RefusedError: it does not fit to the others.
            SupersededError: a newer process has this name.
        """
        if hello.wire_revision != WIRE_REVISION:
            raise RefusedError(
                f"{hello.name} speaks wire revision {hello.wire_revision}, "
                f"this broker {WIRE_REVISION}: install the same version on both sides"
            )
        self._check_tokenizer(hello)
        session = Session(hello.name, hello.incarnation, peer, hello.role)
        if hello.role == "observer":
            self._observers[peer] = None
            if len(self._observers) > MAX_OBSERVERS:
                gone, _ = self._observers.popitem(last=False)
                self._by_peer.pop(gone, None)
        else:
            before = self._by_name.get(hello.name)
            if before is not None:
                if hello.reconnects and before.incarnation != hello.incarnation:
                    raise SupersededError(f"another process has said hello as {hello.name}")
                self._by_peer.pop(before.peer, None)
            self._by_name[hello.name] = session
        self._by_peer[peer] = session
        return session

    def _check_tokenizer(self, hello: Hello) -> None:
        if not hello.tokenizer:
            return
        known, first = self._tokenizer or (hello.tokenizer, hello.name)
        if hello.tokenizer != known:
            raise RefusedError(
                f"the tokenizer of {hello.name} ({hello.tokenizer}) is not that of {first} "
                f"({known}): run.model must name the same files for every role"
            )
        self._tokenizer = (known, first)
