"""The start of a learner on several nodes: they meet at node 0, which admits or refuses each.

Node 0 holds the store. Every other node writes its card there and waits for an answer. Node 0
compares the card with its own, shows a file in the run folder, which the node must see, and lets
all nodes begin together. No collective begins before that. Keys, with N counted up from 1:

    arrivals     number of processes that came
    card/N       card of the Nth process                 by that process
    beat/N       counted up while it waits               by that process
    answer/N     admission, or the reason against it     by node 0
    report/N     that it sees the file, or why not       by that process
    gone/N       it was asked to end                     by that process
    begin        hosts of all nodes; every one is there  by node 0
    failed       why there will be no begin              by node 0
"""

import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # not in torch's stubs

from slipstream.learner.layout import Place
from slipstream.learner.nodes.card import Card
from slipstream.learner.nodes.store import StoreLostError, asked, connect
from slipstream.learner.nodes.verdict import Ended, ended_by
from slipstream.wire.errors import ConfigError, NameTakenError, PeerLostError
from slipstream.wire.process.cards import difference
from slipstream.wire.process.patience import Patience
from slipstream.wire.process.safe_text import one_line
from slipstream.wire.settings.rendezvous import Address

_log = logging.getLogger(__name__)
_POLL_S = 0.2
_GONE_S = 30.0  # silence after which a waiting process is gone, and another may be this node
_SEEN_S = 10.0  # time for node 0's file to appear on another node: file systems cache names
_LAST_WORD_S = 5.0  # time for the others to read why node 0 ends; nothing depends on it
_MOST_TEXT = 2_000
_SETTING = "learner.rendezvous_timeout_s"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Node 0's answer to a process that came as a node."""

    error: str = ""
    is_taken: bool = False  # another process is this node
    file: str = ""  # file that the node must see, and its content
    content: str = ""


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """Signal to begin: each node's host, and the number under which it came."""

    hosts: dict[int, str]
    numbers: dict[int, int]


class Arrival:
    """A process that came as a node, as seen by node 0."""

    def __init__(self, number: int, card: Card, beat: int) -> None:
        self.number = number
        self.card = card
        self._beat = beat
        self._patience = Patience("", _GONE_S, log=lambda _line: None)
        self.seen_by_double = 0  # beat at the time a second process came as the same node

    def is_silent(self, beat: int) -> bool:
        """Return True if it has not counted for so long that it is gone; ``beat`` is its count."""
        if beat != self._beat:
            self._beat, self._patience = beat, Patience("", _GONE_S, log=lambda _line: None)
        return self._patience.is_over()


@dataclass(frozen=True, slots=True)
class Meeting:
    """Result of a complete meeting: the store's client, and each node's host."""

    store: TCPStore
    address: Address
    hosts: Mapping[int, str]


def card_of(place: Place, facts: dict[str, str]) -> Card:
    """Return this process's card."""
    return Card(node=place.node, host=socket.gethostname(), pid=os.getpid(), facts=facts)


# ---- node 0 --------------------------------------------------------------------


@dataclass(slots=True)
class Host:
    """Node 0's side: admits the other nodes. It alone writes answers."""

    store: Store
    place: Place
    card: Card
    file: Path
    content: str
    admitted: dict[int, Arrival] = field(default_factory=dict)
    waiting: list[Arrival] = field(default_factory=list)  # arrivals as a node that is there already
    doubles: list[str] = field(default_factory=list)  # nodes that two processes came as
    num_seen: int = 0

    def look(self) -> None:
        """Answer new arrivals.

        Raises:
            ConfigError: a node cannot train with this one, or does not see the run folder.
        """
        for number in range(self.num_seen + 1, _count(self.store, "arrivals") + 1):
            if not self.store.check([f"card/{number}"]):
                break
            self.num_seen = number
            card = _card(self.store, number)
            if card is not None:
                self._receive(Arrival(number, card, self._beat(number)))
        for node, arrival in list(self.admitted.items()):
            is_gone = self.store.check([f"gone/{arrival.number}"])
            if is_gone or arrival.is_silent(self._beat(arrival.number)):
                why = "was asked to end" if is_gone else f"gave no sign of life for {_GONE_S:g} s"
                _log.warning("%s %s: another is waited for", self.named(arrival.card), why)
                del self.admitted[node]
        for arrival in list(self.waiting):
            first = self.admitted.get(arrival.card.node)
            if first is None:
                self.waiting.remove(arrival)
                self._admit(arrival)
            elif self._beat(first.number) > first.seen_by_double + 1:  # both are alive
                self.waiting.remove(arrival)
                self._refuse_double(arrival, first)
        for arrival in self.admitted.values():
            if error := self._report(arrival.number):
                raise ConfigError(error)

    def missing(self) -> list[int]:
        """Return the nodes that have not come, or have not yet reported that they see the file."""
        return [
            node
            for node in range(1, self.place.layout.nodes)
            if node not in self.admitted
            or not self.store.check([f"report/{self.admitted[node].number}"])
        ]

    def named(self, card: Card) -> str:
        """Return an arrival's name in logs."""
        host, ours = one_line(card.host, most=100), self.place.layout
        if not 0 <= card.node < ours.nodes:
            return f"node {card.node} (host {host})"
        return ours.named(card.node, host)

    def _receive(self, arrival: Arrival) -> None:
        card = arrival.card
        if why := difference(self.card.facts, card.facts):
            error = (
                f"{self.named(card)} cannot train with node 0 (host {self.card.host}) at "
                f"{self.place.address}: {one_line(why, most=_MOST_TEXT)}"
            )
            self._answer(arrival, Answer(error=error))
            raise ConfigError(error)
        if not 0 < card.node < self.place.layout.nodes:
            first: Arrival | None = Arrival(0, self.card, 0)
        else:
            first = self.admitted.get(card.node)
        if first is None:
            self._admit(arrival)
        elif first.number == 0:
            self._refuse_double(arrival, first)
        else:
            first.seen_by_double = self._beat(first.number)
            self.waiting.append(arrival)

    def _admit(self, arrival: Arrival) -> None:
        self.admitted[arrival.card.node] = arrival
        self._answer(arrival, Answer(file=str(self.file), content=self.content))
        _log.info("%s is there", self.named(arrival.card))

    def _refuse_double(self, arrival: Arrival, first: Arrival) -> None:
        card = arrival.card
        error = (
            f"two processes came as {self.named(first.card)} to {self.place.address}: process "
            f"{first.card.pid} on host {one_line(first.card.host, most=100)} and process "
            f"{card.pid} on host {one_line(card.host, most=100)}, which is refused: give each "
            "host a number of its own (--node)"
        )
        _log.warning("%s", error)
        self.doubles.append(error)
        self._answer(arrival, Answer(error=error, is_taken=True))

    def _answer(self, arrival: Arrival, answer: Answer) -> None:
        self.store.set(f"answer/{arrival.number}", msgspec.json.encode(answer).decode())

    def _beat(self, number: int) -> int:
        return _count(self.store, f"beat/{number}")

    def _report(self, number: int) -> str:
        key = f"report/{number}"
        if not self.store.check([key]):
            return ""
        return one_line(self.store.get(key).decode(errors="replace"), most=_MOST_TEXT)


class LateComers:
    """Node 0's answers to processes that come as a node after all nodes have begun.

    A process that comes while its node is alive is refused. If its node has just died, it is left
    to wait: it finds the next node 0.
    """

    def __init__(self, store: Store, place: Place, hosts: Mapping[int, str]) -> None:
        self._store = store
        self._place = place
        self._hosts = hosts
        self._num_answered = 0
        self._waiting: dict[int, tuple[Card, int]] = {}  # number: card, node's life then

    def look(self, life: Mapping[int, int]) -> None:
        """Answer new arrivals; ``life`` counts the signs of life of each node."""
        store = self._store
        for number in range(self._num_answered + 1, _count(store, "arrivals") + 1):
            if not store.check([f"card/{number}"]):
                break
            self._num_answered = number
            if not store.check([f"answer/{number}"]):
                card = _card(store, number)
                if card is not None:
                    self._waiting[number] = card, life.get(card.node, 0)
        for number, (card, before) in list(self._waiting.items()):
            if life.get(card.node, before) <= before + 1 and card.node in life:
                continue
            del self._waiting[number]
            first = self._place.layout.named(card.node, self._hosts.get(card.node, ""))
            error = (
                f"{first} trains with node 0 at {self._place.address} already: process {card.pid} "
                f"on host {one_line(card.host, most=100)}, which came as the same node, is refused "
                "(--node)"
            )
            _log.warning("%s", error)
            answer = Answer(error=error, is_taken=True)
            store.set(f"answer/{number}", msgspec.json.encode(answer).decode())


def host_nodes(
    store: TCPStore, place: Place, card: Card, run_folder: Path, *, timeout_s: float
) -> dict[int, str]:
    """Wait on node 0 until every node is there, and let all begin; return their hosts.

    Raises:
        ConfigError: a node cannot train with this one, or does not see the run folder.
        PeerLostError: a node did not come in time.
    """
    with _shown_file(run_folder) as (file, content), _last_word(store):
        host = Host(store, place, card, file, content)

        def log(line: str) -> None:
            missing = ", ".join(place.layout.named(node) for node in host.missing())
            _log.info("%s; missing: %s", line, missing)

        patience = Patience(f"the other nodes at {place.address}", timeout_s, log=log)
        while True:
            host.look()
            missing = host.missing()
            if not missing:
                break
            if patience.is_over():
                raise PeerLostError(_missing_line(place, missing, host.doubles, timeout_s))
            time.sleep(_POLL_S)
        hosts = {0: card.host} | {n: arrival.card.host for n, arrival in host.admitted.items()}
        numbers = {node: arrival.number for node, arrival in host.admitted.items()}
        begin = Begin(hosts=hosts, numbers=numbers)
        store.set("begin", msgspec.json.encode(begin).decode())
        return hosts


def _missing_line(place: Place, missing: list[int], doubles: list[str], timeout_s: float) -> str:
    nodes = ", ".join(place.layout.named(node) for node in missing)
    verb = "do" if len(missing) > 1 else "does"
    advice = doubles[-1] if doubles else "start it with --node and the same --rendezvous"
    return (
        f"{nodes} {verb} not come to node 0 at {place.address} within {timeout_s:g} s "
        f"({_SETTING}); {advice}"
    )


@contextmanager
def _shown_file(run_folder: Path) -> Iterator[tuple[Path, str]]:
    """Write a file that the other nodes must see, under a name never looked up before."""
    run_folder.mkdir(parents=True, exist_ok=True)
    content = secrets.token_hex(16)
    file = run_folder.resolve() / f".nodes-{content}"
    file.write_text(content)
    try:
        yield file, content
    finally:
        file.unlink(missing_ok=True)


@contextmanager
def _last_word(store: TCPStore) -> Iterator[None]:
    """Tell waiting nodes why node 0 ends before they begin, and let them read it."""
    try:
        yield
    except BaseException as error:
        store.set("failed", msgspec.json.encode(ended_by(0, error)).decode())
        end_s = time.monotonic() + _LAST_WORD_S
        while _count(store, "read") < _count(store, "arrivals") and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        raise


# ---- the other nodes -----------------------------------------------------------


def join_nodes(place: Place, card: Card, *, timeout_s: float, key_timeout_s: float) -> Meeting:
    """Join node 0, once it is there, and wait until all nodes may begin.

    If node 0 is lost before that, it is waited for again: it may be restarted.

    Raises:
        ConfigError: node 0 refuses this node, or this one does not see the run folder.
        NameTakenError: another process came as this node.
        PeerLostError: node 0 is not there in time, or has given up.
    """
    address = place.address
    if address is None:
        raise ConfigError("--rendezvous is not set")
    patience = Patience(f"node 0 at {address}", timeout_s)
    while True:
        try:
            store = connect(address, timeout_s=key_timeout_s)
            hosts = _Guest(store, place, card, patience).wait()
        except StoreLostError as error:
            if patience.is_over():
                raise PeerLostError(
                    f"{place.layout.named(place.node, card.host)} does not reach node 0 at "
                    f"{address} (--rendezvous) within {timeout_s:g} s ({_SETTING}): {error}"
                ) from error
            time.sleep(_POLL_S)
        else:
            return Meeting(store, address, hosts)


class _Guest:
    """One visit to node 0."""

    def __init__(self, store: TCPStore, place: Place, card: Card, patience: Patience) -> None:
        self._store = store
        self._place = place
        self._card = card
        self._patience = patience
        self._number = asked(lambda: store.add("arrivals", 1))
        self._own = place.layout.named(place.node, card.host)

    def wait(self) -> dict[int, str]:
        """Return the hosts of all nodes once they may begin."""
        store, number = self._store, self._number
        card = msgspec.json.encode(self._card).decode()
        asked(lambda: store.set(f"card/{number}", card))
        try:
            return self._welcomed()
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"what listens at {self._place.address} (--rendezvous) answers {self._own} in "
                f"another language: install the same version on every node ({error})"
            ) from error
        except SystemExit:
            with suppress(StoreLostError):
                asked(lambda: store.set(f"gone/{number}", "yes"))
            raise

    def _welcomed(self) -> dict[int, str]:
        store, number = self._store, self._number
        answer = msgspec.json.decode(self._awaited(f"answer/{number}"), type=Answer)
        if answer.error:
            self._leave()
            error = one_line(answer.error, most=2 * _MOST_TEXT)
            raise NameTakenError(error) if answer.is_taken else ConfigError(error)
        report = self._look_for(Path(answer.file), answer.content)
        asked(lambda: store.set(f"report/{number}", report))
        if report:
            self._leave()
            raise ConfigError(report)
        begin = msgspec.json.decode(self._awaited("begin"), type=Begin)
        if begin.numbers.get(self._place.node) != number:
            raise NameTakenError(
                f"another process took the place of {self._own}, which gave no sign of life to "
                f"node 0 at {self._place.address}"
            )
        return begin.hosts

    def _awaited(self, key: str) -> bytes:
        store = self._store
        while True:
            asked(lambda: store.add(f"beat/{self._number}", 1))
            has_failed = asked(lambda: store.check(["failed"]))  # written after node 0's answers
            if asked(lambda: store.check([key])):
                value: bytes = asked(lambda: store.get(key))
                return value
            if has_failed:
                ended = msgspec.json.decode(asked(lambda: store.get("failed")), type=Ended)
                self._leave()
                why = (
                    f"node 0 at {self._place.address} ended before {self._own} could begin: "
                    f"{one_line(ended.text, most=_MOST_TEXT)}"
                )
                if ended.orderly:
                    _log.info("%s", why)
                    raise SystemExit(0)
                raise PeerLostError(why)
            if self._patience.is_over():
                raise PeerLostError(
                    f"node 0 at {self._place.address} did not let {self._own} begin: it "
                    f"{self._patience.why} ({_SETTING})"
                )
            time.sleep(_POLL_S)

    def _look_for(self, file: Path, content: str) -> str:
        """Return why this node does not see node 0's file in the run folder; empty if it does."""
        patience = Patience(f"{file.parent} to show what node 0 wrote", _SEEN_S)
        while True:
            why = "it is not there"
            try:
                if file.read_text() == content:
                    return ""
                why = "it holds something else"
            except FileNotFoundError:
                pass
            except OSError as error:
                why = error.strerror or str(error)
            if patience.is_over():
                return (
                    f"{self._own} does not see the file {file.name} that node 0 at "
                    f"{self._place.address} wrote into {file.parent}: {why}; run.dir must be on a "
                    "file system that all nodes share, at the same path"
                )
            asked(lambda: self._store.add(f"beat/{self._number}", 1))
            time.sleep(_POLL_S)

    def _leave(self) -> None:
        with suppress(StoreLostError):
            asked(lambda: self._store.add("read", 1))


def _card(store: Store, number: int) -> Card | None:
    """Return the card of an arrival; None if it is invalid."""
    try:
        return msgspec.json.decode(store.get(f"card/{number}"), type=Card)
    except msgspec.MsgspecError as error:
        _log.warning("what came as a node speaks another language and is left alone: %s", error)
        return None


def _count(store: Store, key: str) -> int:
    return int(store.add(key, 0))
