"""Pure: which processes a run needs, on which host, with which GPUs."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.deploy.config import RunConfig, refuse_engines_on_several_hosts
from slipstream.learner.layout import Layout
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import readable_checkpoints
from slipstream.wire.messages.broker import Role

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
    deploy = config.deploy
    places: dict[str, Place] = {}
    names: Sequence[str] = ()
    if gpus is not None:
        is_here = len(deploy.hosts) == 1 and len(gpus) > 0
        if is_here and deploy.gpus_per_host > len(gpus):
            raise ConfigError(
                f"deploy.gpus_per_host = {deploy.gpus_per_host}, but {len(gpus)} may be used here "
                "(CUDA_VISIBLE_DEVICES, where it is set, chooses from those of the host)"
            )
        num_gpus = deploy.gpus_per_host or len(gpus)
        places = _places(config, num_gpus)
        names = gpus if is_here else [str(number) for number in range(num_gpus)]
    first = deploy.hosts[0]
    nodes = learner_names(config.learner.layout)
    if gpus is not None and len(nodes) > len(deploy.hosts):
        raise ConfigError(
            f"learner.ranks_per_node = {config.learner.learner.ranks_per_node} places the learner "
            f"on {len(nodes)} hosts, and deploy.hosts names {len(deploy.hosts)}: name them all, or "
            "start the run with --on ray"
        )

    def role(name: str, module: str, *arguments: str, on_restart: tuple[str, ...] = ()) -> RolePlan:
        command = (python, "-m", module, "--config", str(resolved), *arguments)
        host, numbers = places.get(name, (first, None))
        environment = {"OMP_NUM_THREADS": "1"}
        if numbers is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] for gpu in numbers)
        kind = kind_of(name)
        is_part = kind == "learner" and len(nodes) > 1
        cores = config.deploy.cores.get(name, config.deploy.cores.get(kind, ()))
        return RolePlan(
            name,
            command,
            on_restart,
            host,
            numbers,
            environment,
            cores,
            serves_others=name == "broker",
            is_one_of_many=kind in {"generator", "reward-worker"},
            part_of=kind if is_part else "",
        )

    def named(name: str, module: str) -> RolePlan:
        return role(name, module, "--name", name)

    # A restarted learner may find files of this run or of an earlier one.
    found = readable_checkpoints(config.run.checkpoints) if config.run.resume_from else {}
    epochs = [info.version.epoch for info in found.values()]
    begun_after = ("--begun-after", str(max(epochs))) if epochs else ()
    generators = range(config.generators.generators.count)
    workers = range(config.broker.reward.workers)
    return [
        role("broker", "slipstream.broker.main", on_restart=("--restarted",)),
        *(named(f"generator-{i}", "slipstream.generators.main") for i in generators),
        *(
            role(
                name,
                "slipstream.learner.main",
                *(("--node", str(node)) if len(nodes) > 1 else ()),
                on_restart=("--resume", "auto", *begun_after),
            )
            for node, name in enumerate(nodes)
        ),
        *(named(f"reward-worker-{i}", "slipstream.broker.reward_worker.main") for i in workers),
    ]


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
    """Return the process of an additional generator; arguments as in plan_roles.

    Raises:
        ConfigError: there is no GPU for it.
    """
    anywhere = config.with_settings("deploy", min_generators=0, max_generators=0)
    larger = anywhere.with_settings("generators", count=number_of(name) + 1)
    plans = plan_roles(larger, resolved, gpus=gpus, python=python)
    return next(plan for plan in plans if plan.name == name)


def _places(config: RunConfig, num_gpus: int) -> dict[str, Place]:
    layout, count = config.learner.layout, config.generators.generators.count
    hosts = config.deploy.hosts
    nodes = dict(zip(learner_names(layout), hosts, strict=False))
    if config.generators.device == "cpu":
        others = hosts[layout.nodes :] or hosts[1:] or hosts
        places = {f"generator-{i}": others[i % len(others)] for i in range(count)}
        return {name: (host, None) for name, host in (nodes | places).items()}
    ranks = layout.ranks_per_node
    if num_gpus < ranks:
        raise ConfigError(f"learner.ranks = {ranks}, but {hosts[0]} has {num_gpus} GPUs")
    size = config.generators.generators.num_ranks  # GPUs of an engine, all on one host
    free = [
        engine
        for host in hosts
        for engine in _engines(host, ranks if host in nodes.values() else 0, num_gpus, size)
    ]
    if len(free) < count and not config.deploy.share_gpus:
        where = "this host has" if len(hosts) == 1 else f"{len(hosts)} hosts have"
        each = f" of {size} GPUs each (generators.sglang.tp_size)" if size > 1 else ""
        raise ConfigError(
            f"{where} {len(hosts) * num_gpus} GPUs; learner.ranks = {layout.ranks} and "
            f"generators.count = {count}{each} need {layout.ranks + count * size}, unless "
            "deploy.share_gpus is on"
        )
    shared = [engine for host in hosts for engine in _engines(host, 0, num_gpus, size)]
    engines = free if len(free) >= count else shared
    if count and not engines:
        raise ConfigError(
            f"generators.sglang.tp_size = {size}, but a host has {num_gpus} GPUs: the ranks of an "
            "engine are on one host, unless generators.nodes says otherwise"
        )
    return {
        **{name: (host, tuple(range(ranks))) for name, host in nodes.items()},
        **{f"generator-{i}": engines[i % len(engines)] for i in range(count)},
    }


def _engines(host: str, first: int, num_gpus: int, size: int) -> list[Place]:
    """Return the GPUs of the engines that fit on a host from GPU ``first`` on."""
    starts = range(first, num_gpus - size + 1, size)
    return [(host, tuple(range(start, start + size))) for start in starts]
