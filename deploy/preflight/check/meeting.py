"""Several hosts that check a run together: the first asks, the others answer (docs/adr/0062).

The first host proves the broker's key, the others their own. Questions name no code to run: each
host looks at itself by its own settings.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path

import msgspec
from typing_extensions import override

from slipstream.broker.server.keyring import broker_key, holders
from slipstream.deploy.config import RunConfig, resolved_text
from slipstream.deploy.launch.cluster.host_program import Post
from slipstream.deploy.launch.plan import RolePlan
from slipstream.deploy.preflight.check.facts import HostReport
from slipstream.deploy.preflight.check.places import local_posts
from slipstream.deploy.preflight.check.requests import HostRequest, LookAt
from slipstream.weightbus.hosts.follower import MAX_WAITING, HostFollower, following
from slipstream.weightbus.hosts.leader import HostLeader, leading
from slipstream.weightbus.hosts.membership import HostPlace, Membership
from slipstream.weightbus.hosts.verdict import HostEnd, ended_by
from slipstream.wire.errors import ConfigError, PeerLostError
from slipstream.wire.files.keys import ClientKey, read_client_key
from slipstream.wire.messages.followers import AskHost, FetchedThere, FetchToo, HostAnswered
from slipstream.wire.process.background import BackgroundLoop
from slipstream.wire.process.patience import Patience
from slipstream.wire.process.run_until import running, unless
from slipstream.wire.settings.rendezvous import Address

_POLL_S = 0.1
_INFORM_S = 30.0  # time in which hosts must take the reports


def _membership(config: RunConfig, node: int, rendezvous: Address) -> Membership:
    """Return what a host brings to the meeting: the first the broker's key, others their own.

    Raises:
        ConfigError: there is no usable key.
    """
    hosts, learner = config.deploy.hosts, config.learner.learner
    admitted: dict[str, str] = {}
    if node and not config.run.key_file:
        raise ConfigError(
            f"check --on hosts --node {node} needs run.key_file: each host but the first proves a "
            "key of its own"
        )
    if node:
        key = read_client_key(Path(config.run.key_file))
    else:
        folder = config.broker.keys_folder
        admitted = {holder.public: holder.name for holder in holders(folder)}
        if not admitted:
            raise ConfigError(
                f"{folder} (broker.keys) has no key for another host: slipstream keys make NAME "
                "--role ROLE makes one"
            )
        own = broker_key(folder)
        public = own.public.decode()
        key = ClientKey(
            name="broker", role="operator", public=public, secret=own.secret.decode(), broker=public
        )
    return Membership(
        place=HostPlace(node, len(hosts), 0, rendezvous),
        facts={"run.name": config.run.name, "deploy.hosts": json.dumps(hosts)},
        key=key,
        server_key=key.broker,
        admitted=admitted,
        section="learner",
        option="--node",
        refusal="be checked with",
        advice="start slipstream check --on hosts there",
        key_source="run.key_file" if node else "broker.keys",
        rendezvous_timeout_s=learner.rendezvous_timeout_s,
        silence_s=learner.node_silence_s,
    )


class AskingHost(HostLeader):
    """The first host's link to the others."""

    def __init__(self, own: Membership) -> None:
        super().__init__(own)
        self._num_asked = 0
        self._asked: dict[int, int] = {}  # nodes by number of an unanswered question
        self._answers: dict[int, str] = {}

    @override
    def note_answer(self, message: FetchedThere | HostAnswered) -> None:
        if not isinstance(message, HostAnswered):
            return
        node, member = message.node, self.book.known.get(message.node)
        is_ours = member is not None and member.incarnation == message.incarnation
        if is_ours and self._asked.get(message.number) == node:
            self._answers[message.number] = message.answer

    async def ask(self, node: int, host: str, process: str, request: str, limit_s: float) -> str:
        """Return another host's answer, also if it comes later than this host.

        Raises:
            PeerLostError: the host did not come or answer in time, or has ended.
        """
        self._num_asked += 1
        number, own = self._num_asked, self.own
        self._asked[number] = node
        order = AskHost(number=number, process=process, request=request, limit_s=limit_s)
        patience, peer = Patience(f"an answer of {host}", own.rendezvous_timeout_s), b""
        try:
            while number not in self._answers:
                member = self.book.known.get(node)
                if member is not None and member.peer != peer:
                    peer = member.peer
                    await self.send(peer, order)
                is_gone = (member is None and bool(peer)) or self.is_finished
                if is_gone or patience.is_over():
                    advice = self.book.refused or (
                        f"is slipstream check --on hosts --node {node} started there?"
                    )
                    limit = f"learner.rendezvous_timeout_s = {own.rendezvous_timeout_s:g}"
                    why = "has ended" if is_gone else f"has not answered ({limit})"
                    raise PeerLostError(f"{host} {why}: {advice}")
                await self.next_change()
            return self._answers.pop(number)
        finally:
            del self._asked[number]

    async def inform(self, hosts: Sequence[str], text: str) -> None:
        """Send the reports to the other hosts that are there; one that is lost does not get them.

        Args:
            hosts: Names of all hosts.
            text: The reports, in JSON.
        """

        async def inform(node: int) -> None:
            with suppress(PeerLostError, TimeoutError):
                async with asyncio.timeout(_INFORM_S):
                    await self.ask(node, hosts[node], "", text, 0.0)

        await asyncio.gather(*map(inform, list(self.book.known)))


class FirstHost:
    """The first of several hosts, which asks the others."""

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
            progress: Called with what the program of this host is doing.

        Raises:
            ConfigError: this host cannot listen at the address, or has no keys for others.
        """
        self.config = config
        first, *others = config.deploy.hosts
        self._leader = AskingHost(_membership(config, 0, rendezvous))
        ended = HostEnd(0, "the check ended", is_orderly=True)
        with ExitStack() as stack:
            self._loop = stack.enter_context(BackgroundLoop())
            link = AsyncExitStack()
            stack.callback(lambda: self._loop.run(link.aclose()))
            self._loop.run(link.enter_async_context(leading(self._leader, lambda: ended)))
            here = [plan for plan in plans if plan.host == first]
            local = local_posts(here, node=first, address=rendezvous.host, progress=progress)
            own = stack.enter_context(local)
            self._cleanup = stack.pop_all()
        self.posts: Sequence[Post] = [
            *own,
            *(
                Post(plan.name, plan.host, plan.host, self._asks(plan))
                for plan in plans
                if plan.host in others
            ),
        ]

    def _asks(self, plan: RolePlan) -> Callable[[bytes, float], bytes]:
        node = self.config.deploy.hosts.index(plan.host)

        def ask(request: bytes, limit_s: float) -> bytes:
            asking = self._leader.ask(node, plan.host, plan.name, request.decode(), limit_s)
            return self._loop.run(asking).encode()

        return ask

    def tell(self, reports: Sequence[HostReport]) -> None:
        """Send the reports to the other hosts."""
        text = msgspec.json.encode(reports).decode()
        self._loop.run(self._leader.inform(self.config.deploy.hosts, text))

    def close(self) -> None:
        """End the program of this host, and the meeting."""
        self._cleanup.close()


class _Answering(HostFollower):
    """Another host's link to the first."""

    def __init__(self, own: Membership) -> None:
        super().__init__(own)
        self.questions: asyncio.Queue[AskHost] = asyncio.Queue(MAX_WAITING)
        self.reports: list[HostReport] | None = None

    @override
    async def take_order(self, order: FetchToo | AskHost) -> None:
        if isinstance(order, AskHost):
            await self.questions.put(order)

    async def run_until_told(self, node: int, answer: Callable[[AskHost], bytes]) -> None:
        """Answer questions until the reports of all hosts come.

        Raises:
            ConfigError: the first host refuses this one, or asks for what is not here.
            PeerLostError: the first host is missing, or has ended.
        """
        async with (
            following(self, lambda: ended_by(node, sys.exception())) as linking,
            running(self.until_started()) as (ended,),
        ):
            while self.reports is None:
                order = await unless(self.questions.get(), linking, ended)
                if order is None:
                    raise PeerLostError(self.line(self.end or HostEnd(0, "for no known reason")))
                text = b""
                if order.process:
                    text = await asyncio.to_thread(answer, order)
                else:
                    self.reports = msgspec.json.decode(order.request, type=list[HostReport])
                await self.send(
                    HostAnswered(
                        node=node,
                        incarnation=self.incarnation,
                        number=order.number,
                        answer=text.decode(),
                    )
                )


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
        progress: Called with what the program of this host is doing.

    Raises:
        ConfigError: there is no usable key, or the first host refuses this one.
        PeerLostError: the first host is missing, or has ended.
    """
    link = _Answering(_membership(config, node, rendezvous))
    here = [plan for plan in plans if plan.host == config.deploy.hosts[node]]
    asks: dict[str, Callable[[bytes, float], bytes]] = {}

    def answer(order: AskHost) -> bytes:
        if order.process not in asks:
            raise ConfigError(f"the first host places {order.process} here, deploy.hosts does not")
        request: HostRequest = msgspec.json.decode(order.request, type=HostRequest)
        if isinstance(request, LookAt):  # settings name code to run: only this host's own are used
            known = tuple(role for role in request.roles if role in asks)
            request = msgspec.structs.replace(request, settings=resolved_text(config), roles=known)
        return asks[order.process](msgspec.json.encode(request), order.limit_s)

    with local_posts(here, progress=progress) as posts, BackgroundLoop() as loop:
        asks.update({post.name: post.ask for post in posts})
        loop.start(link.run_until_told(node, answer))
        while link.reports is None:
            loop.check()
            time.sleep(_POLL_S)
        return link.reports
