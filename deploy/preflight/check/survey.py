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
    by_name: dict[str, _Host] = {}
    for post in posts:
        by_name.setdefault(post.node, _Host([])).posts.append(post)
    hosts, bus = list(by_name.values()), config.learner.weightbus
    progress(f"looking at {len(hosts)} host{'s' if len(hosts) > 1 else ''}")
    threads = ThreadPoolExecutor(len(hosts), thread_name_prefix="check")
    try:
        list(threads.map(lambda host: _observe(host, config, is_cluster=is_cluster), hosts))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)  # they end with the programs they ask
    learner = next(host for host in hosts if "learner" in host.roles)
    for host in hosts:
        if host.card is None:
            continue
        if learner.card is not None and host is not learner:
            host.facts += compare(learner.card, host.card, host.kinds, bus)
        host.facts.append(_clock(host, config) if len(hosts) > 1 else ok("clock", "one host"))
    return [host.report for host in hosts]


def _observe(host: _Host, config: RunConfig, *, is_cluster: bool) -> None:
    settings = resolved_text(config)
    request = LookAt(settings=settings, roles=host.roles, keys_by_run=is_cluster)
    try:
        seen = _ask(host, config, request, Observed)
    except SlipstreamError as error:
        host.facts.append(fail("host", str(error)))
        return
    host.name = f"{seen.hostname} ({host.lead.address})"
    host.facts += seen.facts
    host.card = seen.card


def _ask(host: _Host, config: RunConfig, request: HostRequest, kind: type[_Answer]) -> _Answer:
    """Return an answer of the expected kind.

    Raises:
        SlipstreamError: no answer came, or the host refused with a reason.
    """
    limit_s = config.broker.reward.timeout_s  # longest silent wait of the program
    text = host.lead.ask(msgspec.json.encode(request), limit_s)
    answer = msgspec.json.decode(text, type=HostAnswer)
    if isinstance(answer, HostFailed):
        raise ConfigError(answer.why)
    if not isinstance(answer, kind):
        raise ConfigError(f"expected {kind.__name__} of {host.lead.name}'s host, got {answer!r}")
    return answer


def compare(
    ours: HostCard, theirs: HostCard, kinds: frozenset[str], bus: WeightBusSection
) -> list[Fact]:
    """Pure: return how another host's card agrees with that of the learner's host.

    Args:
        ours: Card of the learner's host.
        theirs: Card of the other host.
        kinds: Kinds of the processes there.
        bus: The [weightbus] section.
    """
    if not {"learner", "generator"} & kinds:
        return []
    versions = judge_versions(
        ours.libraries,
        theirs.libraries,
        kinds=kinds,
        collective=uses_collectives(kinds, bus),
        on_gpu=theirs.device == "cuda",
    )
    return [versions, judge_models(ours.model, theirs.model)]


def _clock(host: _Host, config: RunConfig) -> Fact:
    try:
        return judge_clock(measure(lambda: _ask(host, config, ReadClock(), ClockReading).unix_s))
    except SlipstreamError as error:
        return fail("clock", str(error))
