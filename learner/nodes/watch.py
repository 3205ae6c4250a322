"""Notices on each node that the learner has ended on another, and ends it here.

Two threads run besides the training thread. The *pulse* exchanges signs of life through node 0's
store, and may be held up by it. The *watch* is never held up: it reads what the pulse has heard,
this node's ranks and the clock, and decides (verdict.py). The training thread may be inside a
collective that never ends: if it does not end by itself, the process is ended around it. The
process's ranks end with it, the relay does not. Keys:

    life/K   counted up by node K        stop/K   node K was asked to end
    done/K   node K has nothing to do    ended    node whose end ends the learner, and why
"""

import logging
import os
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import msgspec

from slipstream.learner.layout import Place
from slipstream.learner.nodes.meeting import LateComers, Meeting
from slipstream.learner.nodes.verdict import Ended, View, ended_by, is_of_collective, verdict_of
from slipstream.learner.stop import StopRequest
from slipstream.weightbus.net import threads
from slipstream.wire.errors import ChildDiedError, PeerLostError
from slipstream.wire.process.patience import Patience

_log = logging.getLogger(__name__)
_PULSE_S = 0.5
_WATCH_S = 0.25
_GRACE_S = 5.0  # time for the training thread to end by itself, with a better reason
_STOP_GRACE_S = 5.0  # time for node 0 to be asked to end, too, after another node was
_SETTLE_S = 1.5  # time for the last signs of life of a node to arrive
_EXPLAIN_S = 3.0  # then, after a failed collective: time for node 0 to find the silent node
_HEAR_S = 10.0  # time for the others to hear it from node 0
_SPREAD_S = 5.0  # time for the other nodes to hear why this one ends; nothing depends on it
_POLL_S = 0.05


@dataclass(slots=True)
class _Heard:
    """News from the pulse for the other threads; values are replaced, never changed."""

    life: Mapping[int, int] = field(default_factory=dict)
    stopping: frozenset[int] = frozenset()
    done: frozenset[int] = frozenset()
    ended: Ended | None = None
    lost: str = ""
    rounds: int = 0  # complete exchanges


class NodeWatch:
    """Watches the other nodes, and reports this one to them, while its block runs.

    An error of the block is reported to them. If a collective failed, the block ends with the
    reason for that instead; or cleanly (``SystemExit``), if node 0 was asked to end.
    """

    def __init__(
        self,
        meeting: Meeting,
        place: Place,
        stop: StopRequest,
        *,
        silence_s: float,
        end_timeout_s: float,
    ) -> None:
        """Prepare.

        Args:
            meeting: meeting of all nodes; the watch now owns its store's client.
            place: this node.
            stop: requests to stop this process.
            silence_s: silence after which a node is gone.
            end_timeout_s: time for the other nodes to end after node 0.
        """
        self._store = meeting.store
        self._address = meeting.address
        self._hosts = meeting.hosts
        self._place = place
        self._node = place.node
        self._others = [node for node in range(place.layout.nodes) if node != place.node]
        self._stop = stop
        self._silence_s = silence_s
        self._end_timeout_s = end_timeout_s
        self._late = LateComers(meeting.store, place, meeting.hosts)
        self._heard = _Heard()
        self._posts: list[tuple[str, str]] = []  # posts for the pulse to write
        self._children: Mapping[int, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()  # decides which thread ends the process
        self._is_handled = False  # the training thread ends the process
        self._is_over = threading.Event()
        self._patience: dict[int, tuple[int, Patience]] = {}  # node: last life, patience since
        self._stopping_since_s: float | None = None
        self._trouble_s: float | None = None  # when a collective failed on this node
        self._before: tuple[float, Mapping[int, int]] | None = None  # signs of life after that

    def ranks_here(self, children: "Mapping[int, subprocess.Popen[bytes]]") -> None:
        """Watch the other ranks of this node, by rank."""
        self._children = children

    def __enter__(self) -> Self:
        """Begin."""
        threads.start(self._pulse)
        threads.start(self._watch)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End together with the other nodes.

        Raises:
            PeerLostError: another node has ended early.
            ChildDiedError: this node has, inside a collective.
            SystemExit: node 0 was asked to end.
        """
        try:
            if error is None:
                self._finish()
                return
            with self._lock:
                self._is_handled = True
            if is_of_collective(error):
                ended = self._explained() or ended_by(self._node, error)
                self._tell(ended)
                self._end_for(self._heard.ended or ended, error)
            self._tell(ended_by(self._node, error))
        finally:
            self._is_over.set()

    # ---- the training thread -------------------------------------------------

    def _finish(self) -> None:
        """Report that this node has nothing more to do; node 0, which holds the store, is last."""
        self._post(f"done/{self._node}", "yes")
        patience = Patience("the other nodes to end", self._end_timeout_s)
        while True:
            may_leave = self._may_leave()  # read first: a node that ends for a reason posts both
            if (ended := self._heard.ended) is not None and ended.node != self._node:
                with self._lock:
                    self._is_handled = True
                self._end_for(ended, None)
            if may_leave:
                break
            if self._heard.lost and self._node != 0:
                break  # node 0 was done before our post arrived, or its watch ends the others
            if patience.is_over():
                late = [self._named(node) for node in self._others if node not in self._heard.done]
                raise PeerLostError(
                    f"{', '.join(late)} did not end within {self._end_timeout_s:g} s after "
                    "node 0 (learner.timeout_s)"
                )
            time.sleep(_POLL_S)
        with self._lock:
            self._is_handled = True

    def _may_leave(self) -> bool:
        done = self._heard.done
        if self._node != 0:
            return self._node in done
        return done.issuperset(self._others)

    def _explained(self) -> Ended | None:
        """Wait for the end that made a collective fail here; None if it stays unknown.

        Node 0 takes a node for gone if it gives no sign of life from now on. The other nodes wait
        longer, for node 0's finding.
        """
        self._note_trouble()
        wait_s = _SETTLE_S + _EXPLAIN_S + _PULSE_S if self._node == 0 else _HEAR_S
        end_s = time.monotonic() + wait_s
        while time.monotonic() < end_s:
            if (ended := self._seen()) is not None:
                return ended
            time.sleep(_POLL_S)
        return None

    def _note_trouble(self) -> None:
        if self._trouble_s is None:
            self._trouble_s = time.monotonic()

    def _tell(self, ended: Ended) -> None:
        """Tell the other nodes why this one ends; the first such report stays."""
        self._post("ended", msgspec.json.encode(ended).decode())
        end_s = time.monotonic() + _SPREAD_S
        while time.monotonic() < end_s and not self._heard.lost:
            heard = self._heard
            if heard.ended is not None and (self._node != 0 or heard.done.issuperset(self._others)):
                return
            time.sleep(_POLL_S)

    def _end_for(self, ended: Ended, error: BaseException | None) -> None:
        line = ended.line(self._place.layout, self._hosts)
        if ended.exit_code(self._node, asked_to_stop=self._stop.arrived > 0) == 0:
            _log.info("%s", line)
            raise SystemExit(0) from error
        if ended.node == self._node:
            raise ChildDiedError(line) from error
        raise PeerLostError(line) from error

    # ---- the watch -----------------------------------------------------------

    def _watch(self) -> None:
        while not self._is_over.wait(_WATCH_S):
            if self._stop.arrived and self._node != 0:
                self._post(f"stop/{self._node}", "yes")
            if self._stop.arrived > 1 and self._node != 0:
                self._force(Ended(node=self._node, text="it was asked to end twice", orderly=True))
            ended = self._seen()
            if ended is not None:
                by_itself = ended.node != self._node or not self._stop.arrived
                self._force(ended, grace_s=_GRACE_S if by_itself else 0.0)

    def _seen(self) -> Ended | None:
        heard = self._heard
        dead = {r: code for r, child in self._children.items() if (code := child.poll())}
        if dead:
            self._note_trouble()
        trouble_s = time.monotonic() - self._trouble_s if self._trouble_s is not None else 0.0
        if trouble_s > _SETTLE_S and self._before is None:
            self._before = time.monotonic(), heard.life
        return verdict_of(
            View(
                node=self._node,
                ended=heard.ended,
                lost=heard.lost and f"its store at {self._address} is gone: {heard.lost}",
                silent=self._silence_of_node_0(heard) if self._node else "",
                silent_nodes={} if self._node else self._silent_nodes(heard),
                dead_ranks=dead,
                is_unexplained=trouble_s > _HEAR_S,
                stopping=heard.stopping,
                stop_is_ours=self._may_be_ours(heard),
            )
        )

    def _may_be_ours(self, heard: _Heard) -> bool:
        """Return True while a stop of other nodes may be a stop of the whole learner."""
        if not heard.stopping or self._stop.arrived:
            return True
        if self._stopping_since_s is None:
            self._stopping_since_s = time.monotonic()
        return time.monotonic() - self._stopping_since_s < _STOP_GRACE_S

    def _silence_of_node_0(self, heard: _Heard) -> str:
        return self._silence(0, heard.rounds)

    def _silent_nodes(self, heard: _Heard) -> dict[int, str]:
        nodes = [node for node in self._others if node not in heard.done]
        found = {node: self._silence(node, heard.life.get(node, 0)) for node in nodes}
        since_s, before = self._before or (time.monotonic(), {})
        if time.monotonic() - since_s > _EXPLAIN_S:
            for node in nodes:
                if heard.life.get(node, 0) == before.get(node, 0):
                    found[node] = f"a collective failed and no sign of life for {_EXPLAIN_S:g} s"
        return {node: text for node, text in found.items() if text}

    def _silence(self, node: int, life: int) -> str:
        """Return why a node counts as gone, by its count of signs of life; empty if not gone."""
        count, patience = self._patience.get(node, (-1, None))
        if patience is None or count != life:
            what = f"a sign of life of {self._named(node)}"
            self._patience[node] = (life, Patience(what, self._silence_s))
            return ""
        if not patience.is_over():
            return ""
        return f"it gave no sign of life for {self._silence_s:g} s (learner.node_silence_s)"

    def _force(self, ended: Ended, *, grace_s: float = 0.0) -> None:
        """End this process, if the training thread does not end it within the grace."""
        if self._heard.ended is None:
            self._post("ended", msgspec.json.encode(ended).decode())
        end_s = time.monotonic() + grace_s
        while time.monotonic() < end_s:
            if self._is_handled or self._is_over.wait(_POLL_S):
                return
        with self._lock:
            if self._is_handled or self._is_over.is_set():
                return
            self._tell(ended)
            ended = self._heard.ended or ended
            code = ended.exit_code(self._node, asked_to_stop=self._stop.arrived > 0)
            line = ended.line(self._place.layout, self._hosts)
            _log.log(logging.ERROR if code else logging.INFO, "%s", line)
            logging.shutdown()
            os._exit(code)

    # ---- the pulse -----------------------------------------------------------

    def _post(self, key: str, value: str) -> None:
        if (key, value) not in self._posts:
            self._posts.append((key, value))

    def _pulse(self) -> None:
        posted = 0
        while True:
            try:
                for key, value in self._posts[posted:]:
                    if key == "ended":
                        self._store.compare_set(key, "", value)
                    else:
                        self._store.set(key, value)
                    posted += 1
                self._exchange()
            except RuntimeError as error:  # torch: the connection is closed
                self._heard.lost = self._heard.lost or str(error).partition("\n")[0]
                return
            if self._is_over.wait(0.0 if len(self._posts) > posted else _PULSE_S):
                return

    def _exchange(self) -> None:
        """Give a sign of life and read the other nodes' posts."""
        heard, store = self._heard, self._store
        store.add(f"life/{self._node}", 1)
        nodes = range(self._place.layout.nodes)
        heard.life = {node: int(store.add(f"life/{node}", 0)) for node in nodes}
        heard.stopping = frozenset(node for node in nodes if store.check([f"stop/{node}"]))
        done = frozenset(node for node in nodes if store.check([f"done/{node}"]))
        if heard.ended is None and store.check(["ended"]):  # last: it may explain the rest
            heard.ended = msgspec.json.decode(store.get("ended"), type=Ended)
            self._post(f"done/{self._node}", "yes")  # node 0 need not wait for us
        heard.done = done
        if self._node == 0:
            self._late.look(heard.life)
        heard.rounds += 1

    def _named(self, node: int) -> str:
        return self._place.layout.named(node, self._hosts.get(node, ""))
