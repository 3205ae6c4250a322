"""Pure: the seconds of a learner step in one layout, part by part, by a stated law.

Parts are added up, though replicas exchange during computation; messages between pipeline stages
are left out. Letters:

    F    FLOPs of training on the step's trajectories (wire/models/flops.py), as if none shared a
         prompt
    R    ranks; t, p, c, e of them along tensor, pipeline, context and expert parallelism
    d    copies of a rank's weights, whose gradients are summed (d' of experts')
    m    microbatches of a replica in one update; v chunks of layers on a stage
    K    tokens of one replica's step, on a rank of context parallelism
    u, r different shares of heads, and rings that have all of them: c = u x r
    h, L hidden size, layers; L' layers with experts, k experts of a token
    N    parameters of a rank
"""

import math
from dataclasses import dataclass

from slipstream.deploy.predict.laws.figure import Figure
from slipstream.deploy.predict.laws.gpus import Cluster
from slipstream.deploy.predict.memory.learner_rank import rank_parameters, updated_parameters
from slipstream.learner.config import LearnerSettings
from slipstream.learner.model.division import stage_layers
from slipstream.learner.parallel import HeadShares
from slipstream.wire.models.flops import SequenceCost, num_multiplied_parameters
from slipstream.wire.models.hf_config import HfConfig

_ELEMENT = 2  # bytes of a weight or an activation: bfloat16
_GRADIENT = 4
_UPDATE_BYTES = 28  # bytes per parameter that a CPU's Adam reads and writes: three and four floats
_UPDATE_ON_GPU_BYTES = 30  # the same, and the weight in bfloat16
_FORWARD = 1 / 3  # share of a forward and backward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of one learner step."""

    trajectories: int
    mean_tokens: float  # mean of prompt and response
    mean_prompt: float = 0.0  # mean of the prompt, whose tokens do not meet the output layer
    frozen: int = 0  # frozen policies that also read each trajectory
    has_critic: bool = False

    @property
    def tokens(self) -> float:
        """Tokens of a step."""
        return self.trajectories * self.mean_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFlops:
    """Passes of a learner step over its tokens."""

    training: int  # forward and backward
    forward: int  # without a backward pass
    again: float  # share of a forward pass that each training repeats

    @property
    def in_trainings(self) -> float:
        """All passes, in units of forward and backward passes."""
        return self.training + _FORWARD * (self.training * self.again + self.forward)

    @property
    def one_way(self) -> float:
        """All passes, in units of one direction."""
        return self.training * (2 + self.again) + self.forward


def passes_of(
    hf: HfConfig, settings: LearnerSettings, *, frozen: int, has_critic: bool
) -> PassFlops:
    """Return the passes of a step: updates after the first need log-probabilities before it.

    Args:
        hf: the policy's architecture.
        settings: Settings of the learner.
        frozen: frozen policies that also read each trajectory.
        has_critic: True if a critic is trained as well.
    """
    proximal = settings.learner.minibatches > 1
    return PassFlops(
        training=1 + has_critic,
        forward=proximal * (1 + has_critic) + frozen,
        again=_again(hf, settings),
    )


def step_figures(
    hf: HfConfig, settings: LearnerSettings, work: Work, cluster: Cluster
) -> list[Figure]:
    """Return the parts of a learner step, in seconds."""
    learner = settings.learner
    sizes, ranks = learner.sizes, learner.ranks
    replicas = sizes.replicas(ranks)
    passes = passes_of(hf, settings, frozen=work.frozen, has_critic=work.has_critic)
    times = passes.in_trainings
    cost = SequenceCost.of(hf, settings.adapters)
    flops = work.trajectories * (cost.flops(work.mean_tokens) - cost.output * work.mean_prompt)
    layers = stage_layers(hf, learner)
    most = max(sum(layers[stage :: sizes.pipeline]) for stage in range(sizes.pipeline))
    uneven = most * sizes.pipeline / hf.num_hidden_layers
    rate = (learner.peak_tflops * 1e12 or cluster.gpu.peak_flops) * cluster.learner_share
    compute = flops * times * uneven / (ranks * rate)
    law = f"{times:.3g} F / (R x {cluster.learner_share:g} of the peak), x {uneven:.3g} of the "
    figures = [Figure("compute", compute, "s", f"{law}largest stage")]
    if sizes.pipeline > 1:
        microbatches = _microbatches(settings, work, replicas)
        idle = compute * (sizes.pipeline - 1) / (microbatches * sizes.chunks)
        law = f"compute x (p - 1) / (v m), m = {microbatches}: (p - 1) / (v m + p - 1) of both"
        figures.append(Figure("bubbles", idle, "s", law))
    figures += _exchanges(hf, settings, cluster, work, passes)
    figures += _updates(hf, settings, cluster)
    return [figure for figure in figures if figure.value]


def _again(hf: HfConfig, settings: LearnerSettings) -> float:
    """Return the share of a forward pass that is repeated."""
    learner = settings.learner
    match learner.recompute:
        case "full":
            layers = stage_layers(hf, learner)
            most = learner.recompute_layers or max(layers)
            return sum(min(most, count) for count in layers) / sum(layers)
        case "selective" if {"mlp", "moe"} & set(learner.recompute_modules):
            sparse = hf.num_sparse_layers * hf.experts_per_token * hf.expert_inner
            sparse += hf.num_sparse_layers * hf.shared_inner
            dense = (hf.num_hidden_layers - hf.num_sparse_layers) * hf.intermediate_size
            inner = sparse if hf.num_routed_experts else dense
            return 3 * hf.hidden_size * inner / num_multiplied_parameters(hf)
        case _:
            return 0.0


def _microbatches(settings: LearnerSettings, work: Work, replicas: int) -> int:
    """Return a replica's microbatches in one update."""
    learner = settings.learner
    tokens = work.tokens / (learner.minibatches * replicas)
    count = math.ceil(tokens / learner.max_tokens_per_microbatch)
    multiple = learner.sizes.microbatch_multiple
    return max(1, -(-count // multiple) * multiple)


def _exchanges(
    hf: HfConfig, settings: LearnerSettings, cluster: Cluster, work: Work, all_passes: PassFlops
) -> list[Figure]:
    """Return the exchanges between ranks of a replica in the layers.

    Args:
        hf: the policy's architecture.
        settings: Settings of the learner.
        cluster: The learner's hosts.
        work: Work of the step.
        all_passes: Passes over the tokens, including repeated ones.
    """
    learner, lengths, figures = settings.learner, hf.sizes, list[Figure]()
    sizes, passes = learner.sizes, all_passes.one_way
    tokens = work.tokens / (sizes.replicas(learner.ranks) * sizes.context)

    def add(what: str, num_bytes: float, group: int, law: str) -> None:
        figures.append(Figure(what, cluster.exchange_s(num_bytes, group), "s", law))

    tensor, context = sizes.tensor, sizes.context
    layers, attention = (
        count / sizes.pipeline for count in (hf.num_hidden_layers, len(hf.attention_layers))
    )
    if tensor > 1:
        times = 4 * passes
        num_bytes = times * _ELEMENT * hf.hidden_size * tokens * layers * (tensor - 1) / tensor
        law = f"{times:.3g} x 2 h K L / p x (t - 1) / t bytes over NVLink"
        add("tensor parallelism", num_bytes, tensor, law)
    if context > 1:
        shares = HeadShares.of(
            ranks=context,
            heads=hf.num_attention_heads // tensor,
            groups=max(1, hf.num_query_groups // tensor),
        )
        parts, rings = shares.parts, shares.rings
        copies = max(1.0, parts * tensor / hf.num_query_groups)  # number of ranks with the same key
        if parts > 1:
            channels = lengths["queries"] + 2 * copies * lengths["keys"] + lengths["outputs"]
            channels /= tensor
            num_bytes = passes * _ELEMENT * channels * tokens * attention * (parts - 1) / parts
            law = (
                f"{passes:.3g} x 2 (queries, keys, values, outputs) / t K L / p x (u - 1) / u bytes"
            )
            add("heads for tokens", num_bytes, tensor * context, law)
        if rings > 1:
            # Backward keys are sent again, and their gradients back.
            times, channels = passes + all_passes.training, 2 * lengths["keys"] * copies / tensor
            most = learner.max_tokens_per_microbatch
            share = min(0.75 * (rings - 1) / rings, work.mean_tokens / most)
            num_bytes = times * _ELEMENT * channels * tokens * rings * attention * share
            law = f"{times:.3g} x 2 (keys, values) / t K r L / p x {share:.3g} of the tokens, bytes"
            add("keys between rings", num_bytes, tensor * context, law)
        if layers > attention:
            channels = 2 * (lengths["linear_keys"] + lengths["linear_values"])
            channels = (channels + lengths["linear_gates"]) / tensor
            num_bytes = passes * _ELEMENT * channels * tokens * (layers - attention)
            num_bytes *= (context - 1) / context
            law = f"{passes:.3g} x 2 (queries, keys, values, gates, outputs) / t K L'' / p, bytes"
            add("heads of linear attention", num_bytes, tensor * context, law)
    group = sizes.expert * sizes.expert_tensor
    if group > 1:
        times = 2 * passes * sizes.expert_tensor
        routed = times * _ELEMENT * hf.hidden_size * hf.experts_per_token * tokens / tensor
        num_bytes = routed * hf.num_sparse_layers / sizes.pipeline * (group - 1) / group
        where = "NVLink" if group <= cluster.gpus_per_host else "NVLink and NICs"
        law = f"{times:.3g} x 2 h k K / t x L' / p x (e - 1) / e bytes over {where}"
        add("expert parallelism", num_bytes, group, law)
    return figures


def _updates(hf: HfConfig, settings: LearnerSettings, cluster: Cluster) -> list[Figure]:
    """Return the parts of the optimizer's updates: summed gradients, gathered weights, Adam."""
    learner = settings.learner
    if settings.lora.is_on:
        return []  # adapters are a few in a thousand
    of_stage = learner.ranks // learner.pipeline_parallel
    owns = [rank_parameters(hf, learner, stage) for stage in range(learner.pipeline_parallel)]
    own = max(owns, key=lambda stage: stage.count)
    copies, of_experts = learner.sizes.copies(learner.ranks)
    sent = (_GRADIENT + _ELEMENT) * (
        own.dense * (copies - 1) / copies + own.expert * (of_experts - 1) / of_experts
    )
    mine = updated_parameters(own, learner)
    share, times = learner.optimizer_offload_fraction, learner.minibatches
    on_gpu = (1 - share) * _UPDATE_ON_GPU_BYTES * mine / cluster.gpu.hbm_bytes_s
    of_host = mine * min(learner.ranks, cluster.gpus_per_host)
    on_host = share * of_host * _UPDATE_BYTES / cluster.host_memory_bytes_s
    over = share * mine * (_GRADIENT + _ELEMENT) / cluster.pcie_bytes_s
    if "optimizer" in learner.offload:
        over += 2 * 12 * mine / cluster.pcie_bytes_s
    exchange_s = times * cluster.exchange_s(sent, of_stage)
    exchange_law = f"{times} x (4 + 2) N (d - 1) / d bytes"
    update_s = times * (on_gpu + on_host + over)
    update_law = f"{times} x (30 bytes of N / d in GPU memory, or 28 in the host's and 6 over PCIe)"
    return [
        Figure("gradients and weights of replicas", exchange_s, "s", exchange_law),
        Figure("updates", update_s, "s", update_law),
    ]
