"""Pure: the layouts of a learner on some GPUs that the learner's own checks accept."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from slipstream.learner.config import LearnerSettings, learner_settings
from slipstream.learner.model.division import refuse_policy
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.hf_config import HfConfig
from slipstream.wire.settings.load import Table

Recompute = Literal["none", "selective", "full"]
_MOST_CONTEXT = 8
# settings of [learner] that a layout decides; values in the file do not count
_DECIDED = frozenset(
    {
        "ranks",
        "ranks_per_node",
        "tensor_parallel",
        "pipeline_parallel",
        "context_parallel",
        "expert_parallel",
        "expert_tensor_parallel",
        "interleaved_chunks",
        "layers_per_stage",
        "recompute",
        "recompute_modules",
        "recompute_layers",
        "optimizer_offload_fraction",
        "sequence_parallel",
    }
)
_STAGES = ("num_layers_in_", "account_for_")  # prefixes in learner.megatron that divide layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Division of a model among ranks, by settings of [learner]."""

    ranks: int
    ranks_per_node: int  # 0: all on one node
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    expert_parallel: int


def divisions(hf: HfConfig, ranks: int, gpus_per_host: int, *, context: int) -> Iterator[Division]:
    """Yield the divisions worth trying: tensor parallelism within a host, whole hosts.

    Stages and experts may be any divisors; the learner may refuse some of the sizes.
    """
    if ranks > gpus_per_host and ranks % gpus_per_host:
        return
    on_one = ranks <= gpus_per_host
    host = ranks if on_one else gpus_per_host
    experts = _divisors(hf.num_routed_experts) if hf.num_routed_experts else [1]
    for tensor in _divisors(host):
        rest = ranks // tensor
        if rest % context:
            continue
        for pipeline in _divisors(rest // context):
            if pipeline > hf.num_hidden_layers:
                continue
            for expert in experts:
                if (ranks // pipeline) % expert:
                    continue
                yield Division(
                    ranks=ranks,
                    ranks_per_node=0 if on_one else gpus_per_host,
                    tensor_parallel=tensor,
                    pipeline_parallel=pipeline,
                    context_parallel=context,
                    expert_parallel=expert,
                )


def context_sizes() -> list[int]:
    """Return the sizes of context parallelism, smallest first."""
    return [size for size in range(1, _MOST_CONTEXT + 1) if _MOST_CONTEXT % size == 0]


def accepted(
    table: Table, hf: HfConfig, division: Division, saving: Mapping[str, Any]
) -> LearnerSettings | None:
    """Return a run's settings with this division, or None if the learner refuses it.

    ``saving`` are further settings of [learner], such as recompute.
    """
    given = {
        name: value for name, value in table.get("learner", {}).items() if name not in _DECIDED
    }
    megatron = {
        name: value
        for name, value in given.get("megatron", {}).items()
        if not name.startswith(_STAGES)
    }
    learner = {**given, "megatron": megatron, **asdict(division), **saving}
    try:
        settings = learner_settings({**table, "learner": learner})
        refuse_policy(hf, settings)
    except ConfigError:
        return None
    return settings


def savings(hf: HfConfig, settings: LearnerSettings) -> list[dict[str, Any]]:
    """Return ways to save memory, cheapest in time first."""
    modules = ["moe" if hf.num_routed_experts else "mlp"]
    recompute: list[dict[str, Any]] = [
        {"recompute": "none"},
        {"recompute": "selective", "recompute_modules": modules},
        {"recompute": "full"},
    ]
    optimizers: list[dict[str, Any]] = [{"optimizer_offload_fraction": 0.0}]
    if not settings.lora.is_on and settings.learner.dtype != "float32":
        kept = tuple(kind for kind in settings.learner.offload if kind != "optimizer")
        on_host = {"optimizer_offload_fraction": 1.0, "offload": kept, "moments_dtype": "float32"}
        optimizers.append(on_host)
    return [{**option, **optimizer} for optimizer in optimizers for option in recompute]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
