"""Pure: which processes a run needs, on which host, with which GPUs."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

from slipstream.deploy.config import DeploySection, RunConfig, refuse_engines_on_several_hosts
from slipstream.learner.layout import Layout
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import readable_checkpoints
from slipstream.wire.messages.broker import Role

_MODULES = {
    "broker": "slipstream.broker.main",
    "generator": "slipstream.generators.main",
    "learner": "slipstream.learner.main",
    "reward-worker": "slipstream.broker.reward_worker.main",
}
Place = tuple[str, tuple[int, ...] | None]  # host and its GPUs; None on a CPU


@dataclass(frozen=True, slots=True)
class RolePlan:
    """One process of a run."""

    name: str
    command: tuple[str, ...]
    restart_arguments: tuple[str, ...] = ()  # added after the first start
    host: str = "localhost"
    gpus: tuple[int, ...] | None = None  # GPUs visible to the process; None does not restrict them
    environment: dict[str, str] = field(default_factory=dict)  # added to the inherited variables
    cores: tuple[int, ...] = ()  # cores of the process and its children; empty allows all
    serves_others: bool = False  # restarted if it ends while other roles run
    is_one_of_many: bool = False  # the run continues without it if another process took its name
    part_of: str = ""  # role whose processes end and restart together; empty for a single process


def plan_roles(
    config: RunConfig, resolved: Path, *, gpus: Sequence[str] | None, python: str = sys.executable
) -> list[RolePlan]:
    """Return the processes in the order of their start; the broker comes first.

    The learner's nodes get the first GPUs of the first hosts, and each generator the next ones. On
    CPUs, generators use the hosts after the learner's, if there are any.

    Args:
        config: the run.
        resolved: Settings file that every process reads.
        gpus: Usable GPUs here, as CUDA_VISIBLE_DEVICES names them. Other hosts have as many, unless
            deploy.gpus_per_host is set. None if a cluster assigns the GPUs.
        python: Interpreter of every process.

    Raises:
        ConfigError: there are not enough GPUs, or an engine spans several hosts.
    """
    refuse_engines_on_several_hosts(config)
    nodes = learner_names(config.learner.layout)
    names = ["broker", *generator_names(config), *nodes, *reward_worker_names(config)]
    cards = None if gpus is None else _cards(config.deploy, gpus)
    places = {} if cards is None else _places(config, len(cards))
    # A restarted learner may find files of this run or of an earlier one.
    found = readable_checkpoints(config.run.checkpoints) if config.run.resume_from else {}
    epochs = [info.version.epoch for info in found.values()]
    begun_after = ("--begun-after", str(max(epochs))) if epochs else ()
    again = {"broker": ("--restarted",), "learner": ("--resume", "auto", *begun_after)}

    def role(name: str) -> RolePlan:
        kind = kind_of(name)
        arguments: tuple[str, ...] = ()
        if kind in {"generator", "reward-worker"}:
            arguments = ("--name", name)
        elif kind == "learner" and len(nodes) > 1:
            arguments = ("--node", str(nodes.index(name)))
        host, numbers = places.get(name, (config.deploy.hosts[0], None))
        # Threads that spin while they wait would hold a core that another role needs.
        environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        if numbers is not None and cards is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(cards[number] for number in numbers)
        return RolePlan(
            name,
            (python, "-m", _MODULES[kind], "--config", str(resolved), *arguments),
            again.get(kind, ()),
            host,
            numbers,
            environment,
            config.deploy.cores.get(name, config.deploy.cores.get(kind, ())),
            serves_others=kind == "broker",
            is_one_of_many=kind in {"generator", "reward-worker"},
            part_of=kind if kind == "learner" and len(nodes) > 1 else "",
        )

    return [role(name) for name in names]


def kind_of(name: str) -> str:
    """Return the role of a process of this name."""
    return name.rstrip("-0123456789")


def key_role(name: str) -> Role:
    """Return the role that the key of a process of this name proves; not for the broker."""
    kind = kind_of(name)
    if kind == "learner":
        return "learner" if name == kind else "learner_part"
    return "generator" if kind == "generator" else "reward_worker"


def number_of(name: str) -> int:
    """Return the number at the end of the name of a process."""
    return int(name.rpartition("-")[2])


def learner_names(layout: Layout) -> list[str]:
    """Return the names of the learner's processes, one per node."""
    return ["learner", *(f"learner-{node}" for node in range(1, layout.nodes))]


def plan_generator(
    config: RunConfig,
    resolved: Path,
    name: str,
    *,
    gpus: Sequence[str] | None,
    python: str = sys.executable,
) -> RolePlan:
    """Return the process of an additional generator; arguments and error as in plan_roles."""
    anywhere = config.with_settings("deploy", min_generators=0, max_generators=0)
    larger = anywhere.with_settings("generators", count=number_of(name) + 1)
    plans = plan_roles(larger, resolved, gpus=gpus, python=python)
    return next(plan for plan in plans if plan.name == name)


def generator_names(config: RunConfig) -> list[str]:
    """Return the names of the run's generators."""
    return [f"generator-{number}" for number in range(config.generators.generators.count)]


def reward_worker_names(config: RunConfig) -> list[str]:
    """Return the names of the run's reward workers."""
    return [f"reward-worker-{number}" for number in range(config.broker.reward.workers)]


def _cards(deploy: DeploySection, gpus: Sequence[str]) -> Sequence[str]:
    """Return the GPUs of each host, as CUDA_VISIBLE_DEVICES names them there."""
    count = deploy.gpus_per_host
    if len(deploy.hosts) > 1 or not gpus:
        return [str(number) for number in range(count or len(gpus))]
    if count > len(gpus):
        raise ConfigError(
            f"deploy.gpus_per_host = {count}, but {len(gpus)} may be used here "
            "(CUDA_VISIBLE_DEVICES, where it is set, chooses from those of the host)"
        )
    return gpus[: count or None]


def _places(config: RunConfig, num_gpus: int) -> dict[str, Place]:
    layout, engines = config.learner.layout, generator_names(config)
    hosts = config.deploy.hosts
    if layout.nodes > len(hosts):
        raise ConfigError(
            f"learner.ranks_per_node = {config.learner.learner.ranks_per_node} places the learner "
            f"on {layout.nodes} hosts, and deploy.hosts names {len(hosts)}: name them all, or "
            "start the run with --on ray"
        )
    nodes = dict(zip(learner_names(layout), hosts, strict=False))
    if config.generators.device == "cpu":
        others = hosts[layout.nodes :] or hosts[1:] or hosts
        return {name: (host, None) for name, host in (*nodes.items(), *zip(engines, cycle(others)))}
    ranks = layout.ranks_per_node
    if num_gpus < ranks:
        raise ConfigError(f"learner.ranks = {ranks}, but {hosts[0]} has {num_gpus} GPUs")
    size = config.generators.generators.num_ranks  # GPUs of an engine, all on one host
    free = [
        place
        for host in hosts
        for place in _engine_places(host, ranks if host in nodes.values() else 0, num_gpus, size)
    ]
    count = len(engines)
    if len(free) < count and not config.deploy.share_gpus:
        where = "this host has" if len(hosts) == 1 else f"{len(hosts)} hosts have"
        each = f" of {size} GPUs each (generators.sglang.tp_size)" if size > 1 else ""
        raise ConfigError(
            f"{where} {len(hosts) * num_gpus} GPUs; learner.ranks = {layout.ranks} and "
            f"generators.count = {count}{each} need {layout.ranks + count * size}, unless "
            "deploy.share_gpus is on"
        )
    shared = [place for host in hosts for place in _engine_places(host, 0, num_gpus, size)]
    places = free if len(free) >= count else shared
    if count and not places:
        raise ConfigError(
            f"generators.sglang.tp_size = {size}, but a host has {num_gpus} GPUs: the ranks of an "
            "engine are on one host, unless generators.nodes says otherwise"
        )
    return {
        **{name: (host, tuple(range(ranks))) for name, host in nodes.items()},
        **dict(zip(engines, cycle(places), strict=False)),
    }


def _engine_places(host: str, first: int, num_gpus: int, size: int) -> list[Place]:
    """Return the GPUs of the engines that fit on a host from GPU ``first`` on."""
    starts = range(first, num_gpus - size + 1, size)
    return [(host, tuple(range(start, start + size))) for start in starts]
