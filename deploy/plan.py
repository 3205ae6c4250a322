"""Pure: which processes a run on one host needs."""

import sys
from dataclasses import dataclass
from pathlib import Path

from deploy.config import RunConfig
from wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RolePlan:
    """One process of a run."""

    name: str
    command: tuple[str, ...]
    restartable: bool  # its work is leased, so another incarnation can go on
    gpus: tuple[int, ...] | None = None  # those it may see; None leaves them as they are


def count_gpus() -> int:
    """Return how many GPUs the driver of this host shows."""
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def plan_roles(config: RunConfig, resolved: Path, *, num_gpus: int) -> list[RolePlan]:
    """Return the processes in the order of their start; the broker comes first.

    On a host with GPUs the learner's ranks get the first ones and each generator the next.

    Raises:
        ConfigError: there are GPUs, but not enough of them.
    """
    gpus = _gpus_by_role(config, num_gpus)

    def role(name: str, module: str, *arguments: str, restartable: bool = False) -> RolePlan:
        command = (sys.executable, "-m", module, "--config", str(resolved), *arguments)
        return RolePlan(name, command, restartable, gpus.get(name))

    def named(name: str, module: str) -> RolePlan:
        return role(name, module, "--name", name, restartable=True)

    generators = range(config.generators.generators.count)
    workers = range(config.broker.reward.workers)
    return [
        role("broker", "broker.main"),
        *(named(f"generator-{i}", "generators.main") for i in generators),
        role("learner", "learner.main"),
        *(named(f"reward-worker-{i}", "broker.reward_worker") for i in workers),
    ]


def _gpus_by_role(config: RunConfig, num_gpus: int) -> dict[str, tuple[int, ...]]:
    if config.generators.device == "cpu":
        return {}
    ranks, count = config.learner.learner.ranks, config.generators.generators.count
    if num_gpus < ranks + count:
        raise ConfigError(
            f"this host has {num_gpus} GPUs; learner.ranks = {ranks} and generators.count = "
            f"{count} need {ranks + count}"
        )
    shares = {f"generator-{i}": (ranks + i,) for i in range(count)}
    return {"learner": tuple(range(ranks)), **shares}
