"""Pure: ranks of an engine that hold a model. Their speed is in engine_law.py."""

from dataclasses import dataclass, replace

from slipstream.deploy.config import RunConfig
from slipstream.deploy.predict.laws.gpus import Cluster
from slipstream.deploy.predict.memory.gpu import generator_memory, rank_kv_bytes
from slipstream.deploy.predict.memory.learner_rank import MemoryPart
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.hf_config import HfConfig

_FEWEST_SEQUENCES = 4  # longest sequences that an engine's cache must hold


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """An engine of some GPUs, and the memory of each."""

    ranks: int
    groups: int  # attention groups (attn_dp_size)
    expert_groups: int = 1  # groups of ranks with as many of the experts (ep_size)
    nodes: int
    memory: tuple[MemoryPart, ...]
    cached_tokens: float  # capacity of all caches together

    @property
    def sglang(self) -> dict[str, int]:
        """The settings of [generators.sglang] for this size."""
        groups = {"attn_dp_size": self.groups, "ep_size": self.expert_groups}
        return {"tp_size": self.ranks, **{name: n for name, n in groups.items() if n > 1}}


def engine_size(
    hf: HfConfig, config: RunConfig, cluster: Cluster, most_gpus: int, *, fewest_gpus: int = 1
) -> EngineSize:
    """Return the smallest engine that SGLang accepts and whose cache holds a few long answers.

    Raises:
        ConfigError: no engine of this many GPUs does.
    """
    longest = longest_tokens(config)
    ranks, largest = fewest_gpus, 0
    while ranks <= most_gpus:
        for groups in (1, 2, 4, 8):
            size = _size(hf, config, cluster, ranks, groups)
            if size is None:
                continue
            largest = ranks
            if size.cached_tokens >= _FEWEST_SEQUENCES * longest:
                return size
        ranks *= 2
    raise ConfigError(
        f"no engine of up to {most_gpus} GPUs of {cluster.gpu.memory_gib:g} GiB (--gpu) holds "
        f"run.model and {_FEWEST_SEQUENCES} sequences of {longest:,} tokens (the largest that "
        f"generators.sglang.tp_size allows is of {largest}): expected more GPUs, larger ones, or a "
        "smaller sampling.max_response_tokens"
    )


def larger_engines(
    hf: HfConfig, config: RunConfig, cluster: Cluster, smallest: EngineSize
) -> list[EngineSize]:
    """Return the engines with two and four times as many GPUs, on one host, that SGLang accepts."""
    found = []
    for ranks in (2 * smallest.ranks, 4 * smallest.ranks):
        sizes = (_size(hf, config, cluster, ranks, groups) for groups in (1, 2, 4, 8))
        size = next((candidate for candidate in sizes if candidate is not None), None)
        if size is not None and ranks <= cluster.gpus_per_host:
            found.append(size)
    return found


def longest_tokens(config: RunConfig) -> int:
    """Return the most tokens of a prompt and its answer."""
    sampling = config.generators.sampling
    return sampling.max_prompt_tokens + sampling.max_response_tokens


def _size(
    hf: HfConfig, config: RunConfig, cluster: Cluster, ranks: int, groups: int
) -> EngineSize | None:
    """Return an engine with this many ranks, or None if it is not allowed.

    As many of its ranks share an expert as in the settings. Without ep_size there all ranks do, or
    each has experts of its own where their parts are not allowed.
    """
    if ranks % groups or groups > cluster.gpus_per_host:
        return None
    generators = config.generators.generators
    sharing = generators.num_ranks // generators.expert_groups
    by_experts = [max(1, ranks // sharing)] if generators.expert_groups > 1 else [1]
    if generators.expert_groups == 1 and hf.num_routed_experts and ranks > 1:
        by_experts.append(ranks)
    sizes = (_divided(hf, config, cluster, ranks, groups, number) for number in by_experts)
    return next((size for size in sizes if size is not None), None)


def _divided(
    hf: HfConfig, config: RunConfig, cluster: Cluster, ranks: int, groups: int, expert_groups: int
) -> EngineSize | None:
    generators = config.generators.generators
    size = EngineSize(
        ranks=ranks,
        groups=groups,
        expert_groups=expert_groups,
        nodes=cluster.hosts(ranks),
        memory=(),
        cached_tokens=0,
    )
    given = {
        name: value
        for name, value in generators.sglang.items()
        if name not in {"tp_size", "attn_dp_size", "ep_size"}
    }
    try:
        sized = config.with_settings(
            "generators", sglang={**given, **size.sglang}, nodes=size.nodes
        )
        sized = sized.with_settings("deploy", gpu_memory_gib=cluster.gpu.memory_gib)
    except ConfigError:
        return None
    parts = tuple(generator_memory(hf, sized))
    per_token = rank_kv_bytes(hf, ranks, groups, element_bytes=generators.cache_bytes)
    cached_tokens = parts[1].num_bytes / per_token * groups
    return replace(size, memory=parts, cached_tokens=cached_tokens)
