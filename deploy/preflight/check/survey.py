"""Asks every host of a run, compares the answers, and sends from the learner's host to others."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import zmq

from slipstream.deploy.config import RunConfig, resolved_text
from slipstream.deploy.launch.cluster.host_program import Post
from slipstream.deploy.launch.plan import kind_of
from slipstream.deploy.preflight.check.clock import judge_clock, measure
from slipstream.deploy.preflight.check.facts import Fact, HostReport, fail, ok
from slipstream.deploy.preflight.check.libraries import judge_versions
from slipstream.deploy.preflight.check.model import judge_models
from slipstream.deploy.preflight.check.requests import (
    Answer,
    Begin,
    Card,
    Clock,
    Invitation,
    Listen,
    Observe,
    Observed,
    Passage,
    ReadClock,
    Receive,
    Refused,
    Request,
    Send,
    Way,
)
from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.transports import FALLBACK, TRANSPORTS, chosen
from slipstream.wire.errors import ConfigError, SlipstreamError

_A = TypeVar("_A")
_MB = 1e6


@dataclass(slots=True)
class _Host:
    posts: list[Post]
    facts: list[Fact] = field(default_factory=list)
    name: str = ""
    card: Card | None = None

    @property
    def lead(self) -> Post:
        """Post whose program looks at the host: the learner's if present, which has the GPUs."""
        return min(self.posts, key=lambda post: kind_of(post.name) != "learner")

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(post.name for post in self.posts)

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(map(kind_of, self.roles))

    @property
    def report(self) -> HostReport:
        return HostReport(
            host=self.name or self.lead.node, roles=self.roles, facts=tuple(self.facts)
        )


def way_to(kind: str, device: str, bus: WeightBusSection, *, is_far: bool) -> Way:
    """Pure: return the transport of tensors from the learner's host to a process.

    Args:
        kind: Learner (gradients of its other nodes) or generator (weights).
        device: Device of the process, cpu or cuda.
        bus: Section of the weight bus.
        is_far: True if it is on another host, or reaches the learner over TCP anyway.
    """
    transport = chosen(bus.transport)
    if is_far and TRANSPORTS[transport].why_not_from_afar(bus.host):
        transport = FALLBACK
    if kind == "generator" and transport == "tcp":
        return "tcp"
    if kind == "generator" and transport == "disk":
        return "disk"
    if kind == "generator" and bus.backend != "auto":
        return bus.backend
    return "nccl" if device == "cuda" else "gloo"


def judge_passage(
    sent: Passage, received: Passage, *, way: Way, kind: str, from_to: tuple[str, str]
) -> Fact:
    """Return whether bytes reached a host.

    Args:
        sent: Result on the learner's host.
        received: Result on the other host.
        way: Transport of the bytes.
        kind: Kind of the process there: generator or learner.
        from_to: Names of the two hosts, with addresses.
    """
    here, there = from_to
    name = "weights" if kind == "generator" else "gradients"
    path = f"from {here} ({sent.interface}) to {there} ({received.interface})"
    if way == "tcp":
        setting = "weightbus.listen, weightbus.transport, weightbus.timeout_s"
    elif kind == "generator":
        setting = "weightbus.host, weightbus.transport, weightbus.timeout_s"
    else:
        setting = "learner.ranks_per_node, weightbus.timeout_s"
    if failure := received.failure or sent.failure:
        return fail(name, f"nothing passes over {way} {path}: {failure}", setting)
    speed = received.num_bytes / max(received.seconds, 1e-9) / _MB
    return ok(
        name, f"{received.num_bytes / _MB:.0f} MB over {way} {path}: {speed:,.0f} MB/s", setting
    )


def survey(
    config: RunConfig,
    posts: Sequence[Post],
    progress: Callable[[str], None],
    *,
    is_cluster: bool = False,
) -> list[HostReport]:
    """Look at every host of a run; return the reports.

    Args:
        config: The run, with the addresses of its hosts.
        posts: One per process, the broker first.
        progress: Called with the current activity.
        is_cluster: True if the run makes keys for its hosts, and all roles are connected over TCP.
    """
    hosts: dict[str, _Host] = {}
    for post in posts:
        hosts.setdefault(post.node, _Host([])).posts.append(post)
    threads = ThreadPoolExecutor(2 + len(hosts), thread_name_prefix="check")
    try:
        _Survey(config, list(hosts.values()), threads, progress, is_cluster=is_cluster).run()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)  # they end with the programs they ask
    return [host.report for host in hosts.values()]


class _Survey:
    def __init__(
        self,
        config: RunConfig,
        hosts: list[_Host],
        threads: Executor,
        progress: Callable[[str], None],
        *,
        is_cluster: bool,
    ) -> None:
        self._hosts = hosts
        self._threads = threads
        self._progress = progress
        self._is_cluster = is_cluster
        self._bus = config.learner.weightbus
        # longest silent wait of a program for others
        self._limit_s = max(self._bus.timeout_s, config.broker.reward.timeout_s)
        self._settings = resolved_text(config)

    def run(self) -> None:
        """Add the findings to every host."""
        count = len(self._hosts)
        self._progress(f"looking at {count} host{'s' if count > 1 else ''}")
        for done in [self._threads.submit(self._observe, host) for host in self._hosts]:
            done.result()
        learner = next(host for host in self._hosts if "learner" in host.roles)
        for host in self._hosts:
            if host is not learner:
                self._compare(learner, host)
            self._read_clock(host)
        for host in self._hosts:
            self._pass_to(host, learner)

    def _observe(self, host: _Host) -> None:
        try:
            self._begin(host.lead, host.roles)
            seen = self._ask(host.lead, Observe(), Observed)
        except SlipstreamError as error:
            host.facts.append(fail("host", str(error)))
            return
        host.name = f"{seen.hostname} ({host.lead.address})"
        host.facts += seen.facts
        host.card = seen.card

    def _begin(self, post: Post, roles: tuple[str, ...], *, receives: bool = False) -> None:
        request = Begin(
            settings=self._settings, roles=roles, keys_by_run=self._is_cluster, receives=receives
        )
        self._ask(post, request, Clock)

    def _ask(self, post: Post, request: Request, kind: type[_A]) -> _A:
        """Return an answer of the expected kind.

        Raises:
            SlipstreamError: no answer came, or the host refused with a reason.
        """
        text = post.ask(msgspec.json.encode(request), self._limit_s)
        answer = msgspec.json.decode(text, type=Answer)
        if isinstance(answer, Refused):
            raise ConfigError(answer.why)
        if not isinstance(answer, kind):
            raise ConfigError(f"expected {kind.__name__} of {post.name}'s host, got {answer!r}")
        return answer

    def _compare(self, learner: _Host, host: _Host) -> None:
        ours, theirs = learner.card, host.card
        if ours is None or theirs is None or not {"learner", "generator"} & host.kinds:
            return
        is_collective = "learner" in host.kinds or self._way(host, "generator") in {"gloo", "nccl"}
        host.facts.append(
            judge_versions(
                ours.libraries,
                theirs.libraries,
                kinds=host.kinds,
                collective=is_collective,
                on_gpu=theirs.device == "cuda",
            )
        )
        host.facts.append(judge_models(ours.model, theirs.model))

    def _read_clock(self, host: _Host) -> None:
        if host.card is None:
            return
        if len(self._hosts) == 1:
            host.facts.append(ok("clock", "one host"))
            return
        read = lambda: self._ask(host.lead, ReadClock(), Clock).unix_s  # noqa: E731
        try:
            host.facts.append(judge_clock(measure(read)))
        except SlipstreamError as error:
            host.facts.append(fail("clock", str(error)))

    # ---- weights -----------------------------------------------------------------

    def _way(self, host: _Host, kind: str) -> Way:
        device = host.card.device if host.card is not None else "cpu"
        is_far = self._is_cluster or "learner" not in host.roles
        return way_to(kind, device, self._bus, is_far=is_far)

    def _pass_to(self, host: _Host, learner: _Host) -> None:
        """Send from the learner's host to one process of each kind on another host."""
        if host.card is None or learner.card is None:
            return
        sender = learner.lead
        first: dict[str, Post] = {}
        for post in host.posts:
            if post is not sender and kind_of(post.name) in {"learner", "generator"}:
                first.setdefault(kind_of(post.name), post)
        for kind, post in first.items():
            way = self._way(host, kind)
            if way == "disk":
                found = "go over the disk (weightbus.folder): nothing is sent to try"
                host.facts.append(ok("weights", found, "weightbus.transport"))
                continue
            self._progress(f"sending from {learner.name} to {host.name} over {way}")
            host.facts.append(self._passed(sender, post, way, kind, (learner.name, host.name)))

    def _passed(
        self, sender: Post, receiver: Post, way: Way, kind: str, from_to: tuple[str, str]
    ) -> Fact:
        public, secret = (half.decode() for half in zmq.curve_keypair())
        address = self._address(sender, way, kind)
        try:
            self._begin(receiver, (receiver.name,), receives=True)
            listen = Listen(way=way, address=address, public_key=public)
            invitation = self._ask(sender, listen, Invitation)
            sending = self._threads.submit(self._ask, sender, Send(), Passage)
            receive = Receive(way=way, invitation=invitation, public_key=public, secret_key=secret)
            received = self._ask(receiver, receive, Passage)
            sent = sending.result()
        except SlipstreamError as error:
            sent = received = Passage(interface="unknown interface", failure=str(error))
        return judge_passage(sent, received, way=way, kind=kind, from_to=from_to)

    def _address(self, sender: Post, way: Way, kind: str) -> str:
        """Return the address of the learner's host for the receiver."""
        if kind == "generator" and way != "tcp":
            return self._bus.host
        if kind == "generator" and self._bus.listen:
            return self._bus.listen.removeprefix("tcp://").rpartition(":")[0]
        return sender.address
