"""Pure: the memory of one learner rank, part by part, with the formula of each.

All ranks of one pipeline stage hold equal amounts. Parameter counts are exact; activations follow
Korthikanti et al. (arXiv:2205.05198) with these families' projections, gated MLP and flash
attention, and no dropout.

    N   parameters of the rank: D of all but experts, E of experts
    N_a parameters of its adapters, where these are trained (lora.rank): N of the optimizer
    e   bytes of a weight and of an activation: 2 (bfloat16) or 4 (float32)
    d   ranks that a distributed optimizer divides its state over; d' for experts
    T   tokens of a microbatch on a rank of context parallelism
    L   layers of the rank; a of their passes are in flight when the first backward pass begins
    A   elements that a layer keeps of a token
    V, h, t   vocabulary, hidden size, tensor parallelism
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from math import prod

from slipstream.deploy.predict.memory.offloaded import (
    CRITIC,
    KINDS,
    POLICY,
    OffloadedBytes,
    never_at_once,
)
from slipstream.learner.config import LearnerSection, LearnerSettings
from slipstream.learner.model.division import section_for, stage_layers
from slipstream.learner.parallel import ParallelSizes
from slipstream.wire.models.adapters import AdapterFacts, is_target
from slipstream.wire.models.families.tables import Parameter, Sizes, Table
from slipstream.wire.models.hf_config import HfConfig
from slipstream.wire.settings.lora import LoraSection

CHUNK_BYTES = 64 * 2**20  # equal to slipstream.algos.logprobs.linear_logprobs, which needs torch
CUDA_CHUNK_BYTES = 512 * 2**20  # equal to the same module
MIN_CHUNK_COLUMNS = 1024  # equal to the same module
KEPT_BYTES = 512 * 2**20  # equal to the same module
HOST_OPTIMIZER = "optimizer on the host"
TENSORS = ("weights", "gradients", "main weights", "moments")  # what a rank holds between passes
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_NORM = "decoder.final_layernorm.weight"
_CHUNK = 64  # tokens of a chunk of linear attention


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One use of memory."""

    what: str
    num_bytes: float
    formula: str


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Numbers of parameters of one rank."""

    dense: int  # all except experts
    expert: int
    largest: int  # size of the largest parameter
    largest_experts: int = 0  # the same of experts, which are one parameter

    @property
    def count(self) -> int:
        """All parameters."""
        return self.dense + self.expert


def rank_parameters(
    hf: HfConfig, learner: LearnerSection, stage: int, *, is_critic: bool = False
) -> RankParameters:
    """Return the parameters of each rank of a pipeline stage, of the policy or of a critic.

    Raises:
        ConfigError: the settings do not divide the layers.
    """
    sizes, family = learner.sizes, hf.family
    num_dense, num_expert, largest, stacks = 0, 0, [0], [0]
    experts = hf.num_routed_experts // sizes.expert
    for layer, count in family.layers_of(hf, _numbers_of_rank(hf, learner, stage)):
        shared = {name: parameter for name, parameter in layer.items() if "*" not in name}
        of_experts = {name: parameter for name, parameter in layer.items() if "*" in name}
        dense = _shares(shared, hf.sizes, sizes.tensor)
        expert = _shares(of_experts, hf.sizes, sizes.expert_tensor)
        num_dense += count * sum(dense)
        num_expert += count * sum(expert)
        largest += dense
        stacks += [experts * number for number in expert]
    ends = []
    if stage == 0:
        ends.append(_EMBEDDING)
    if stage == sizes.pipeline - 1:
        ends.append(_NORM)
        # a tied output layer on a separate stage is a copy of the embedding
        if not is_critic and (not hf.tie_word_embeddings or sizes.pipeline > 1):
            ends.append(_OUTPUT)
    of_ends = _shares({name: family.ends[name] for name in ends}, hf.sizes, sizes.tensor)
    if stage == 0 and hf.trains_vision:
        of_ends += map(prod, hf.tower_shapes.values())  # whole on every rank
    if is_critic and stage == sizes.pipeline - 1:
        of_ends += [hf.hidden_size, 1]  # the value head
    most = max(*largest, *of_ends, *stacks)
    return RankParameters(num_dense + sum(of_ends), experts * num_expert, most, max(stacks))


def adapter_parameters(
    hf: HfConfig, learner: LearnerSection, facts: AdapterFacts, stage: int
) -> RankParameters:
    """Return the parameters of adapters on each rank of a pipeline stage.

    Raises:
        ConfigError: the settings do not divide the layers.
    """
    sizes = learner.sizes
    found: dict[bool, list[int]] = {
        False: [],
        True: [],
    }  # elements, of all but experts and of these
    for number in _numbers_of_rank(hf, learner, stage):
        for name, parameter in hf.family.layer_of(hf, number).items():
            of_experts = "*" in name
            ranks = sizes.expert_tensor if of_experts else sizes.tensor
            matrices = hf.num_routed_experts // sizes.expert if of_experts else 1
            for tensor in parameter.tensors:
                if is_target(tensor.name, facts.targets):
                    rows, columns = tensor.shape_of_one(hf.sizes)
                    columns //= ranks if parameter.split == "columns" else 1
                    rows //= ranks if parameter.split == "rows" else 1
                    found[of_experts] += [facts.rank * matrices * size for size in (columns, rows)]
    largest = max(found[False] + found[True], default=0)
    return RankParameters(sum(found[False]), sum(found[True]), largest)


def _shares(parameters: Table, sizes: Sizes, ranks: int) -> list[int]:
    """Return the elements of one rank's share of each parameter."""

    def share(parameter: Parameter) -> int:
        shapes = [tensor.shape_of_one(sizes) for tensor in parameter.tensors]
        match parameter.split:
            case "whole" | "first":
                return sum(map(prod, shapes))
            case "vocabulary":  # rows are padded to a multiple of the ranks
                return sum(-(-rows // ranks) * prod(rest) for rows, *rest in shapes)
            case "rows" | "columns":
                return sum(map(prod, shapes)) // ranks

    return [share(parameter) for parameter in parameters.values()]


def _numbers_of_rank(hf: HfConfig, learner: LearnerSection, stage: int) -> list[int]:
    """Return the numbers of the layers of a rank."""
    ends = [0, *accumulate(stage_layers(hf, learner))]
    chunks = list(pairwise(ends))[stage :: learner.sizes.pipeline]
    return [number for first, end in chunks for number in range(first, end)]


def learner_stages(
    hf: HfConfig,
    settings: LearnerSettings,
    *,
    on_gpu: bool,
    frozen: Sequence[HfConfig] = (),
    has_critic: bool = False,
) -> list[list[MemoryPart]]:
    """Return the memory of a rank of each pipeline stage; all have the same parts in order.

    Args:
        hf: the policy's architecture.
        settings: Settings of the learner.
        on_gpu: True if the learner computes on GPUs.
        frozen: additional policies: a reference (algo.kl), a teacher (algo.teacher.model).
        has_critic: True if a critic is trained (algo.advantage).

    Raises:
        ConfigError: the settings do not divide the layers.
    """
    return [
        _stage(hf, settings, stage, on_gpu=on_gpu, frozen=frozen, has_critic=has_critic)
        for stage in range(settings.learner.pipeline_parallel)
    ]


def total_bytes(parts: Sequence[MemoryPart]) -> float:
    """Return the sum of the parts."""
    return sum(part.num_bytes for part in parts)


def _stage(
    hf: HfConfig,
    settings: LearnerSettings,
    stage: int,
    *,
    on_gpu: bool,
    frozen: Sequence[HfConfig],
    has_critic: bool,
) -> list[MemoryPart]:
    learner, what = settings.learner, "N"
    own = trained = rank_parameters(hf, learner, stage)
    if settings.lora.is_on:
        trained = adapter_parameters(hf, learner, settings.lora.facts(), stage)
        what = "N_a"
    element = element_bytes(learner, on_gpu=on_gpu)
    state = _optimizer(trained, learner, element)
    working = [
        _activations(hf, learner, stage, element),
        *_last_stage(
            hf,
            learner,
            element,
            on_gpu=on_gpu,
            is_last=stage + 1 == learner.sizes.pipeline,
            policies=2 if settings.algo.kl.get("name") == "full" else 1,
        ),
        _one_gradient(trained, settings, element),
    ]
    all_weights = own.count + (trained.count if settings.lora.is_on else 0)
    seeing = [hf, *frozen, *([hf] if has_critic else [])] if stage == 0 else []
    towers = sum(policy.num_tower_parameters for policy in seeing)
    working += _tower_activations(hf, learner, stage, element)
    parts = [
        MemoryPart("weights", element * all_weights, _weights_formula(element, settings.lora)),
        *([MemoryPart("frozen towers", element * towers, f"{element} of each")] if towers else []),
        MemoryPart("gradients", 4 * trained.count, f"4 {what}, float32"),
        *state,
        *working,
    ]
    kinds = [parts[0].num_bytes, parts[1].num_bytes, total_bytes(state)]
    held = list(map(OffloadedBytes, repeat(POLICY), KINDS, kinds))
    if on_gpu:
        relay = 4.0 * settings.weightbus.bucket_bytes if stage == 0 else 0.0
        law = "4 weightbus.bucket_bytes on rank 0, over NCCL; versions are on the host"
        parts.append(MemoryPart("weight relay", relay, law))
    elif learner.optimizer_offload_fraction:  # the host is the device
        parts.append(host_optimizer(own, learner))
    if frozen:
        numbers = [
            rank_parameters(policy, section_for(policy, learner), stage).count for policy in frozen
        ]
        sizes = [float(element * number) for number in numbers]
        parts.append(MemoryPart("frozen policies", sum(sizes), f"{element} N' of each"))
        held += [OffloadedBytes(f"frozen {i}", "weights", size) for i, size in enumerate(sizes)]
    if has_critic:
        sizes, law = _critic(hf, learner, stage, element)
        parts.append(MemoryPart("critic", sum(sizes), law))
        held += map(OffloadedBytes, repeat(CRITIC), KINDS, sizes)
    if learner.offload and on_gpu:
        away = never_at_once(
            held,
            learner.offload,
            working=total_bytes(working),
            beside_policy="frozen 0" if settings.algo.kl.get("name") == "full" else "",
        )
        parts.append(
            MemoryPart("never at once", -away, "learner.offload: what waits on the host by turns")
        )
    return parts


def _tower_activations(
    hf: HfConfig, learner: LearnerSection, stage: int, element: int
) -> list[MemoryPart]:
    """Return what a vision tower keeps of a microbatch whose tokens are all of images.

    A block keeps by patch the inputs of its two norms and what follows them (4 v), queries, keys,
    values and the attention's output (4 v), and of its MLP gate, up and their product, or one and
    what its activation makes of it. One that is not trained, or computed again, keeps its input.
    """
    if hf.vision is None or stage:
        return []
    vision, sizes = hf.vision, learner.sizes
    inner = 3 if vision.window else 2
    block = 8 * vision.hidden_size + inner * vision.intermediate_size
    kept = 0
    if hf.trains_vision:
        kept = vision.depth * (vision.hidden_size if learner.recompute == "full" else block)
    token_ranks = sizes.tensor if learner.sequence_parallel else 1
    patches = vision.spatial_merge_size**2 * _tokens(learner) / token_ranks
    passes = passes_in_flight(sizes, stage) if kept else 1
    num_bytes = patches * (element * (passes * kept + block) + 4 * vision.channels)
    formula = f"at most: all T of images, {vision.spatial_merge_size**2} T patches of {block:,}"
    return [MemoryPart("vision activations", num_bytes, formula)]


def _one_gradient(trained: RankParameters, settings: LearnerSettings, element: int) -> MemoryPart:
    """Return the gradient that is made before it is added to its total; adapters' are not fused."""
    is_fused = settings.learner.megatron.get("gradient_accumulation_fusion", True)
    if is_fused and not settings.lora.is_on:
        law = "added to its total as it is computed"
        if trained.largest_experts:
            law = f"{element} x the experts' largest parameter; others' is {law}"
        return MemoryPart("one gradient", element * trained.largest_experts, law)
    return MemoryPart(
        "one gradient", element * trained.largest, f"{element} x the largest parameter"
    )


def _critic(
    hf: HfConfig, learner: LearnerSection, stage: int, element: int
) -> tuple[list[float], str]:
    """Return the bytes of a critic's weights, gradients and optimizer, and the law of their sum."""
    own = rank_parameters(hf, learner, stage, is_critic=True)
    state = _optimizer(own, learner, element)
    laws = [part.formula.partition(",")[0] for part in state if part.num_bytes]
    law = f"{' + '.join([f'{element} N + 4 N', *laws])}, N of the critic"
    return [element * own.count, 4 * own.count, total_bytes(state)], law


def _weights_formula(element: int, lora: LoraSection) -> str:
    if not lora.is_on:
        return f"{element} N"
    return f"{element} (N + N_a); N_a of adapters of rank {lora.rank}, which alone are trained"


def element_bytes(learner: LearnerSection, *, on_gpu: bool) -> int:
    """Return the bytes of a weight."""
    return 2 if learner.dtype == "bfloat16" or (learner.dtype == "auto" and on_gpu) else 4


def _optimizer(own: RankParameters, learner: LearnerSection, element: int) -> list[MemoryPart]:
    """Return the optimizer's state: weights in float32, where others are narrow, and moments."""
    away = learner.optimizer_offload_fraction
    on_host = f"; {away:g} of it is on the host" if away else ""
    sizes = {"main weights": 4 if element == 2 else 0, "moments": 8}
    if learner.moments_dtype == "bfloat16":
        sizes["moments"] = 4
    parts = []
    for kind, size in sizes.items():
        each = size * (1 - away)
        what = ("float32" if kind == "main weights" else "two moments") + on_host
        count, formula = _divided(own, learner, f"{each:g}", what)
        parts.append(MemoryPart(kind, each * count, formula))
    return parts


def host_optimizer(own: RankParameters, learner: LearnerSection) -> MemoryPart:
    """Return the host's share of a rank's hybrid optimizer."""
    each = 16 * learner.optimizer_offload_fraction
    what = "float32 weights, two moments, gradients"
    count, formula = _divided(own, learner, f"{each:g}", what)
    return MemoryPart(HOST_OPTIMIZER, each * count, formula)


def updated_parameters(own: RankParameters, learner: LearnerSection) -> int:
    """Return how many parameters a rank updates with a distributed optimizer."""
    dense, expert = learner.sizes.copies(learner.ranks)
    return -(-own.dense // dense) + -(-own.expert // expert)


def _divided(own: RankParameters, learner: LearnerSection, each: str, what: str) -> tuple[int, str]:
    """Return the parameters of a divided optimizer's state on a rank, and the formula."""
    dense, expert = learner.sizes.copies(learner.ranks)
    count = updated_parameters(own, learner)
    if own.expert:
        return count, f"{each} (D / d + E / d'), {what}; d = {dense}, d' = {expert}"
    return count, f"{each} N / d, {what}; d = {dense}"


def passes_in_flight(sizes: ParallelSizes, stage: int) -> float:
    """Return the most microbatches whose activations a stage holds, in units of all its layers.

    1F1B runs as many forward passes as stages follow before its first backward pass; interleaved
    chunks add more, each with a part of the layers. A step of fewer microbatches holds fewer.
    """
    following = sizes.pipeline - stage - 1
    if sizes.chunks == 1:
        return following + 1
    return (2 * following + (sizes.chunks - 1) * sizes.pipeline + 1) / sizes.chunks


def _activations(hf: HfConfig, learner: LearnerSection, stage: int, element: int) -> MemoryPart:
    """Return what the layers of a rank keep, and what one computes again at a time.

    A layer keeps, by token, the inputs of its two norms and what follows them (4 h), queries, keys,
    values and the attention's output, inputs of the norms of queries and keys where there are, and
    of the MLP gate, up and their product. Experts keep this of each token that is routed to them,
    evenly, with its row before. Latent attention keeps compressed queries and keys
    before and after their norms too, and what keys and values are expanded to. A gate of attention
    keeps itself, before and after its sigmoid in float32, and the gated output. Linear attention
    keeps what it projects to, what the convolution makes of it, its output before and after the
    gate, and a system of equations of each chunk; layers that keep all count as their mean, the one
    computed again as the largest. Keys and values that several ranks of context parallelism share
    are counted once.
    """
    sizes, lengths, modules = learner.sizes, hf.sizes, learner.recompute_modules
    tensor, hidden = sizes.tensor, hf.hidden_size
    token_ranks = tensor if learner.sequence_parallel else 1  # sharing a layer's tokens
    queries, keys = lengths["queries"], lengths["keys"]
    attention: float = queries + 2 * keys + lengths["outputs"] + (queries + keys) * hf.has_qk_norm
    latent = 0.0
    if hf.family.is_latent:
        attention = 2 * queries + keys + lengths["keys_and_values"] + lengths["outputs"]
        latent = 2 * (lengths["query_rank"] + lengths["key_rank_and_rotary"]) / token_ranks
    linear: float = (
        4 * (lengths["linear_keys"] + lengths["linear_values"]) + lengths["linear_values"]
    )
    linear += lengths["linear_gates"] + _CHUNK * lengths["linear_heads"]
    attention += 4 * queries * hf.family.gates_attention
    share_of_linear = 1 - len(hf.attention_layers) / hf.num_hidden_layers
    mean = attention + share_of_linear * (linear - attention)
    kept_input = hidden / token_ranks
    # layers of a kind are alike; a stage with both kinds counts as the larger one
    mlp = max(_mlp_elements(hf, learner, number) for number in (0, hf.num_hidden_layers - 1))
    norms = 4 + 2 * ("mlp_bda.norm.weight" in hf.family.layer)
    whole = norms * kept_input + latent + mean / tensor + mlp
    largest = whole + (max(attention, linear) - mean) / tensor
    layers = stage_layers(hf, learner)[stage :: sizes.pipeline]  # layers of each chunk
    again, formula = 0.0, "e T a L A"
    kept = whole * sum(layers)
    match learner.recompute:
        case "full":
            most = learner.recompute_layers or hf.num_hidden_layers
            dropped = sum(min(most, count) for count in layers)
            kept -= dropped * (whole - kept_input)
            share = f" / {token_ranks}" if token_ranks > 1 else ""
            again, formula = largest, f"e T (a ({dropped} h{share} + the rest A) + A)"
        case "selective" if ("moe" if hf.num_routed_experts else "mlp") in modules:
            numbers = _numbers_of_rank(hf, learner, stage)
            kept -= mlp * sum(hf.is_sparse(n) == (hf.num_routed_experts > 0) for n in numbers)
            again, formula = mlp, "e T (a L A + M), M of the MLP, computed again"
        case _:
            pass
    passes = passes_in_flight(sizes, stage)
    num_bytes = element * _tokens(learner) * (passes * kept + again)
    return MemoryPart("activations", num_bytes, f"{formula}; A at most {largest:,.0f}")


def _mlp_elements(hf: HfConfig, learner: LearnerSection, number: int) -> float:
    """Return the elements that the MLP of a layer keeps per token."""
    sizes, lengths = learner.sizes, hf.sizes
    if not hf.is_sparse(number):
        return 3 * lengths["inner"] / sizes.tensor
    token_ranks = sizes.tensor if learner.sequence_parallel else 1
    routed = hf.experts_per_token / token_ranks
    of_experts = routed * (hf.hidden_size * sizes.expert_tensor + 3 * lengths["expert_inner"])
    return of_experts + 3 * lengths["shared_inner"] / sizes.tensor


def _tokens(learner: LearnerSection) -> int:
    return -(-learner.max_tokens_per_microbatch // learner.context_parallel)


def _last_stage(
    hf: HfConfig,
    learner: LearnerSection,
    element: int,
    *,
    on_gpu: bool,
    is_last: bool,
    policies: int,
) -> list[MemoryPart]:
    """Return the memory of the output layer; only the last stage has one.

    ``policies`` is the number of those whose logits are needed at a time.
    """
    tokens, rows = _tokens(learner), -(-hf.vocab_size // learner.tensor_parallel)
    narrow = element if element < 4 else 0  # a gradient of a narrow type is not in logits' place
    chunk = CUDA_CHUNK_BYTES if on_gpu else CHUNK_BYTES
    columns, which = min(rows, max(MIN_CHUNK_COLUMNS, chunk // (4 * tokens))), "columns of a chunk"
    if policies * 4 * tokens * rows <= KEPT_BYTES:
        columns, which = rows, f"all columns: they fit {KEPT_BYTES // 2**20} MiB and are kept"
    each = 4 * policies + narrow
    hidden = element + 4 + narrow
    return [
        MemoryPart("logits", each * tokens * columns * is_last, f"{each} T c, c = {which}"),
        MemoryPart(
            "last hidden states",
            hidden * tokens * hf.hidden_size * is_last,
            f"{hidden} T h, their gradient and its sum in float32 among them",
        ),
    ]
