"""Several hosts that meet in a torch store: the first host asks, the others answer.

Questions name no code to run: each host looks at itself by its own settings.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TypeVar

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in torch's stubs

from slipstream.deploy.config import RunConfig, resolved_text
from slipstream.deploy.launch.cluster.host_program import Post
from slipstream.deploy.launch.plan import RolePlan
from slipstream.deploy.preflight.check.facts import HostReport
from slipstream.deploy.preflight.check.places import local_posts
from slipstream.deploy.preflight.check.requests import Begin, Request
from slipstream.learner.nodes.store import StoreLostError, asked, connect
from slipstream.weightbus.net.rendezvous import open_store
from slipstream.wire.errors import ConfigError, PeerLostError
from slipstream.wire.settings.rendezvous import Address

_T = TypeVar("_T")
_POLL_S, _CONNECT_S = 0.1, 0.5
_READ_S = 30.0  # time for the other hosts to read the end
_REPORTS = "reports"


class Mailbox:
    """Texts by name in the store; each is written once."""

    def __init__(self, store: TCPStore) -> None:
        self._store = store

    def put(self, name: str, text: bytes) -> None:
        """Write a text.

        Raises:
            PeerLostError: the process with the store is gone.
        """
        self._ask(lambda: self._store.set(name, text.decode()))

    def get(self, name: str) -> bytes:
        """Return an existing text; raises as ``put``."""
        return bytes(self._ask(lambda: self._store.get(name)))

    def first_of(self, names: Sequence[str], limit_s: float) -> str:
        """Return the first existing name, or empty after a while; raises as ``put``."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            for name in names:
                if self._ask(partial(self._store.check, [name])):
                    return name
            time.sleep(_POLL_S)
        return ""

    def _ask(self, request: Callable[[], _T]) -> _T:
        try:
            return asked(request)
        except StoreLostError as error:
            raise PeerLostError(f"the store where the hosts meet is gone: {error}") from error


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A question from the first host to another one."""

    name: str  # name of the process whose host's program is asked
    request: msgspec.Raw
    limit_s: float


class FirstHost:
    """The first of several hosts: holds the store and asks the others."""

    def __init__(
        self,
        config: RunConfig,
        plans: Sequence[RolePlan],
        rendezvous: Address,
        progress: Callable[[str], None],
    ) -> None:
        """Listen for the other hosts.

        Args:
            config: The run, with its listening addresses.
            plans: Plans of its processes on all hosts.
            rendezvous: Address where the hosts meet.
            progress: Function called with what the programs of this host are doing.

        Raises:
            ConfigError: this host cannot listen at the address.
        """
        self.config = config
        hosts = config.deploy.hosts
        here = [plan for plan in plans if plan.host == hosts[0]]
        self._limit_s = config.learner.learner.rendezvous_timeout_s
        store = open_store(
            rendezvous.host,
            world_size=len(hosts),
            timeout_s=self._limit_s,
            port=rendezvous.port,
            named="--rendezvous",
        )
        self._mail = Mailbox(store)
        self._programs = ExitStack()
        local = self._programs.enter_context(
            local_posts(here, node=hosts[0], address=rendezvous.host, progress=progress)
        )
        others = [plan for plan in plans if plan.host != hosts[0]]
        self._nodes = {plan.host: hosts.index(plan.host) for plan in others}
        self._present: set[int] = set()  # nodes that have answered
        self._num_asked = dict.fromkeys(self._nodes, 0)
        self.posts: Sequence[Post] = [
            *local,
            *(Post(plan.name, plan.host, plan.host, self._asks(plan)) for plan in others),
        ]

    def _asks(self, plan: RolePlan) -> Callable[[bytes, float], bytes]:
        node, host = self._nodes[plan.host], plan.host

        def ask(request: bytes, limit_s: float) -> bytes:
            question = Question(name=plan.name, request=msgspec.Raw(request), limit_s=limit_s)
            number = self._num_asked[host]
            self._num_asked[host] = number + 1
            self._mail.put(f"request/{node}/{number}", msgspec.json.encode(question))
            key, gone = f"answer/{node}/{number}", f"gone/{node}"
            if self._mail.first_of((key, gone), self._limit_s) == key:
                self._present.add(node)
                return self._mail.get(key)
            raise PeerLostError(
                f"{host} has not answered (learner.rendezvous_timeout_s = {self._limit_s:g}): is "
                f"slipstream check --on hosts --node {node} started there?"
            )

        return ask

    def tell(self, reports: Sequence[HostReport]) -> None:
        """Send the reports to the other hosts, and wait until they have read them."""
        self._mail.put(_REPORTS, msgspec.json.encode(reports))
        for node in self._present:
            self._mail.first_of((f"gone/{node}",), _READ_S)

    def close(self) -> None:
        """End the programs of this host; the store ends with this object."""
        self._programs.close()


def answer_first_host(
    config: RunConfig,
    plans: Sequence[RolePlan],
    node: int,
    rendezvous: Address,
    progress: Callable[[str], None],
) -> list[HostReport]:
    """Answer the first host's questions with this host's own settings; return its reports.

    Args:
        config: The run.
        plans: Plans of its processes on all hosts.
        node: Number of this host in deploy.hosts.
        rendezvous: Address of the first host.
        progress: Function called with what the programs of this host are doing.

    Raises:
        PeerLostError: the first host is missing, or has ended.
    """
    limit_s = config.learner.learner.rendezvous_timeout_s
    mail = Mailbox(_connected(rendezvous, limit_s))
    here = [plan for plan in plans if plan.host == config.deploy.hosts[node]]
    try:
        with local_posts(here, progress=progress) as posts:
            return _answered(mail, config, posts, node, limit_s)
    finally:
        with suppress(PeerLostError):  # the first host has ended
            mail.put(f"gone/{node}", b"")


def _connected(rendezvous: Address, limit_s: float) -> TCPStore:
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            return connect(rendezvous, timeout_s=limit_s)
        except StoreLostError as error:
            if time.monotonic() > deadline_s:
                raise PeerLostError(
                    f"no first host at {rendezvous} (--rendezvous) for {limit_s:g} s "
                    f"(learner.rendezvous_timeout_s): {error}"
                ) from error
            time.sleep(_CONNECT_S)


def _answered(
    mail: Mailbox, config: RunConfig, posts: Sequence[Post], node: int, limit_s: float
) -> list[HostReport]:
    asks = {post.name: post.ask for post in posts}
    own_settings = resolved_text(config)
    number = 0
    while True:
        key = f"request/{node}/{number}"
        found = mail.first_of((key, _REPORTS), limit_s)
        if found == _REPORTS:
            return msgspec.json.decode(mail.get(_REPORTS), type=list[HostReport])
        if not found:
            raise PeerLostError(
                f"the first host asked nothing for {limit_s:g} s (learner.rendezvous_timeout_s)"
            )
        question = msgspec.json.decode(mail.get(key), type=Question)
        request: Request = msgspec.json.decode(question.request, type=Request)
        if isinstance(request, Begin):  # settings name code to run: only this host's own are used
            known = tuple(role for role in request.roles if role in asks)
            request = msgspec.structs.replace(request, settings=own_settings, roles=known)
        if question.name not in asks:
            raise ConfigError(f"the first host places {question.name} here, deploy.hosts does not")
        answer = asks[question.name](msgspec.json.encode(request), question.limit_s)
        mail.put(f"answer/{node}/{number}", answer)
        number += 1
