"""Memory and fewest GPUs of recipes that verl publishes, predicted by the planner's laws.

There engine and learner hold the same GPUs by turns (a hybrid engine), and all that is not used is
on the host. P parameters, N of a rank, r ranks of an engine, u its share of a GPU's memory:

    GPU, training    6 N + activations and logits       weights, gradients; the optimizer's on hosts
    GPU, resharding  2 N + 2 P / r                      weights of both
    GPU, generating  u x the GPU's memory               the engine's share, which its cache fills
    host, of a GPU   16 (D / d + E / d') + 2 N + 2 N'   optimizer, weights; N' a reference's
                     + 2 P / r                          the engine's weights while it sleeps

A turn's largest rank counts. Gradients that are away are not copied. Layers recompute all.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from slipstream.deploy.predict.laws.gpus import Cluster, Gpu, gpu_named
from slipstream.deploy.predict.laws.learner_step import Work, step_figures
from slipstream.deploy.predict.laws.shapes import shape_folder
from slipstream.deploy.predict.memory.learner_rank import (
    host_optimizer,
    learner_stages,
    rank_parameters,
    total_bytes,
)
from slipstream.deploy.predict.size.candidates import divisions
from slipstream.learner.config import LearnerSettings, learner_settings
from slipstream.learner.model.division import refuse_layout
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.flops import SequenceCost
from slipstream.wire.models.hf_config import HfConfig, load_hf_config

GB = 1e9
_FILE = Path(__file__).parent / "recipes.toml"
_WEIGHT = 2
_SHARE_STEP = 1e-4
_CONTEXT_BYTES = 0.6 * 2**30  # of CUDA, for each process


class Batch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a recipe trains between two publishes."""

    sequences: int
    mean_tokens: float  # prompt included
    updates: int


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published layout of a recipe's learner."""

    model: str
    gpus: int
    tensor: int
    pipeline: int
    expert: int
    offloaded: float  # share of the optimizer on hosts
    last_stage: int = 0  # layers of the last stage; 0 divides them as the recipe does
    published_mfu: float | None = None


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published recipe: its layout, and what is published of its memory."""

    model: str
    source: str
    published_gpus: int
    engine_ranks: int
    engine_share: float
    max_tokens: int
    has_reference: bool
    batch: Batch
    learner: dict[str, Any]
    published_gpu_gb: float | None = None
    published_host_gb: float | None = None
    published_largest_host_gb: float | None = None


class Recipes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of them, and the hosts that they run on."""

    gpu: str
    gpus_per_host: int
    host_memory_gb: float
    recipes: tuple[Recipe, ...]
    layouts: tuple[Layout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A layout's training, as predicted: nothing overlaps, and all ranks do as much."""

    gpu: float  # bytes of the GPU that needs most
    seconds: float  # forward and backward passes of a batch, and its updates
    mfu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsMemory:
    """Memory of a layout in which engine and learner take turns, in bytes."""

    training: float  # of the GPU that needs most, as the others
    resharding: float
    generating: float
    hosts: tuple[float, ...]

    @property
    def gpu(self) -> float:
        """Memory of the GPU in its largest turn."""
        return max(self.training, self.resharding, self.generating) + _CONTEXT_BYTES

    @property
    def median_host(self) -> float:
        """Memory of a host, as the middle one has it."""
        return median(self.hosts)

    @property
    def largest_host(self) -> float:
        """Memory of the host that needs most."""
        return max(self.hosts)


def recipes() -> Recipes:
    """Return the recipes that are shipped."""
    return msgspec.toml.decode(_FILE.read_bytes(), type=Recipes)


def memory_of(recipe: Recipe, given: Recipes) -> TurnsMemory:
    """Return the memory of a recipe's own layout."""
    layout = {"ranks": recipe.published_gpus, **recipe.learner}
    return _memory(_shape(recipe), recipe, _settings(recipe, layout), given)


def training_of(layout: Layout, given: Recipes, *, share: float) -> Training:
    """Return what a layout is predicted to take.

    Args:
        layout: a published layout.
        given: the recipes.
        share: share of the peak while a rank computes, which stands for kernels and imbalance.
    """
    recipe = next(recipe for recipe in given.recipes if recipe.model == layout.model)
    hf, batch = _shape(recipe), recipe.batch
    last = {"num_layers_in_last_pipeline_stage": layout.last_stage}
    settings = _settings(
        recipe,
        {
            "ranks": layout.gpus,
            "tensor_parallel": layout.tensor,
            "pipeline_parallel": layout.pipeline,
            "expert_parallel": layout.expert,
            "optimizer_offload_fraction": layout.offloaded,
            "megatron": last if layout.last_stage else recipe.learner.get("megatron", {}),
        },
    )
    refuse_layout(hf, settings.learner)
    work = Work(trajectories=batch.sequences, mean_tokens=batch.mean_tokens)
    gpu = gpu_named(given.gpu)
    cluster = Cluster(gpu=gpu, gpus_per_host=given.gpus_per_host, learner_share=share)
    figures = step_figures(hf, settings, work, cluster)
    # Settings with several updates would have a pass for log-probabilities, which is not training.
    of_updates = {"gradients and weights of replicas", "updates"}
    seconds = sum(
        figure.value * (batch.updates if figure.what in of_updates else 1) for figure in figures
    )
    flops = batch.sequences * SequenceCost.of(hf).flops(batch.mean_tokens)
    return Training(
        gpu=max(map(total_bytes, learner_stages(hf, settings, on_gpu=True))) + _CONTEXT_BYTES,
        seconds=seconds,
        mfu=flops / (layout.gpus * gpu.peak_flops * seconds),
    )


def fitted_share(layout: Layout, given: Recipes) -> float:
    """Return the share of the peak with which a layout's MFU is the published one."""
    low, high = 0.01, 1.0
    while high - low > _SHARE_STEP:
        middle = (low + high) / 2
        is_below = training_of(layout, given, share=middle).mfu < (layout.published_mfu or 0.0)
        low, high = (middle, high) if is_below else (low, middle)
    return high


def fewest_gpus(recipe: Recipe, given: Recipes) -> int:
    """Return the fewest GPUs, whole hosts and whole engines, on which some layout fits.

    Raises:
        ConfigError: none fits on twice as many as are published.
    """
    gpu, host = gpu_named(given.gpu), given.gpus_per_host
    most = 2 * recipe.published_gpus
    for gpus in range(host, most + 1, host):
        if gpus % recipe.engine_ranks == 0 and _fits(recipe, given, gpu, gpus):
            return gpus
    raise ConfigError(
        f"no layout of {recipe.model} fits on {most} GPUs of {gpu.name}, and {recipe.source} has "
        f"{recipe.published_gpus}"
    )


def _fits(recipe: Recipe, given: Recipes, gpu: Gpu, gpus: int) -> bool:
    return any(
        one.gpu <= gpu.memory_gib * 2**30 and one.largest_host <= given.host_memory_gb * GB
        for one in _memories(recipe, given, gpus)
    )


def _memories(recipe: Recipe, given: Recipes, gpus: int) -> Iterator[TurnsMemory]:
    """Yield the memory of every layout on so many GPUs that the learner accepts."""
    hf = _shape(recipe)
    for division in divisions(hf, gpus, given.gpus_per_host, context=1):
        try:
            yield _memory(hf, recipe, _settings(recipe, asdict(division)), given)
        except ConfigError:
            continue


def _shape(recipe: Recipe) -> HfConfig:
    return load_hf_config(shape_folder(recipe.model))


def _settings(recipe: Recipe, layout: dict[str, Any]) -> LearnerSettings:
    learner = {
        "recompute": "full",
        "optimizer_offload_fraction": 1.0,
        "max_tokens_per_microbatch": recipe.max_tokens,
        **layout,
    }
    return learner_settings({"run": {"model": str(shape_folder(recipe.model))}, "learner": learner})


def _memory(hf: HfConfig, recipe: Recipe, settings: LearnerSettings, given: Recipes) -> TurnsMemory:
    learner = settings.learner
    refuse_layout(hf, learner)
    stages = learner_stages(hf, settings, on_gpu=True)
    owns = [rank_parameters(hf, learner, stage) for stage in range(learner.pipeline_parallel)]
    engine = _WEIGHT * hf.num_parameters / recipe.engine_ranks
    copies = 1 + recipe.has_reference
    of_rank = [
        host_optimizer(own, learner).num_bytes + copies * _WEIGHT * own.count + engine
        for own in owns
        for _ in range(learner.ranks // learner.pipeline_parallel)
    ]
    size = given.gpus_per_host
    relay = "weight relay"  # of ours, which a hybrid engine has not
    training = max(total_bytes([p for p in parts if p.what != relay]) for parts in stages)
    return TurnsMemory(
        training=training,
        resharding=_WEIGHT * max(own.count for own in owns) + engine,
        generating=recipe.engine_share * gpu_named(given.gpu).memory_gib * 2**30,
        hosts=tuple(sum(of_rank[i : i + size]) for i in range(0, len(of_rank), size)),
    )
