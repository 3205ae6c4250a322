"""Pure: learner layouts that fit, fewest GPUs first, fastest of each number first.

Each division uses the cheapest way to save memory that fits. Context parallelism is tried only if
nothing fits without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.deploy.config import RunConfig
from slipstream.deploy.predict.laws.engine_law import expert_parameters
from slipstream.deploy.predict.laws.figure import Figure, total
from slipstream.deploy.predict.laws.gpus import Cluster
from slipstream.deploy.predict.laws.learner_step import Work, step_figures
from slipstream.deploy.predict.memory.gpu import learner_memory
from slipstream.deploy.predict.memory.learner_rank import (
    MemoryPart,
    host_optimizer,
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
class PlanRequest:
    """A run, and the hardware that it may take."""

    config: RunConfig
    hf: HfConfig
    cluster: Cluster
    gpus: int
    prompt_tokens: float  # mean
    response_tokens: float  # mean
    frozen: Sequence[HfConfig] = ()
    has_critic: bool = False
    host_bytes: float = 0.0  # limit of a learner host; 0 for no limit

    @property
    def work(self) -> Work:
        """Work of a learner step."""
        run = self.config.run
        return Work(
            trajectories=run.groups_per_step * run.group_size,
            mean_tokens=self.prompt_tokens + self.response_tokens,
            mean_prompt=self.prompt_tokens,
            frozen=len(self.frozen),
            has_critic=self.has_critic,
        )


def gpu_counts(most: int, gpus_per_host: int) -> list[int]:
    """Return the numbers of GPUs to try, within one host and then whole hosts.

    Numbers of GPUs of a host, and of hosts, are 2^a and 3 x 2^a.
    """
    numbers = sorted({times << a for a in range(most.bit_length()) for times in (1, 3)})
    on_one = [count for count in numbers if count < gpus_per_host]
    return [n for n in [*on_one, *(gpus_per_host * count for count in numbers)] if n <= most]


def proposals(asked: PlanRequest, gpus: int) -> list[Proposal]:
    """Return the layouts of the learner that fit on this many GPUs, fastest first."""
    found: list[Proposal] = []
    for context in context_sizes():
        for division in divisions(asked.hf, gpus, asked.cluster.gpus_per_host, context=context):
            proposal = _proposal(asked, division)
            if proposal is not None:
                found.append(proposal)
        if found:
            break
    return sorted(found, key=lambda proposal: (proposal.step_s, proposal.gpu_bytes))


def _proposal(asked: PlanRequest, division: Division) -> Proposal | None:
    """Return a division with the first way to save memory that makes it fit, if any."""
    hf, cluster = asked.hf, asked.cluster
    if _certainly_too_large(asked, division):
        return None
    for saving in savings(hf, asked.config.learner):
        settings = accepted(asked.config.table, hf, division, saving)
        if settings is None:
            return None  # refused for its sizes; no way to save memory changes that
        memory = learner_memory(hf, settings, frozen=asked.frozen, has_critic=asked.has_critic)
        if total_bytes(memory) > cluster.available_bytes:
            continue
        host = host_bytes(hf, settings, cluster.gpus_per_host)
        if asked.host_bytes and host > asked.host_bytes:
            continue
        return Proposal(settings, memory, host, step_figures(hf, settings, asked.work, cluster))
    return None


def _certainly_too_large(asked: PlanRequest, division: Division) -> bool:
    """Return True if not even evenly divided weights and gradients fit."""
    if asked.config.learner.lora.is_on:
        return False
    hf = asked.hf
    experts = expert_parameters(hf)
    dense = (hf.num_parameters - experts) / division.tensor_parallel
    least = _LEAST_BYTES * (dense + experts / division.expert_parallel) / division.pipeline_parallel
    return least > asked.cluster.available_bytes


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
