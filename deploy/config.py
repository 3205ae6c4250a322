"""The settings of a run as a whole: every section decoded, every cross-check made."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import tomli_w

from slipstream.broker.config import BrokerSettings, broker_settings
from slipstream.deploy.targets import (
    ComposeTable,
    KubernetesTable,
    RayTable,
    SkyPilotTable,
    SlurmTable,
)
from slipstream.generators.config import GeneratorSettings, generator_settings
from slipstream.learner.config import LearnerSettings, learner_settings, learner_tenants
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.fetched import content_hash, is_fetched
from slipstream.wire.files.remote import is_url
from slipstream.wire.files.replace import replace_file
from slipstream.wire.settings.load import Section, Table, section, to_table
from slipstream.wire.settings.sections import (
    AtLeast0,
    LoggingSection,
    Positive,
    RunSection,
    run_section,
)
from slipstream.wire.settings.tenants import Tenant, tenants_of


class DeploySection(Section, frozen=True, kw_only=True):
    """[deploy]: how `slipstream run` supervises the processes of one host.

    A process that fails is started again: the broker reads its ledger back, the learner resumes
    from its newest checkpoint, and work of a generator or reward worker is leased to others.
    Several hosts are planned by `--dry-run` only; `[deploy.ray]` is for a Ray cluster.
    """

    hosts: tuple[str, ...] = ("localhost",)
    """Hosts of the run: broker, learner and reward workers on the first, generators after it."""
    gpus_per_host: AtLeast0 = 0
    """GPUs of each host; 0 is the number on this host."""
    gpu_memory_gib: Positive = 80.0
    """Memory of one GPU, for what --dry-run and `slipstream plan` estimate."""
    share_gpus: bool = False
    """Let generators run on the learner's GPUs when there are not enough of them."""
    cores: dict[str, tuple[AtLeast0, ...]] = msgspec.field(default_factory=dict)
    """CPU cores by role or process, such as { learner = [1], generator-0 = [2, 3] }."""
    max_restarts: AtLeast0 = 3
    """A process that fails more often than this within deploy.restart_window_s ends the run."""
    restart_window_s: Positive = 600.0
    """Failures longer ago than this are forgiven."""
    restart_backoff_s: Positive = 1.0
    """Pause before a restart; doubled each time."""
    save_timeout_s: Positive = 600.0
    """After Ctrl-C, kill a learner that is idle (no CPU, no log) this long before it has saved a
    checkpoint, or that still saves after six times this; a second Ctrl-C kills it at once."""
    stop_timeout_s: Positive = 20.0
    """Kill a process that was asked to end and is idle (no CPU, no log) this long, or has not ended
    after six times this."""
    time_limit_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """End a run that takes longer, as failed; 0 is no limit."""
    min_generators: AtLeast0 = 0
    """With max_generators: the fewest that are kept while they wait for the learner."""
    max_generators: AtLeast0 = 0
    """Start one more while the learner waits for the generators, up to so many, and end one while
    they wait for it. 0 keeps generators.count, but for `slipstream scale`."""
    scale_every_s: Positive = 120.0
    """Time over which waiting is measured, and between two such changes."""
    ray: RayTable = RayTable()
    slurm: SlurmTable = SlurmTable()
    kubernetes: KubernetesTable = KubernetesTable()
    compose: ComposeTable = ComposeTable()
    skypilot: SkyPilotTable = SkyPilotTable()


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All roles of one run."""

    table: Table
    broker: BrokerSettings
    generators: GeneratorSettings
    learner: LearnerSettings
    deploy: DeploySection
    tenants: tuple[Tenant["RunConfig"], ...] = ()  # runs that share learner and engines

    @property
    def run(self) -> RunSection:
        """Section [run]."""
        return self.broker.run

    def with_settings(self, name: str, **values: object) -> "RunConfig":
        """Return this run with other values in one section.

        Raises:
            ConfigError: naming the setting.
        """
        return run_config({**self.table, name: {**self.table.get(name, {}), **values}})


def run_config(table: Table) -> RunConfig:
    """Decode all sections and check settings that concern more than one role.

    Raises:
        ConfigError: naming the setting.
    """
    tenants = tenants_of(table, run_config)
    learner_tenants(table)  # its checks
    config = RunConfig(
        table=table,
        broker=_broker_of(table, tenants),
        generators=generator_settings(table),
        learner=learner_settings(table),
        deploy=section(table, "deploy", DeploySection),
        tenants=tenants,
    )
    _refuse_deploy(config)
    if tenants:
        if config.deploy.max_generators:
            raise ConfigError(
                "deploy.max_generators with [tenants]: a pool keeps its generators.count; leave it "
                "out"
            )
        return config
    if config.learner.checkpoint.keep_best and not config.broker.eval.enabled:
        raise ConfigError(
            "checkpoint.keep_best needs held-out problems: set eval.file or eval.sets"
        )
    if config.learner.weightbus.listen and not config.broker.broker.listen:
        raise ConfigError(
            "weightbus.listen needs broker.listen too: generators on other hosts ask the broker "
            "where the weights are, and it knows their keys"
        )
    replicas = config.learner.learner.sizes.replicas(config.learner.learner.ranks)
    smallest = config.run.fewest_groups * config.run.group_size
    if config.run.epochs and smallest < replicas:
        raise ConfigError(
            f"the last step of run.epochs may hold run.min_groups = {config.run.fewest_groups} "
            f"groups of {config.run.group_size}, but learner.ranks make {replicas} replicas that "
            "need a trajectory each"
        )
    sampling = config.generators.sampling
    longest = sampling.max_prompt_tokens + sampling.max_response_tokens
    if longest > config.learner.learner.max_tokens_per_microbatch:
        raise ConfigError(
            f"a trajectory of sampling.max_prompt_tokens + sampling.max_response_tokens = "
            f"{longest} tokens does not fit into learner.max_tokens_per_microbatch = "
            f"{config.learner.learner.max_tokens_per_microbatch}"
        )
    return config


def _broker_of(table: Table, tenants: Sequence[Tenant[RunConfig]]) -> BrokerSettings:
    """Return the broker's settings; a pool has none but those of its tenants."""
    if not tenants:
        return broker_settings(table)
    first = tenants[0].settings.broker
    return msgspec.structs.replace(
        first, run=run_section(table), logging=section(table, "logging", LoggingSection)
    )


def _refuse_deploy(config: RunConfig) -> None:
    """Refuse a [deploy] that this host or other sections contradict.

    Raises:
        ConfigError: naming the setting.
    """
    deploy, count = config.deploy, config.generators.generators.count
    if not deploy.hosts:
        raise ConfigError("deploy.hosts is empty")
    available = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    for name, cores in deploy.cores.items():
        if available and not available.issuperset(cores):
            raise ConfigError(
                f"deploy.cores.{name} = {list(cores)}: this process may use {sorted(available)}"
            )
    if deploy.max_generators and not deploy.min_generators <= count <= deploy.max_generators:
        raise ConfigError(
            f"generators.count = {count} must lie between deploy.min_generators = "
            f"{deploy.min_generators} and deploy.max_generators = {deploy.max_generators}"
        )
    if deploy.min_generators and not deploy.max_generators:
        raise ConfigError("deploy.min_generators goes with deploy.max_generators")
    if deploy.share_gpus and config.learner.weightbus.backend != "gloo":
        raise ConfigError(
            "deploy.share_gpus needs weightbus.backend = gloo: NCCL connects no two processes on "
            f"one GPU, got {config.learner.weightbus.backend}"
        )


def refuse_engines_on_several_hosts(config: RunConfig) -> None:
    """Refuse to start engines whose ranks are on more than one host.

    Raises:
        ConfigError: with the commands that do it.
    """
    generators = config.generators.generators
    if generators.nodes == 1 or not generators.count:
        return
    last = generators.nodes - 1
    which = "1" if last == 1 else f"N, N from 1 to {last}"
    raise ConfigError(
        f"generators.nodes = {generators.nodes}: an engine on several hosts is started by hand. "
        "Set generators.count = 0 here, then on its first host start-generator --config run.toml "
        "--name generator-0 --rendezvous HOST:PORT run.broker=tcp://BROKER:PORT "
        "run.key_file=FILE, with an address of that host, and on each other host the same with "
        f"--follow {which}"
    )


def with_contents(config: RunConfig) -> RunConfig:
    """Return the run with the hash of what each URL or name of the hub names, the same for all.

    Raises:
        ConfigError: one cannot be listed, or [algo], by which models are used, is wrong.
    """
    run, data, evaluation = config.run, config.broker.data, config.broker.eval
    files = {"data.file": data.file, "eval.file": evaluation.file}
    for setting, tables in (("data.sources", data.sources), ("eval.sets", evaluation.sets)):
        files |= {f"{setting}.{name}.file": table.file for name, table in tables.items()}
    algo, models = config.learner.algo, {"run.model": run.model}
    beside = (algo.kl.get("reference", ""), algo.teacher.get("model", ""))
    if any(is_fetched(str(name)) for name in beside):
        from slipstream.learner.training.algorithm import algorithm_of  # torch

        choice = algorithm_of(config.learner).choice
        if choice.needs_reference:
            models["algo.kl.reference"] = choice.kl.reference
        if choice.has_teacher:
            models["algo.teacher.model"] = choice.teacher.model
    contents = dict(run.contents)
    for setting, url in {**models, **files}.items():
        is_model = setting in models
        if (is_fetched(url) if is_model else is_url(url)) and url not in contents:
            contents[url] = content_hash(url, setting, is_model=is_model)
    return config.with_settings("run", contents=contents) if contents else config


def free_name(run: RunSection) -> str:
    """Return run.name, or the first of NAME-2, NAME-3, ... whose folder does not exist."""
    names = [run.name, *(f"{run.name}-{i}" for i in range(2, 10_000))]
    return next(name for name in names if not (Path(run.dir) / name).exists())


def nearest_folder(path: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    folder = path.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder


def write_resolved(
    config: RunConfig, path: Path, *, tenants: Mapping[str, Table] | None = None
) -> None:
    """Write every setting of the run with its value; secrets are not settings.

    Of a pool, what its ``tenants`` share, and the tables that name these.
    """
    text = resolved_text(config) if tenants is None else _pool_text(config, tenants)
    replace_file(path, text.encode())


def _pool_text(config: RunConfig, tenants: Mapping[str, Table]) -> str:
    learner = config.learner
    shared = {
        "run": to_table(config.run),
        "sampling": to_table(learner.sampling),
        "generators": to_table(config.generators.generators),
        "weightbus": to_table(config.generators.weightbus),
        "learner": to_table(learner.learner),
        "profile": to_table(learner.profile),
        "logging": to_table(config.broker.logging),
        "deploy": to_table(config.deploy),
        "tenants": tenants,
    }
    return tomli_w.dumps(shared)


def resolved_text(config: RunConfig) -> str:
    """Return every setting of the run with its value, as TOML."""
    resolved = {
        "run": to_table(config.run),
        "data": to_table(config.broker.data),
        "eval": to_table(config.broker.eval),
        "broker": to_table(config.broker.broker),
        "reward": to_table(config.broker.reward),
        "environment": to_table(config.generators.environment),
        "sampling": to_table(config.generators.sampling),
        "generators": to_table(config.generators.generators),
        "weightbus": to_table(config.generators.weightbus),
        "learner": to_table(config.learner.learner),
        "algo": to_table(config.learner.algo),
        "checkpoint": to_table(config.learner.checkpoint),
        "lora": to_table(config.learner.lora),
        "profile": to_table(config.learner.profile),
        "logging": to_table(config.broker.logging),
        "deploy": to_table(config.deploy),
    }
    return tomli_w.dumps(resolved)
