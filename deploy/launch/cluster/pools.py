"""Pure: the pools of a run on a cluster, and what each member needs from its node."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from slipstream.deploy.config import RunConfig
from slipstream.deploy.launch.plan import generator_names, kind_of, learner_names

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


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
    """Return the pools: services with the broker, the learner's nodes, the generators.

    Args:
        config: the run.
        uses_gpus: True if the cluster has GPUs and the run uses them.
    """
    per_node = config.learner.layout.ranks_per_node
    workers = [f"reward-worker-{i}" for i in range(config.broker.reward.workers)]
    nodes = learner_names(config.learner.layout)
    engines = generator_names(config)
    gpus = _engine_gpus(config, uses_gpus) | ({"learner": per_node} if uses_gpus else {})
    several = len(nodes) > 1
    pools = [
        _pool(config, "services", "PACK", ["broker", *workers], gpus),
        _pool(config, "learner", "STRICT_SPREAD" if several else "PACK", nodes, gpus),
    ]
    if engines:
        pools.append(_pool(config, "generators", "SPREAD", engines, gpus))
    return tuple(pools)


def pool_of_one(config: RunConfig, name: str, *, uses_gpus: bool) -> Pool:
    """Return the pool of a generator that is started during the run."""
    return _pool(config, name, "SPREAD", [name], _engine_gpus(config, uses_gpus))


def _engine_gpus(config: RunConfig, uses_gpus: bool) -> dict[str, int]:
    return {"generator": config.generators.generators.num_ranks} if uses_gpus else {}


def _pool(
    config: RunConfig, name: str, strategy: Strategy, members: list[str], gpus: Mapping[str, int]
) -> Pool:
    ours = config.deploy.ray
    kinds = list(map(kind_of, members))
    bundles = []
    for kind in kinds:
        bundle: dict[str, float] = {"CPU": ours.cpus.get(kind, 1.0)}
        if gpus.get(kind):
            bundle["GPU"] = gpus[kind]
        bundles.append({**bundle, **ours.resources.get(kind, {})})
    labels = tuple(ours.labels.get(kind, {}) for kind in kinds)
    return Pool(name, strategy, tuple(members), tuple(bundles), labels)
