"""Pure: the pools of a run on a cluster, and what each member needs from its node."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from slipstream.deploy.config import RunConfig
from slipstream.deploy.launch.plan import (
    generator_names,
    kind_of,
    learner_names,
    reward_worker_names,
)

Strategy = Literal["PACK", "SPREAD", "STRICT_SPREAD"]


@dataclass(frozen=True, slots=True)
class Pool:
    """Processes placed together: one bundle of resources for each."""

    name: str
    strategy: Strategy
    members: tuple[str, ...]
    bundles: tuple[Mapping[str, float], ...]
    labels: tuple[Mapping[str, str], ...]  # labels that their nodes must have

    @property
    def needs(self) -> str:
        """Return the needs of the members, as text."""
        counted: dict[str, int] = {}
        for bundle, labels in zip(self.bundles, self.labels, strict=True):
            what = " + ".join(f"{name} {count:g}" for name, count in bundle.items())
            if labels:
                what += " on " + ", ".join(f"{key}={value}" for key, value in labels.items())
            counted[what] = counted.get(what, 0) + 1
        parts = ", ".join(f"{count} x ({what})" for what, count in counted.items())
        return f"the {self.name} need{'' if len(self.members) > 1 else 's'} {parts}"


def pools_of(config: RunConfig, *, uses_gpus: bool) -> tuple[Pool, ...]:
    """Return the pools: services with the broker, the learner's nodes, the generators."""
    members = {
        "services": ["broker", *reward_worker_names(config)],
        "learner": learner_names(config.learner.layout),
        "generators": generator_names(config),
    }
    return tuple(
        pool_of(config, name, names, uses_gpus=uses_gpus)
        for name, names in members.items()
        if names
    )


def pool_of(config: RunConfig, name: str, members: Sequence[str], *, uses_gpus: bool) -> Pool:
    """Return the pool of these processes; of one generator, if it is started during the run."""
    ours, kinds = config.deploy.ray, list(map(kind_of, members))
    strategy: Strategy = "SPREAD" if "generator" in kinds else "PACK"
    if kinds.count("learner") > 1:
        strategy = "STRICT_SPREAD"
    gpus = {
        "learner": config.learner.layout.ranks_per_node,
        "generator": config.generators.generators.num_ranks,
    }
    bundles = []
    for kind in kinds:
        bundle: dict[str, float] = {"CPU": ours.cpus.get(kind, 1.0)}
        if uses_gpus and kind in gpus:
            bundle["GPU"] = gpus[kind]
        bundles.append({**bundle, **ours.resources.get(kind, {})})
    labels = tuple(ours.labels.get(kind, {}) for kind in kinds)
    return Pool(name, strategy, tuple(members), tuple(bundles), labels)
