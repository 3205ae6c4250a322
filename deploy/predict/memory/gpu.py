"""Pure: how much memory a run needs per GPU, part by part, with the formula of each.

An estimate, to see in advance whether a run can fit; the learner's is in `learner_rank.py`.
P parameters, t ranks of an engine.
"""

from collections.abc import Sequence

import msgspec

from slipstream.deploy.config import RunConfig
from slipstream.deploy.predict.memory.learner_rank import (
    MemoryPart,
    adapter_parameters,
    learner_stages,
    total_bytes,
)
from slipstream.generators.config import GeneratorSettings, GeneratorsSection
from slipstream.generators.versions.shadow_state import has_room
from slipstream.learner.config import LearnerSection, LearnerSettings
from slipstream.wire.models.fp8 import bytes_per_parameter
from slipstream.wire.models.hf_config import HfConfig

GIB = 2**30
RESERVE_GIB = 4.0  # memory of a GPU that CUDA and NCCL take
_SHADOW = "second copy (generators.shadow)"
_DEFAULT_STATIC_SHARE = 0.85  # share of a GPU that SGLang takes for weights and cache


def kv_bytes_per_token(hf: HfConfig, *, element_bytes: int = 2) -> int:
    """Return the key and value cache of one token over all layers."""
    if hf.family.is_latent:  # engines keep it compressed, and expand it on reading
        return hf.num_hidden_layers * hf.sizes["key_rank_and_rotary"] * element_bytes
    return 2 * len(hf.attention_layers) * hf.num_query_groups * hf.kv_channels * element_bytes


def state_bytes(hf: HfConfig, *, element_bytes: int = 2) -> int:
    """Return what an engine keeps of a sequence in layers of linear attention, of any length.

    Each has its recurrent state in float32, and the inputs of the convolution's earlier taps.
    """
    layers = hf.num_hidden_layers - len(hf.attention_layers)
    mixed = 2 * hf.sizes["linear_keys"] + hf.sizes["linear_values"]
    return layers * (4 * hf.state_size + mixed * (hf.sizes["taps"] - 1) * element_bytes)


def kv_copies(hf: HfConfig, ranks: int) -> int:
    """Return how many ranks of one attention keep the same part of a token's cache.

    Heads of keys and values are divided among the ranks as far as possible. Latent attention has no
    heads in its cache, so each rank keeps all of it.
    """
    return ranks if hf.family.is_latent else max(1, ranks // hf.num_query_groups)


def rank_kv_bytes(hf: HfConfig, ranks: int, groups: int, *, element_bytes: int = 2) -> int:
    """Return a rank's bytes of one token of its group; ``groups`` attend separately."""
    of_group = ranks // groups
    return kv_bytes_per_token(hf, element_bytes=element_bytes) * kv_copies(hf, of_group) // of_group


def static_share(generators: GeneratorsSection) -> float:
    """Return the share of a GPU's memory that an engine takes for weights and cache."""
    given = generators.sglang.get("mem_fraction_static")
    return float(given) if given is not None else _DEFAULT_STATIC_SHARE


def learner_memory(
    hf: HfConfig,
    settings: LearnerSettings,
    *,
    frozen: Sequence[HfConfig] = (),
    has_critic: bool = False,
) -> list[MemoryPart]:
    """Return the memory of a learner's rank on a GPU, in the pipeline stage that needs most.

    Args:
        hf: the policy's architecture.
        settings: Settings of the learner.
        frozen: additional policies: a reference (algo.kl), a teacher (algo.teacher.model).
        has_critic: True if a critic is trained (algo.advantage).

    Raises:
        ConfigError: the settings do not divide the layers.
    """
    stages = learner_stages(hf, settings, on_gpu=True, frozen=frozen, has_critic=has_critic)
    return [part for part in max(stages, key=total_bytes) if part.num_bytes]


def fewest_tensor_ranks(
    hf: HfConfig,
    settings: LearnerSettings,
    available_bytes: float,
    *,
    frozen: Sequence[HfConfig] = (),
    has_critic: bool = False,
) -> int:
    """Return the smallest size of tensor parallelism below the settings' that fits, or theirs.

    The ranks that it frees are replicas; all else stays.

    Args:
        hf: the policy's architecture.
        settings: Settings of the learner.
        available_bytes: memory of a GPU, without what CUDA and NCCL take.
        frozen: additional policies, as in ``learner_memory``.
        has_critic: True if a critic is trained.
    """
    learner, run = settings.learner, settings.run
    for size in range(1, learner.tensor_parallel):
        smaller = msgspec.structs.replace(learner, tensor_parallel=size)
        replicas = smaller.sizes.replicas(learner.ranks)
        if learner.tensor_parallel % size or (
            run.groups_per_step * run.group_size < replicas * learner.minibatches
        ):
            continue
        given = msgspec.structs.replace(settings, learner=smaller)
        parts = learner_memory(hf, given, frozen=frozen, has_critic=has_critic)
        if total_bytes(parts) <= available_bytes:
            return size
    return learner.tensor_parallel


def shadow_bytes(memory: Sequence[MemoryPart]) -> float:
    """Return the bytes of the second copy of an engine's weights in the parts of its memory."""
    return sum(part.num_bytes for part in memory if part.what == _SHADOW)


def adapters_bytes(hf: HfConfig, generators: GeneratorSettings) -> float:
    """Return the bytes of the adapters that one rank of an engine has room for.

    It has places for all versions that it keeps and one more, of the largest rank, as if no matrix
    were split over ranks.
    """
    if not generators.lora.is_named:
        return 0.0
    count = adapter_parameters(hf, LearnerSection(), generators.lora.facts(), 0).count
    element = 4 if generators.dtype == "float32" else 2
    return float(element * count * (generators.num_kept_adapters + 1))


def generator_memory(hf: HfConfig, config: RunConfig) -> list[MemoryPart]:
    """Return the memory of one rank of an engine; the cache takes the rest of the share.

    Weights and cache come first, graphs and activations last; a second copy of the weights before
    these, if there is room for one.
    """
    generators = config.generators.generators
    ranks, groups = generators.num_ranks, generators.attention_groups
    count = (hf.num_parameters + hf.num_tower_parameters) / ranks
    split, more = " / t" if ranks > 1 else "", ""
    is_fp8 = config.generators.weightbus.is_fp8
    each = bytes_per_parameter(hf, is_fp8=is_fp8)
    if groups > 1:
        count += hf.num_attention_parameters * (groups - 1) / ranks
        more = f" + 2 A (a - 1) / t; A of the attention, a = {groups} groups"
    fraction = static_share(generators)
    pool = max(fraction * config.deploy.gpu_memory_gib * GIB - each * count, 0.0)
    adapters = adapters_bytes(hf, config.generators)
    pool = max(pool - adapters, 0.0)
    has_shadow = config.generators.keeps_shadow and has_room(each * count, free=pool)
    shadow = each * count if has_shadow else 0.0
    pool -= shadow
    copies = kv_copies(hf, ranks // groups)
    element = generators.cache_bytes
    state = state_bytes(hf) * groups // ranks
    per_token = rank_kv_bytes(hf, ranks, groups, element_bytes=element)
    law = f"{2 * element} L g d" + " a" * (groups > 1) + f" {copies}" * (copies > 1) + split
    if hf.family.is_latent:
        law = f"{element} L c, of compressed vectors that each rank keeps,"
    sampling = config.generators.sampling
    longest = sampling.max_prompt_tokens + sampling.max_response_tokens
    if state:
        law += f", and {state:,} of each sequence's recurrent state"
    sequences = pool / (per_token * longest + state)
    kept = MemoryPart(
        "versions of adapters",
        adapters,
        f"{config.generators.num_kept_adapters} + 1 places of rank {config.generators.lora.rank}",
    )
    second = MemoryPart(_SHADOW, shadow, "as the weights, where the cache keeps 3/4 of its room")
    return [
        MemoryPart(
            f"weights, {'fp8' if is_fp8 else 'bfloat16'}",
            each * count,
            f"{each:.3g} P{split}{more.replace('2 A', f'{each:.3g} A')}",
        ),
        MemoryPart(
            f"KV cache: {sequences * longest:,.0f} tokens, "
            f"{sequences:,.0f} sequences of {longest:,}",
            pool,
            f"{fraction:g} of the GPU - {'2 x ' if shadow else ''}weights; {law} = {per_token:,} "
            "bytes a token",
        ),
        *([second] if shadow else []),
        *([kept] if adapters else []),
        MemoryPart(
            "graphs and activations",
            (1 - fraction) * config.deploy.gpu_memory_gib * GIB,
            "the rest of mem_fraction_static",
        ),
    ]
