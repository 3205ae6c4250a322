"""Pure: seconds of an engine, from a few numbers that hardware explains.

A roofline (Williams et al. 2009): a decode step reads each needed weight once, and the keys and
values of every earlier token, and multiplies each sequence's newest token with the weights. Reading
weights and multiplying overlap; the rest of a step is constant.

    step(n, C) = base + max(read(n), n m) + C k      seconds; n sequences, C tokens in the cache

    read(n)    bytes of the weights that n tokens use, over the bandwidth
    m          2 N_active / FLOP/s          k      bytes of one token's keys and values / bandwidth

All ranks of an engine share the bandwidth. If a layer has fewer heads of keys and values than
ranks, or one compressed vector (MLA), several ranks keep the same ones, and each reads its copy.
"""

from dataclasses import dataclass, replace
from typing import Self

from slipstream.deploy.predict.laws.gpus import Cluster, Gpu
from slipstream.deploy.predict.memory.gpu import GIB, kv_bytes_per_token, kv_copies, state_bytes
from slipstream.wire.models.flops import num_multiplied_parameters
from slipstream.wire.models.fp8 import bytes_per_parameter
from slipstream.wire.models.hf_config import HfConfig

_WEIGHT_BYTES = 2  # bytes of one parameter: bfloat16
_MESSAGE_S = 15e-6  # a small sum over an engine's ranks on one host
_FAR_MESSAGE_S = 50e-6  # the same over hosts
_MESSAGES = 2  # messages per layer


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaw:
    """Seconds of each part of an engine's work."""

    base_s: float = 0.0  # constant part of a decode step
    weights_s: float = 0.0  # read the weights that every token uses
    experts_s: float = 0.0  # read all experts
    expert_share: float = 1.0  # share of the experts that one token uses
    sequence_s: float = 0.0  # multiply one token with the weights
    context_s: float = 0.0  # read one token's keys and values
    prefill_s: float = 0.0  # compute one token of a prompt
    max_cached_tokens: float = float("inf")
    state_tokens: float = 0.0  # cached tokens that are as large as a sequence's recurrent state

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a number >= 0")
        if not 0 < self.expert_share <= 1:
            raise ValueError(f"expert_share is {self.expert_share}, expected within (0, 1]")
        if self.step_s(1, 0.0) + self.context_s <= 0:
            raise ValueError("an engine whose steps take no time")

    @classmethod
    def of(
        cls,
        hf: HfConfig,
        gpu: Gpu,
        *,
        num_gpus: int,
        attention_groups: int = 1,
        base_s: float,
        share: float,
        memory_share: float = 0.85,
        weight_bytes: float = _WEIGHT_BYTES,
        cache_bytes: int = 2,
    ) -> Self:
        """Return the law of an engine on some GPUs with tensor parallelism.

        Args:
            hf: the policy's architecture.
            gpu: Kind of GPU.
            num_gpus: GPUs of one engine.
            attention_groups: Groups of GPUs with separate sequences in attention.
            base_s: seconds of a step without reading and multiplying.
            share: Reached share of the memory's bandwidth, and of the peak.
            memory_share: Share of the memory for weights and cache.
            weight_bytes: Mean size of a parameter.
            cache_bytes: Size of a number of keys and values.

        Raises:
            ValueError: the weights do not fit.
        """
        bandwidth = gpu.hbm_bytes_s * share * num_gpus
        flops = gpu.peak_flops * share * num_gpus
        active = num_multiplied_parameters(hf)
        routed = hf.num_routed_experts
        experts = expert_parameters(hf)
        # each group has the whole attention; ranks of a group may keep the same keys and values
        dense = hf.num_parameters - experts + hf.num_attention_parameters * (attention_groups - 1)
        kv_bytes = kv_bytes_per_token(hf, element_bytes=cache_bytes)
        kv_bytes *= kv_copies(hf, num_gpus // attention_groups)
        weights = weight_bytes * (dense + experts)
        cache = memory_share * gpu.memory_gib * GIB * num_gpus - weights
        if cache <= 0:
            raise ValueError(
                f"{num_gpus} GPUs of {gpu.memory_gib:g} GiB do not hold {weights / 1e9:.0f} GB of "
                "weights"
            )
        return cls(
            base_s=base_s,
            weights_s=weight_bytes * dense / bandwidth,
            experts_s=weight_bytes * experts / bandwidth,
            expert_share=hf.experts_per_token / routed if routed else 1.0,
            sequence_s=2 * active / flops,
            context_s=kv_bytes / bandwidth,
            prefill_s=2 * active / flops,
            max_cached_tokens=cache / kv_bytes,
            state_tokens=state_bytes(hf) / kv_bytes,
        )

    def step_s(self, num_sequences: float, context: float) -> float:
        """Return the seconds of one decode step.

        Args:
            num_sequences: Sequences that get a token.
            context: Earlier tokens of all these sequences.
        """
        return self.flat_s(num_sequences) + self.context_s * context

    def flat_s(self, num_sequences: float) -> float:
        """Return the part of a step that does not depend on the cache."""
        read = self.weights_s
        if self.experts_s:
            read += self.experts_s * (1.0 - (1.0 - self.expert_share) ** num_sequences)
        return self.base_s + max(read, num_sequences * self.sequence_s)

    def slower(self, factor: float) -> Self:
        """Return the law of an engine that is slower by ``factor`` at everything."""
        names = ("base_s", "weights_s", "experts_s", "sequence_s", "context_s", "prefill_s")
        return replace(self, **{name: factor * getattr(self, name) for name in names})


def expert_parameters(hf: HfConfig) -> int:
    """Return the parameters of all routed experts; a token uses only a few experts."""
    return hf.num_sparse_layers * hf.num_routed_experts * 3 * hf.hidden_size * hf.expert_inner


def engine_law(
    hf: HfConfig,
    cluster: Cluster,
    *,
    ranks: int,
    attention_groups: int = 1,
    memory_share: float = 0.85,
    is_fp8: bool = False,
    cache_bytes: int = 2,
) -> EngineLaw:
    """Return the law of an engine with this many ranks on hosts of one kind.

    Raises:
        ValueError: the ranks do not hold the weights.
    """
    messages_s = 0.0
    if ranks > 1:
        each = _MESSAGE_S if ranks <= cluster.gpus_per_host else _FAR_MESSAGE_S
        messages_s = _MESSAGES * hf.num_hidden_layers * each
    return EngineLaw.of(
        hf,
        cluster.gpu,
        num_gpus=ranks,
        attention_groups=attention_groups,
        base_s=cluster.engine_base_s + messages_s,
        share=cluster.engine_share,
        memory_share=memory_share,
        weight_bytes=bytes_per_parameter(hf, is_fp8=is_fp8),
        cache_bytes=cache_bytes,
    )
