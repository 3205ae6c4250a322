"""Pure: how much memory a run needs per GPU, part by part, with the formula of each.

An estimate, to see in advance whether a run can fit; P parameters, t = learner.tensor_parallel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.deploy.config import RunConfig
from slipstream.learner.model.hf_config import HfConfig

GIB = 2**30
CHUNK_BYTES = 512 * 2**20  # CUDA_CHUNK_BYTES of slipstream.algos.linear_logprobs, which needs torch
MIN_CHUNK_COLUMNS = 1024  # the same of there
_DEFAULT_STATIC_SHARE = 0.85  # of a GPU that SGLang takes for weights and cache


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One reason for memory to be used."""

    what: str
    num_bytes: float
    formula: str


def kv_bytes_per_token(hf: HfConfig, *, element_bytes: int = 2) -> int:
    """Return the key and value cache of one token over all layers."""
    return 2 * hf.num_hidden_layers * hf.num_query_groups * hf.kv_channels * element_bytes


def learner_memory(
    hf: HfConfig, config: RunConfig, *, frozen: Sequence[HfConfig] = (), has_critic: bool = False
) -> list[MemoryPart]:
    """Return the memory of the learner's rank 0, which holds most; bfloat16 weights.

    Args:
        hf: the policy's architecture.
        config: the run's settings.
        frozen: policies beside it: a reference (algo.kl), a teacher (algo.teacher.model).
        has_critic: whether a critic is (algo.advantage).
    """
    learner = config.learner.learner
    share = learner.tensor_parallel
    tokens, hidden, layers = learner.max_tokens_per_microbatch, hf.hidden_size, hf.num_hidden_layers
    own = hf.num_parameters / share
    chunk_columns = max(MIN_CHUNK_COLUMNS, CHUNK_BYTES // (4 * tokens))
    return [
        MemoryPart("weights, bfloat16", 2 * own, "2 P / t"),
        MemoryPart("gradients, float32", 4 * own, "4 P / t"),
        MemoryPart(
            "optimizer: float32 weights, two moments",
            12 * own,
            "12 P / t; its kernels take nothing more (AdamW, fused)",
        ),
        MemoryPart(
            "weight relay: buckets on their way over NCCL",
            4.0 * config.learner.weightbus.bucket_bytes,
            "4 weightbus.bucket_bytes; versions lie on the host, at most 3 x 2 P there",
        ),
        MemoryPart(
            "activations of a microbatch",
            tokens * hidden * layers * (10 + 24 / share),
            "T h L (10 + 24 / t), Korthikanti et al. 2022 eq. 2 with flash attention",
        ),
        MemoryPart(
            "logits and their gradient, a part of the vocabulary at a time",
            4 * tokens * min(hf.vocab_size / share, chunk_columns) * 3,
            f"3 chunks of {CHUNK_BYTES // 2**20} MiB, of {MIN_CHUNK_COLUMNS} columns at least",
        ),
        MemoryPart(
            "gradients of the output weights and the last hidden states",
            2 * hf.vocab_size * hidden / share + 8 * tokens * hidden,
            "2 V h / t + 8 T h: bfloat16; the sum in float32, a chunk's share and the result",
        ),
        *(
            MemoryPart("a frozen policy, bfloat16", 2 * one.num_parameters / share, "2 P' / t")
            for one in frozen
        ),
        *([MemoryPart("critic: weights, gradients, optimizer", 18 * own, "18 P / t")] * has_critic),
    ]


def generator_memory(hf: HfConfig, config: RunConfig) -> list[MemoryPart]:
    """Return the memory of one rank of an engine; the cache takes the rest of its share."""
    generators = config.generators.generators
    ranks, groups = generators.num_ranks, generators.attention_groups
    count, split, more = hf.num_parameters / ranks, " / t" if ranks > 1 else "", ""
    a_token = f"4 L g d{' a' if groups > 1 else ''}{split}"
    if groups > 1:
        count += hf.num_attention_parameters * (groups - 1) / ranks
        more = f" + 2 A (a - 1) / t; A of the attention, a = {groups} groups"
    given = generators.sglang.get("mem_fraction_static")
    fraction = float(given) if given is not None else _DEFAULT_STATIC_SHARE
    pool = max(fraction * config.deploy.gpu_memory_gib * GIB - 2 * count, 0.0)
    per_token = kv_bytes_per_token(hf) * groups // ranks
    sampling = config.generators.sampling
    longest = sampling.max_prompt_tokens + sampling.max_response_tokens
    return [
        MemoryPart("weights, bfloat16", 2.0 * count, f"2 P{split}{more}"),
        MemoryPart(
            f"KV cache: {pool / per_token:,.0f} tokens, {pool / per_token / longest:,.0f} "
            f"sequences of {longest:,}",
            pool,
            f"{fraction:g} of the GPU - weights; {a_token} = {per_token:,} bytes a token",
        ),
        MemoryPart(
            "graphs and activations",
            (1 - fraction) * config.deploy.gpu_memory_gib * GIB,
            "the rest of mem_fraction_static",
        ),
    ]
