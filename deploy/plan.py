"""Pure: which processes a run on one host needs."""

import sys
from dataclasses import dataclass
from pathlib import Path

from deploy.config import RunConfig


@dataclass(frozen=True, slots=True)
class RolePlan:
    """One process of a run."""

    name: str
    command: tuple[str, ...]
    restartable: bool  # its work is leased, so another incarnation can go on


def plan_roles(config: RunConfig, resolved: Path) -> list[RolePlan]:
    """Return the processes in the order of their start; the broker comes first."""

    def role(name: str, module: str, *arguments: str, restartable: bool = False) -> RolePlan:
        command = (sys.executable, "-m", module, "--config", str(resolved), *arguments)
        return RolePlan(name, command, restartable)

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
