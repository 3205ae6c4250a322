"""Pure: the batch script with which Slurm starts a run.

The broker, the learner and the reward workers are on the first node, where they meet at Unix
sockets. Generators are on the others; they reach the broker and the weights over TCP, and prove
a key.
"""

import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from slipstream.deploy.config import RunConfig
from slipstream.wire.errors import ConfigError

SCRIPT = "run.sbatch"
_BODY = Path(__file__).with_name("slurm.sh")
_WORD = re.compile(r"[A-Za-z0-9_.,:-]*")
_STOP_PATIENCE = 6  # times deploy.stop_timeout_s, as under `slipstream run`
_MAX_PORT = 65_534  # buckets of weights take the port after weightbus.listen's


@dataclass(frozen=True, slots=True)
class Origin:
    """What a run is started with, as the nodes see it; all paths are absolute."""

    config: Path
    overrides: tuple[str, ...]
    folder: Path  # in which every role runs: relative paths in the settings start here
    python: str


def slurm_files(config: RunConfig, origin: Origin) -> dict[str, str]:
    """Return the text of each file by its name.

    Raises:
        ConfigError: a setting that this script cannot carry out, or that Slurm would misread.
    """
    _check(config)
    slurm = config.deploy.slurm
    run, weightbus = config.run, config.learner.weightbus
    count = config.generators.generators.count
    on_gpus = config.generators.device != "cpu"
    size = config.generators.generators.num_ranks if on_gpus else 1
    gpus = config.deploy.gpus_per_host if on_gpus else 0
    per_node = slurm.generators_per_node or (gpus // size if gpus else 1)
    nodes = 1 + math.ceil(count / per_node)
    options = {
        "job-name": re.sub(r"[^A-Za-z0-9_.-]", "-", run.name),
        "nodes": str(nodes),
        "ntasks-per-node": "1",
        "exclusive": "",
        "requeue": "",
        "open-mode": "append",
        "signal": f"B:TERM@{slurm.grace_s}",
        "time": slurm.time_limit,
        "partition": slurm.partition,
        "account": slurm.account,
        "gpus-per-node": str(gpus) if gpus else "",
    }
    flags = {"exclusive", "requeue"}
    head = "".join(
        f"#SBATCH --{name}\n" if name in flags else f"#SBATCH --{name}={value}\n"
        for name, value in options.items()
        if value or name in flags
    )
    folder = origin.folder / run.folder  # an absolute run.dir stays what it is
    keys = origin.folder / (config.broker.broker.keys or folder / "keys")
    overrides = [*origin.overrides, f"broker.keys={keys}"]
    if weightbus.transport == "auto":
        overrides.append("weightbus.transport=tcp")  # a collective's sockets prove no keys
    ranks = config.learner.learner.ranks
    values = {
        "python": shlex.quote(origin.python),
        "config": shlex.quote(str(origin.config)),
        "work_folder": shlex.quote(str(origin.folder)),
        "run_folder": shlex.quote(str(folder)),
        "keys": shlex.quote(str(keys)),
        "overrides": f"({' '.join(map(shlex.quote, overrides))})",
        "broker_port": str(slurm.port),
        "weights_port": str(slurm.port + 1),
        "generators": str(count),
        "generators_per_node": str(per_node),
        "reward_workers": str(config.broker.reward.workers),
        "gpus_per_generator": str(size if gpus else 0),
        "learner_gpus": ",".join(map(str, range(ranks))) if gpus else "",
        "stop_limit_s": str(math.ceil(_STOP_PATIENCE * config.deploy.stop_timeout_s)),
        "max_restarts": str(config.deploy.max_restarts),
    }
    settings = "".join(f"{name}={value}\n" for name, value in values.items())
    return {SCRIPT: f"#!/bin/bash\n{head}\n{settings}\n{_BODY.read_text()}"}


def _check(config: RunConfig) -> None:
    slurm, ranks = config.deploy.slurm, config.learner.learner.ranks
    for name in ("partition", "account", "time_limit"):
        value = getattr(slurm, name)
        if not _WORD.fullmatch(value):
            raise ConfigError(
                f"deploy.slurm.{name} = {value!r}: expected letters, digits and any of _.,:-"
            )
    if slurm.port + 1 > _MAX_PORT:
        raise ConfigError(
            f"deploy.slurm.port = {slurm.port}: this port and the next two are used, so it is "
            f"{_MAX_PORT - 1} at most"
        )
    if not config.generators.generators.count:
        raise ConfigError("generators.count = 0: a run under Slurm needs a generator")
    if (layout := config.learner.layout).nodes > 1:
        raise ConfigError(
            f"learner.ranks_per_node = {layout.ranks_per_node} puts learner.ranks = {ranks} on "
            "several nodes: "
            "the script for Slurm starts a learner on one node"
        )
    if config.generators.device == "cpu":
        return
    gpus, size = config.deploy.gpus_per_host, config.generators.generators.num_ranks
    if not gpus:
        raise ConfigError("deploy.gpus_per_host = 0: give the number of GPUs that a node has")
    if ranks > gpus:
        raise ConfigError(f"learner.ranks = {ranks}, but deploy.gpus_per_host = {gpus}")
    wanted = max(1, slurm.generators_per_node) * size
    if wanted > gpus:
        raise ConfigError(
            f"deploy.slurm.generators_per_node = {slurm.generators_per_node} engines of {size} "
            f"GPUs (generators.sglang.tp_size), but deploy.gpus_per_host = {gpus}"
        )
