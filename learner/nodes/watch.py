"""Meets the other hosts of a learner, notices that one of them has ended, and ends this one.

A thread with an event loop keeps up the link and is never held up: it reads what the link has
heard, this node's ranks and the clock, and decides (weightbus/hosts/verdict.py). The training
thread may be inside a collective that never ends: if it does not end by itself, the process is
ended around it. The process's ranks end with it, the relay does not.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Set
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import NoReturn, Self

from slipstream.learner.collective_errors import is_of_collective
from slipstream.learner.config import LearnerSettings
from slipstream.learner.layout import Place
from slipstream.learner.nodes.membership import (
    is_listened_at,
    key_file,
    membership_of,
    new_key,
    newest_key,
    shown_key,
)
from slipstream.learner.stop import StopRequest
from slipstream.weightbus.hosts.follower import HostFollower, following
from slipstream.weightbus.hosts.leader import HostLeader, leading
from slipstream.weightbus.hosts.membership import MOST_TEXT, Membership
from slipstream.weightbus.hosts.verdict import SETTLE_S, HostEnd, HostView, ended_by, verdict_of
from slipstream.weightbus.net.threads import in_own_thread
from slipstream.wire.errors import ChildDiedError, ConfigError, PeerLostError
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.files.run_folder import HOSTS_KEY
from slipstream.wire.process.background import BackgroundLoop
from slipstream.wire.process.patience import Patience
from slipstream.wire.process.run_until import running, unless
from slipstream.wire.process.safe_text import one_line
from slipstream.wire.settings.rendezvous import Address

_log = logging.getLogger(__name__)
EXIT_COLLECTIVE = 4  # exit code after a failed collective: another rank is the reason
_CAUSED = (EXIT_COLLECTIVE, -signal.SIGABRT)  # NCCL's watchdog aborts
_WATCH_S = 0.25
_GRACE_S = 5.0  # time for the training thread to end by itself, with a better reason
_STOP_GRACE_S = 5.0  # time for node 0 to be asked to end, too, after another node was
_HEAR_S = 10.0  # after a failed collective: time to hear the reason
# Time for node 0's file to appear on another node: NFS caches names for up to 60 s. Half of the
# time in which the nodes meet, within these limits.
_SEEN_S = (10.0, 90.0)
_POLL_S = 0.05
_POLL_KEY_S = 1.0


def end_of_ranks(codes: Mapping[int, int]) -> tuple[str, bool]:
    """Return why ranks of a node ended, by exit code, and whether another node is the cause."""
    for rank, code in sorted(codes.items(), key=lambda item: (item[1] in _CAUSED, item[0])):
        return f"its rank {rank} ended with code {code}", code in _CAUSED
    return "", False


class NodeWatch:
    """Meets the other nodes, watches them, and reports this one to them, while its block runs.

    An error of the block is reported to them. If a collective failed, the block ends with the
    reason for that instead; or cleanly (``SystemExit``), if node 0 was asked to end.
    """

    def __init__(
        self, settings: LearnerSettings, place: Place, facts: Mapping[str, str], stop: StopRequest
    ) -> None:
        """Prepare.

        Args:
            settings: Settings of the learner.
            place: This node.
            facts: Facts that every node must have in common.
            stop: Requests to stop this process.
        """
        self._settings = settings
        self._place = place
        self._node = place.node
        self._facts = facts
        self._stop = stop
        self._file = key_file(settings)
        self._end_timeout_s = settings.learner.timeout_s
        self._link: HostLeader | HostFollower | None = None
        self._store: tuple[Address, socket.socket | None] | None = (
            None  # meeting point of the ranks
        )
        self._found: HostEnd | None = None  # verdict on this node's end
        self._own: HostEnd | None = None  # end of this node, for the others
        self._children: Mapping[int, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()  # decides which thread ends the process
        self._is_handled = False  # the training thread ends the process
        self._stopping_since_s: float | None = None
        self._trouble_s: float | None = None  # when something failed on this node
        self._loop = BackgroundLoop()
        self._cleanup = ExitStack()

    def ranks_here(self, children: "Mapping[int, subprocess.Popen[bytes]]") -> None:
        """Watch the other ranks of this node, by rank."""
        self._children = children

    def __enter__(self) -> Self:
        """Begin to meet the others."""
        self._cleanup.enter_context(self._loop)
        self._loop.start(self._run())
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
        with self._cleanup:
            if error is None:
                self._finish()
                return
            with self._lock:
                self._is_handled = True
            end = ended_by(self._node, error)
            self._own = self._explained() or end if is_of_collective(error) else end
            if is_of_collective(error):
                self._end_for(self._own, error)

    # ---- the training thread -------------------------------------------------

    def meet(self) -> tuple[Address, socket.socket | None]:
        """Wait until all nodes begin; return where their ranks meet, on node 0 with its listener.

        Raises:
            ConfigError: the nodes cannot train together, or this one does not see the run folder.
            NameTakenError: another process is this node.
            PeerLostError: a node did not come in time, or has ended.
        """
        while self._store is None:
            self._loop.check()
            if self._found is not None:
                self._end_for(self._found, None)
            time.sleep(_POLL_S)
        return self._store

    def _finish(self) -> None:
        """Report that this node has nothing more to do; node 0, which holds the store, is last."""
        link = self._link
        if isinstance(link, HostFollower):
            self._loop.run(link.report("done"))
        patience = Patience("the other nodes to end", self._end_timeout_s)
        while not self._may_leave():
            self._loop.check()
            if (found := self._found) is not None:
                with self._lock:
                    self._is_handled = True
                self._own = found
                self._end_for(found, None)
            if patience.is_over():
                self._own = HostEnd(self._node, "it waited too long for the end of others")
                nodes = link.book.not_in("done") if isinstance(link, HostLeader) else [0]
                late = ", ".join(map(self._named, nodes))
                raise PeerLostError(
                    f"{late} did not end within {self._end_timeout_s:g} s after "
                    f"node {self._node} (learner.timeout_s)"
                )
            time.sleep(_POLL_S)
        with self._lock:
            self._is_handled = True
        self._own = HostEnd(self._node, "", is_orderly=True)

    def _may_leave(self) -> bool:
        link = self._link
        if isinstance(link, HostLeader):
            return not link.book.not_in("done")
        return link is not None and link.end is not None and not link.end.text

    def _explained(self) -> HostEnd | None:
        """Wait for the end that made a collective fail here; None if it stays unknown."""
        self._note_trouble()
        end_s = time.monotonic() + _HEAR_S
        while self._found is None and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        return self._found

    def _note_trouble(self) -> None:
        if self._trouble_s is None:
            self._trouble_s = time.monotonic()

    def _end_for(self, end: HostEnd, error: BaseException | None) -> NoReturn:
        line = self._line(end)
        if end.exit_code(self._node, asked_to_stop=self._stop.arrived > 0) == 0:
            _log.info("%s", line)
            raise SystemExit(0) from error
        if end.node == self._node:
            raise ChildDiedError(line) from error
        raise PeerLostError(line) from error

    def _named(self, node: int) -> str:
        if self._link is None:
            return self._place.layout.named(node, socket.gethostname())
        return self._link.named(node)

    def _line(self, end: HostEnd) -> str:
        return f"{self._named(end.node)} ended: {one_line(end.text, most=MOST_TEXT)}"

    # ---- the link ------------------------------------------------------------

    async def _run(self) -> None:
        """Keep up the link until cancelled; or end this process around its training."""
        await (self._follow() if self._node else self._lead())
        end = self._own or HostEnd(self._node, "for no known reason")
        code = end.exit_code(self._node, asked_to_stop=self._stop.arrived > 0)
        _log.log(logging.ERROR if code else logging.INFO, "%s", self._line(end))
        logging.shutdown()
        os._exit(code)

    async def _lead(self) -> None:
        key = new_key()
        leader = self._link = HostLeader(self._membership(key))

        async with leading(leader, lambda: self._own or ended_by(0, sys.exception())):
            others = self._place.layout.nodes - 1
            _log.info("node 0 listens at %s for %d more", self._place.address, others)
            with shown_key(self._file, key):
                await leader.until_all_are_there()
                self._store = await leader.start_all()
                await self._watch(leader)

    async def _follow(self) -> None:
        limit_s = self._settings.learner.rendezvous_timeout_s
        patience = Patience(f"node 0 at {self._place.address}", limit_s)
        while not await self._visit(await self._seen_key(patience), patience):
            pass

    async def _visit(self, key: ClientKey, patience: Patience) -> bool:
        """Follow node 0 to the end; return False if it is lost before all nodes begin.

        It may be restarted then.
        """
        follower = self._link = HostFollower(self._membership(key))
        async with following(follower, lambda: self._own or ended_by(self._node, None)) as linking:
            try:
                async with running(self._until_key_changes(key)) as (changing,):
                    start = await unless(follower.until_started(patience), linking, changing)
            except PeerLostError:
                if patience.is_over():
                    raise
                return False
            if start is not None:
                await follower.report("running")
                self._store = Address(start.host, start.port), None
            elif follower.end is None:
                return False
            await self._watch(follower)
        return True

    def _membership(self, key: ClientKey) -> Membership:
        return membership_of(self._settings, self._place, self._facts, key)

    async def _seen_key(self, patience: Patience) -> ClientKey:
        """Return the key of node 0 once it is in the run folder.

        Raises:
            ConfigError: node 0 listens and its key does not appear, or it is not a key.
            PeerLostError: no node 0 came in time.
        """
        file, address, own = self._file, self._place.address, self._named(self._node)
        lacks = (
            f"the file {HOSTS_KEY} that node 0 at {address} writes into {file.parents[1]}: it is "
            "not there; run.dir must be on a file system that all nodes share, at the same path"
        )
        limit_s = self._settings.learner.rendezvous_timeout_s
        enough_s = min(max(_SEEN_S[0], limit_s / 2), _SEEN_S[1])
        since_s: float | None = None  # time from which something listened there
        while (key := await in_own_thread(lambda: newest_key(file))) is None:
            is_there = await in_own_thread(lambda: is_listened_at(address))
            since_s = (since_s or time.monotonic()) if is_there else None
            if since_s is not None and time.monotonic() - since_s > enough_s:
                raise ConfigError(f"{own} does not see {lacks}")
            if patience.is_over():
                why = f"something listens, without {lacks}" if is_there else "nobody listens there"
                raise PeerLostError(
                    f"{own} does not reach node 0 at {address} (--rendezvous) within {limit_s:g} s "
                    f"(learner.rendezvous_timeout_s): {why}"
                )
            await asyncio.sleep(_WATCH_S)
        return key

    async def _until_key_changes(self, key: ClientKey) -> None:
        while await in_own_thread(lambda: newest_key(self._file)) in {None, key}:  # noqa: ASYNC110 a file
            await asyncio.sleep(_POLL_KEY_S)

    # ---- the watch -----------------------------------------------------------

    async def _watch(self, link: HostLeader | HostFollower) -> None:
        """Return once this process has to end around its training, which does not end by itself."""
        while True:
            arrived = self._stop.arrived
            self._found = self._found or verdict_of(self._view(link))
            if isinstance(link, HostFollower) and arrived:
                if link.state == "running":
                    await link.report("stopping")
                if arrived > 1:
                    self._found = HostEnd(self._node, "it was asked to end twice", is_orderly=True)
            if self._found is not None:
                await link.tell(self._found)
                by_itself = self._found.node != self._node or not arrived
                await asyncio.sleep(_GRACE_S if by_itself else 0.0)
                self._lock.acquire()  # the training thread does not get it any more
                if not self._is_handled:
                    self._own = self._found
                    return
                self._lock.release()
            await asyncio.sleep(_WATCH_S)

    def _view(self, link: HostLeader | HostFollower) -> HostView:
        view = link.view("a collective failed")
        codes = {rank: code for rank, child in self._children.items() if (code := child.poll())}
        own, own_is_caused = end_of_ranks(codes)
        if own or view.reported:
            self._note_trouble()
        since_s = time.monotonic() - self._trouble_s if self._trouble_s is not None else 0.0
        return replace(
            view,
            own=own,
            own_is_caused=own_is_caused,
            silent=view.silent if since_s > SETTLE_S else {},
            stop_is_ours=self._may_be_ours(view.stopping),
            is_final=since_s > _HEAR_S,
        )

    def _may_be_ours(self, stopping: Set[int]) -> bool:
        """Return True while a stop of other nodes may be a stop of the whole learner."""
        if not stopping or self._stop.arrived:
            return True
        if self._stopping_since_s is None:
            self._stopping_since_s = time.monotonic()
        return time.monotonic() - self._stopping_since_s < _STOP_GRACE_S
