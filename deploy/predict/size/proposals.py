"""Pure: learner layouts that fit, fewest GPUs first, fastest of each number first.

Each division uses the cheapest way to save memory that fits. Context parallelism is tried only if
nothing fits without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.deploy.predict.laws.figure import Figure, total
from slipstream.deploy.predict.laws.gpus import Cluster
from slipstream.deploy.predict.laws.learner_step import Work, step_figures
from slipstream.deploy.predict.memory.learner_rank import (
    MemoryPart,
    host_optimizer,
    learner_stages,
    most_memory,
    rank_parameters,
    total_bytes,
    updated_parameters,
)
from slipstream.deploy.predict.size.candidates import (
    Division,
    accepted,
    context_sizes,
    divisions,
    savings,
)
from slipstream.learner.config import LearnerSettings
from slipstream.wire.models.hf_config import HfConfig
from slipstream.wire.settings.load import Table

_LEAST_BYTES = 2 + 4  # bytes of a parameter: a weight, its gradient


@dataclass(frozen=True, slots=True)
class Proposal:
    """A layout that the learner accepts and a GPU can hold."""

    settings: LearnerSettings
    memory: Sequence[MemoryPart]  # rank that needs most
    host_bytes: float  # host that needs most
    step: Sequence[Figure]  # in seconds

    @property
    def gpus(self) -> int:
        """GPUs of the learner."""
        return self.settings.learner.ranks

    @property
    def gpu_bytes(self) -> float:
        """Memory of the rank that needs most."""
        return total_bytes(self.memory)

    @property
    def step_s(self) -> float:
        """Seconds of a learner step."""
        return total(self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitQuestion:
    """Training work and its hardware. ``host_bytes`` of 0 is no limit."""

    hf: HfConfig
    table: Table
    base: LearnerSettings
    work: Work
    cluster: Cluster
    frozen: Sequence[HfConfig] = ()
    host_bytes: float = 0.0


def gpu_counts(most: int, gpus_per_host: int) -> list[int]:
    """Return the numbers of GPUs to try, within one host and then whole hosts.

    Numbers of GPUs of a host, and of hosts, are 2^a and 3 x 2^a.
    """
    numbers = sorted({times << a for a in range(most.bit_length()) for times in (1, 3)})
    on_one = [count for count in numbers if count < gpus_per_host]
    return [n for n in [*on_one, *(gpus_per_host * count for count in numbers)] if n <= most]


def proposals(question: SplitQuestion, gpus: int) -> list[Proposal]:
    """Return the layouts that fit on this many GPUs, fastest first."""
    found: list[Proposal] = []
    for context in context_sizes():
        for division in divisions(
            question.hf, gpus, question.cluster.gpus_per_host, context=context
        ):
            one = _proposal(question, division)
            if one is not None:
                found.append(one)
        if found:
            break
    return sorted(found, key=lambda one: (one.step_s, one.gpu_bytes))


def _proposal(question: SplitQuestion, division: Division) -> Proposal | None:
    """Return a division with the first way to save memory that makes it fit, if any."""
    if _certainly_too_large(question, division):
        return None
    for saving in savings(question.hf, question.base):
        settings = accepted(question.table, question.hf, division, saving)
        if settings is None:
            return None  # refused for its sizes; no way to save memory changes that
        memory = _memory(question, settings)
        if total_bytes(memory) > question.cluster.available_bytes:
            continue
        host = host_bytes(question.hf, settings, question.cluster.gpus_per_host)
        if question.host_bytes and host > question.host_bytes:
            continue
        step = step_figures(question.hf, settings, question.work, question.cluster)
        return Proposal(settings, memory, host, step)
    return None


def _memory(question: SplitQuestion, settings: LearnerSettings) -> Sequence[MemoryPart]:
    stages = learner_stages(
        question.hf,
        settings,
        on_gpu=True,
        frozen=question.frozen,
        has_critic=question.work.has_critic,
    )
    return [part for part in most_memory(stages) if part.num_bytes]


def _certainly_too_large(question: SplitQuestion, division: Division) -> bool:
    """Return True if not even evenly divided weights and gradients fit."""
    if question.base.lora.is_on:
        return False
    hf = question.hf
    experts = hf.num_sparse_layers * hf.num_routed_experts * 3 * hf.hidden_size * hf.expert_inner
    dense = (hf.num_parameters - experts) / division.tensor
    least = _LEAST_BYTES * (dense + experts / division.expert) / division.pipeline
    return least > question.cluster.available_bytes


def host_bytes(hf: HfConfig, settings: LearnerSettings, gpus_per_host: int) -> float:
    """Return the host memory of the ranks on the host that needs most.

    ::

        16 f (D / d + E / d')   optimizer_offload_fraction = f: weights, moments, gradients
        12 N / d                learner.offload has "optimizer": what is away
        2 N                     the same of "weights"
    """
    learner = settings.learner
    ranks_of_stage = learner.ranks // learner.pipeline_parallel
    of_stage = []
    for stage in range(learner.pipeline_parallel):
        own = rank_parameters(hf, learner, stage)
        held = 0.0
        if not settings.lora.is_on:
            held += host_optimizer(own, learner).num_bytes
            held += 12 * updated_parameters(own, learner) * ("optimizer" in learner.offload)
        held += 2 * own.count * ("weights" in learner.offload)
        of_stage.append(held)
    of_rank = [of_stage[rank // ranks_of_stage] for rank in range(learner.ranks)]
    starts = range(0, learner.ranks, gpus_per_host)
    return max(sum(of_rank[start : start + gpus_per_host]) for start in starts)
