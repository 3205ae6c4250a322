"""Settings of the learner."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from algos.config import AlgoSection
from weightbus.config import WeightBusSection
from wire.errors import ConfigError
from wire.run_settings import AtLeast0, AtLeast1, Positive, RunSection, model_folder, run_section
from wire.settings import Section, Table, section

Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class LearnerSection(Section, frozen=True, kw_only=True):
    """[learner]: optimizer, parallel sizes, packing."""

    ranks: AtLeast1 = 1
    """Processes of the learner on this node."""
    tensor_parallel: AtLeast1 = 1
    """Ranks that share one replica of the model; the others are data parallel."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the parameters; auto is float32 on a CPU, bfloat16 on a GPU."""
    lr: Annotated[float, msgspec.Meta(ge=0, le=10)] = 1e-6
    """Learning rate."""
    weight_decay: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Decoupled weight decay."""
    adam_beta1: Share = 0.9
    """Decay of Adam's first moment."""
    adam_beta2: Share = 0.95
    """Decay of Adam's second moment."""
    adam_epsilon: Positive = 1e-8
    """Adam's epsilon."""
    clip_grad: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    minibatches: AtLeast1 = 1
    """Optimizer updates per learner step."""
    max_tokens_per_microbatch: AtLeast1 = 8192
    """Sequences are packed into microbatches of at most this many tokens."""
    threads: AtLeast1 = 1
    """CPU threads per rank."""
    timeout_s: Positive = 300.0
    """A collective that takes longer has failed."""
    rollouts_per_step: AtLeast0 = 2
    """Trained trajectories to record in rollouts/ per learner step."""
    max_rollout_bytes: AtLeast0 = 64 * 1024 * 1024
    """Recording stops at this size."""
    save_final: bool = True
    """Save the trained policy as a Hugging Face folder in the run folder."""
    megatron: dict[str, str | int | float | bool] = msgspec.field(default_factory=dict)
    """Passed on to megatron-core's TransformerConfig."""


class LearnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that the learner reads."""

    run: RunSection
    learner: LearnerSection
    algo: AlgoSection
    weightbus: WeightBusSection

    @property
    def model(self) -> Path:
        """Return the folder of the policy to start from."""
        return Path(self.run.model)


def learner_settings(table: Table) -> LearnerSettings:
    """Decode and check the learner's sections."""
    settings = LearnerSettings(
        run=run_section(table),
        learner=section(table, "learner", LearnerSection),
        algo=section(table, "algo", AlgoSection),
        weightbus=section(table, "weightbus", WeightBusSection),
    )
    model_folder(settings.run)
    learner, run = settings.learner, settings.run
    if learner.ranks % learner.tensor_parallel:
        raise ConfigError(
            f"learner.ranks = {learner.ranks} is not a multiple of "
            f"learner.tensor_parallel = {learner.tensor_parallel}"
        )
    replicas = learner.ranks // learner.tensor_parallel
    trajectories = run.groups_per_step * run.group_size
    if trajectories < replicas * learner.minibatches:
        raise ConfigError(
            f"a learner step of {trajectories} trajectories cannot be split into "
            f"learner.minibatches = {learner.minibatches} for {replicas} replicas"
        )
    if run.group_size < 2:
        raise ConfigError(
            f"run.group_size must be >= 2 for group-relative advantages, got {run.group_size}"
        )
    return settings
