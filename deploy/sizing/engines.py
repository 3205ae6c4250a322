"""Pure: the ranks of an engine that hold a model, and how fast it generates, by a roofline.

A decoding step of B sequences at a mean context of l tokens, on an engine of t ranks:

    reads       2 (D + E u) + B l kv bytes, of t GPUs' memory, at a share of its rate
    computes    2 P' B FLOPs on t GPUs, at the same share of their peak

and takes the longer of both, and 2 L messages of its ranks. D parameters without experts', E
experts', u the share of them that B tokens touch, 1 - (1 - k / n)^B of n experts, P' parameters of
a token, kv bytes of its cache.
Prompts are computed once for each group. Nothing is added for kernels' starts or sampling.
"""

import math
from dataclasses import dataclass

from slipstream.deploy.config import RunConfig
from slipstream.deploy.launch.memory import generator_memory, kv_bytes_per_token
from slipstream.deploy.sizing.gpus import Cluster
from slipstream.learner.memory import MemoryPart
from slipstream.learner.model.flops import num_multiplied_parameters
from slipstream.learner.model.hf_config import HfConfig
from slipstream.wire.errors import ConfigError

_ELEMENT = 2
_MESSAGE_S = 15e-6  # a small sum over an engine's ranks on one host
_FAR_MESSAGE_S = 50e-6  # and over hosts
_FEWEST_SEQUENCES = 4  # of the longest kind that the cache of an engine must hold


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """An engine of so many GPUs, and what each of them holds."""

    ranks: int
    groups: int  # of attention (attn_dp_size)
    nodes: int
    memory: tuple[MemoryPart, ...]
    cached_tokens: float  # that its caches hold, together

    @property
    def sglang(self) -> dict[str, int]:
        """The settings of [generators.sglang] that say so."""
        groups = {"attn_dp_size": self.groups} if self.groups > 1 else {}
        return {"tp_size": self.ranks, **groups}


def engine_size(
    hf: HfConfig, config: RunConfig, cluster: Cluster, most_gpus: int, *, fewest_gpus: int = 1
) -> EngineSize:
    """Return the smallest engine that SGLang can have and whose cache holds a few long answers.

    Raises:
        ConfigError: none of so many GPUs does.
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
    """Return the engines of twice and four times as many GPUs of one host that SGLang can have."""
    found = []
    for ranks in (2 * smallest.ranks, 4 * smallest.ranks):
        sizes = (_size(hf, config, cluster, ranks, groups) for groups in (1, 2, 4, 8))
        size = next((one for one in sizes if one is not None), None)
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
    """Return an engine of so many ranks, or None if it may not be."""
    if ranks % groups or groups > cluster.gpus_per_host:
        return None
    nodes = cluster.hosts(ranks)
    size = EngineSize(ranks=ranks, groups=groups, nodes=nodes, memory=(), cached_tokens=0)
    given = {
        name: value
        for name, value in config.generators.generators.sglang.items()
        if name not in {"tp_size", "attn_dp_size"}
    }
    try:
        sized = config.with_settings("generators", sglang={**given, **size.sglang}, nodes=nodes)
        sized = sized.with_settings("deploy", gpu_memory_gib=cluster.gpu.memory_gib)
    except ConfigError:
        return None
    parts = tuple(generator_memory(hf, sized))
    per_token = kv_bytes_per_token(hf) * groups // ranks
    return EngineSize(
        ranks=ranks,
        groups=groups,
        nodes=nodes,
        memory=parts,
        cached_tokens=parts[1].num_bytes / per_token * groups,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """The laws of one engine."""

    hf: HfConfig
    cluster: Cluster
    ranks: int

    def step_s(self, sequences: float, context: float) -> float:
        """Return the seconds of a decoding step: one token for each sequence."""
        cluster, hf = self.cluster, self.hf
        share = cluster.engine_share * self.ranks
        cache = sequences * context * kv_bytes_per_token(hf)
        reads = _ELEMENT * touched_parameters(hf, sequences) + cache
        flops = 2 * num_multiplied_parameters(hf) * sequences
        computing = max(
            reads / (share * cluster.gpu.hbm_bytes_s), flops / (share * cluster.gpu.peak_flops)
        )
        return computing + self._messages_s()

    def _messages_s(self) -> float:
        """Return the seconds of messages between ranks: two of a layer."""
        if self.ranks == 1:
            return 0.0
        each = _MESSAGE_S if self.ranks <= self.cluster.gpus_per_host else _FAR_MESSAGE_S
        return 2 * self.hf.num_hidden_layers * each

    def prompt_s(self, tokens: float) -> float:
        """Return the seconds in which prompts of so many tokens are computed."""
        rate = self.cluster.engine_share * self.ranks * self.cluster.gpu.peak_flops
        return 2 * num_multiplied_parameters(self.hf) * tokens / rate


def touched_parameters(hf: HfConfig, sequences: float) -> float:
    """Return the parameters that a decoding step of so many sequences reads."""
    experts = hf.num_sparse_layers * hf.num_routed_experts * 3 * hf.hidden_size * hf.expert_inner
    dense = hf.num_parameters - experts
    if not experts:
        return float(dense)
    chosen = hf.experts_per_token / hf.num_routed_experts
    return dense + experts * -math.expm1(sequences * math.log1p(-min(chosen, 1 - 1e-9)))
