"""Asks every host of a run, and compares the answers."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from slipstream.deploy.config import RunConfig, resolved_text
from slipstream.deploy.launch.cluster.host_program import Post
from slipstream.deploy.launch.plan import kind_of
from slipstream.deploy.preflight.check.clock import judge_clock, measure
from slipstream.deploy.preflight.check.facts import Fact, HostReport, fail, ok
from slipstream.deploy.preflight.check.libraries import judge_versions
from slipstream.deploy.preflight.check.model import judge_models
from slipstream.deploy.preflight.check.requests import (
    ClockReading,
    HostAnswer,
    HostCard,
    HostFailed,
    HostRequest,
    LookAt,
    Observed,
    ReadClock,
)
from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.transports import TRANSPORTS, chosen
from slipstream.wire.errors import ConfigError, SlipstreamError

_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class _Host:
    posts: list[Post]
    facts: list[Fact] = field(default_factory=list)
    name: str = ""
    card: HostCard | None = None

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


def uses_collectives(kinds: frozenset[str], bus: WeightBusSection) -> bool:
    """Pure: return whether processes on another host than the learner's exchange tensors by NCCL.

    Args:
        kinds: Kinds of the processes.
        bus: The [weightbus] section.
    """
    entry = TRANSPORTS[chosen(bus.transport)]
    return "learner" in kinds or (entry.dials_host and not entry.why_not_from_afar(bus.host))


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
    _Survey(config, list(hosts.values()), progress, is_cluster=is_cluster).run()
    return [host.report for host in hosts.values()]


class _Survey:
    def __init__(
        self,
        config: RunConfig,
        hosts: list[_Host],
        progress: Callable[[str], None],
        *,
        is_cluster: bool,
    ) -> None:
        self._hosts = hosts
        self._progress = progress
        self._is_cluster = is_cluster
        self._bus = config.learner.weightbus
        self._limit_s = config.broker.reward.timeout_s  # longest silent wait of a program
        self._settings = resolved_text(config)

    def run(self) -> None:
        """Add the findings to every host."""
        count = len(self._hosts)
        self._progress(f"looking at {count} host{'s' if count > 1 else ''}")
        threads = ThreadPoolExecutor(count, thread_name_prefix="check")
        try:
            list(threads.map(self._observe, self._hosts))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # they end with the programs they ask
        learner = next(host for host in self._hosts if "learner" in host.roles)
        for host in self._hosts:
            if host is not learner:
                self._compare(learner, host)
            self._read_clock(host)

    def _observe(self, host: _Host) -> None:
        try:
            request = LookAt(
                settings=self._settings, roles=host.roles, keys_by_run=self._is_cluster
            )
            seen = self._ask(host.lead, request, Observed)
        except SlipstreamError as error:
            host.facts.append(fail("host", str(error)))
            return
        host.name = f"{seen.hostname} ({host.lead.address})"
        host.facts += seen.facts
        host.card = seen.card

    def _ask(self, post: Post, request: HostRequest, kind: type[_Answer]) -> _Answer:
        """Return an answer of the expected kind.

        Raises:
            SlipstreamError: no answer came, or the host refused with a reason.
        """
        text = post.ask(msgspec.json.encode(request), self._limit_s)
        answer = msgspec.json.decode(text, type=HostAnswer)
        if isinstance(answer, HostFailed):
            raise ConfigError(answer.why)
        if not isinstance(answer, kind):
            raise ConfigError(f"expected {kind.__name__} of {post.name}'s host, got {answer!r}")
        return answer

    def _compare(self, learner: _Host, host: _Host) -> None:
        ours, theirs = learner.card, host.card
        if ours is None or theirs is None or not {"learner", "generator"} & host.kinds:
            return
        host.facts.append(
            judge_versions(
                ours.libraries,
                theirs.libraries,
                kinds=host.kinds,
                collective=uses_collectives(host.kinds, self._bus),
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
        read = lambda: self._ask(host.lead, ReadClock(), ClockReading).unix_s  # noqa: E731
        try:
            host.facts.append(judge_clock(measure(read)))
        except SlipstreamError as error:
            host.facts.append(fail("clock", str(error)))
