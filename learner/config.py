"""Settings of the learner."""

from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

import msgspec

from slipstream.algos.section import AlgoSection
from slipstream.broker.config import BrokerSection, DataSection
from slipstream.learner.layout import Layout
from slipstream.learner.parallel import ParallelSizes
from slipstream.weightbus.config import WeightBusSection, weightbus_section
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import read_checkpoint_info
from slipstream.wire.files.remote_checkpoints import RemoteCheckpoints
from slipstream.wire.models.adapters import AdapterFacts, refuse_other_adapter
from slipstream.wire.settings.load import Section, Table, section
from slipstream.wire.settings.lora import LoraSection, lora_section
from slipstream.wire.settings.sections import (
    AtLeast0,
    AtLeast1,
    CheckpointSection,
    EnvironmentSection,
    EvalSection,
    NotNegative,
    Positive,
    RunSection,
    SamplingSection,
    model_folder,
    run_section,
)
from slipstream.wire.settings.tenants import Tenant, tenants_of

Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
_MOST_BETA2 = 0.99
Schedule = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]


class LearnerSection(Section, frozen=True, kw_only=True):
    """[learner]: optimizer, parallel sizes, packing.

    With w = `learner.lr_warmup_steps`, step s of the warm-up (from 0) trains with
    (s + 1) / (w + 1) of `learner.lr`, so that the first step is not lost. Names in
    `learner.megatron` are checked when the model is built: unknown ones are refused, and so are
    the ones that follow from the model or from other settings, and for a mixture those of
    Megatron's own experts: the learner has others.
    """

    ranks: AtLeast1 = 1
    """Processes of the learner, on all of its nodes."""
    ranks_per_node: AtLeast0 = 0
    """Of these, on each node (host); 0 is all on one. Several nodes are started with
    `start-learner --node K --rendezvous HOST:PORT`: [operations.md](operations.md)."""
    tensor_parallel: AtLeast1 = 1
    """Ranks that every layer is split over."""
    sequence_parallel: bool = True
    """With tensor_parallel > 1, split the tokens between layers, too, which saves memory."""
    pipeline_parallel: AtLeast1 = 1
    """Stages that the layers are divided into, one after the other."""
    interleaved_chunks: AtLeast1 = 1
    """Chunks of layers on each pipeline rank, whose passes are interleaved (Megatron's virtual
    pipeline): shorter bubbles for more messages."""
    layers_per_stage: tuple[AtLeast1, ...] = ()
    """Layers of each stage in order, chunk by chunk; not set divides them evenly, the first and the
    last stage getting fewer where something remains."""
    context_parallel: AtLeast1 = 1
    """Ranks that the tokens of a microbatch are divided over: for sequences that are too long for
    one."""
    expert_parallel: AtLeast1 = 1
    """Ranks that the experts are divided over. They are not more ranks: experts divide those of a
    pipeline stage anew."""
    expert_tensor_parallel: AtLeast1 = 1
    """Ranks that each expert is split over."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Compute activations again in the backward pass instead of keeping them: of the modules in
    recompute_modules, or of whole layers."""
    recompute_modules: tuple[Literal["core_attn", "mlp", "moe"], ...] = ("core_attn",)
    """What "selective" computes again; on a GPU attention keeps little, and "mlp" saves most."""
    recompute_layers: AtLeast0 = 0
    """Layers of each stage that "full" computes again, the first ones; 0 is all of them."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the optimizer's two moments in memory; they are computed with in float32 always.
    bfloat16 needs adam_beta2 of at most 0.99: it cannot hold smaller changes."""
    offload: tuple[Literal["weights", "gradients", "optimizer"], ...] = ()
    """What is on the device only while it is used, and on the host in between: weights while
    another model computes (critic, reference, teacher), gradients between updates (they are not
    copied), the optimizer's state but for the moment of its update."""
    optimizer_offload_fraction: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Share of the optimizer that is on the host for good and updates its weights there, by
    Megatron's hybrid device optimizer. learner.threads is how fast."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the parameters; auto is float32 on a CPU, bfloat16 on a GPU. float32 on a GPU is for
    comparisons: there is no kernel for attention over sequences of different lengths."""
    lr: Annotated[float, msgspec.Meta(ge=0, le=10)] = 1e-6
    """Learning rate, the highest of the schedule."""
    vision: Literal["frozen", "trained"] = "frozen"
    """Whether the vision tower of a policy that sees images is trained, too, and published."""
    vision_lr_scale: Annotated[float, msgspec.Meta(ge=0, le=10)] = 1.0
    """Factor on learner.lr for a vision tower that is trained."""
    lr_schedule: Schedule = "constant"
    """How the learning rate falls after its warm-up; WSD is warm-up, stable, decay."""
    lr_warmup_steps: AtLeast0 = 0
    """Learner steps over which the learning rate rises in equal parts to learner.lr."""
    lr_min: NotNegative = 0.0
    """Learning rate at the end of the decay and after it."""
    lr_decay_steps: AtLeast0 = 0
    """Learner step at which learner.lr_min is reached, warm-up included; 0 is run.steps."""
    wsd_decay_steps: AtLeast0 = 0
    """Last learner steps before lr_decay_steps in which WSD decays; the others are stable."""
    wsd_decay: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """How WSD decays."""
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
    prefetch: bool = True
    """Fetch the batch of the next step while one is trained."""
    max_rejected_batches: AtLeast1 = 3
    """End after N batches in a row that could not be trained: not finite, or not valid."""
    threads: AtLeast1 = 1
    """CPU threads per rank."""
    timeout_s: Positive = 900.0
    """A collective that takes longer has failed."""
    rendezvous_timeout_s: Positive = 900.0
    """Nodes wait this long for each other at the start, and a restarted one for node 0."""
    node_silence_s: Positive = 60.0
    """A node that gives no sign of life for this long is gone, and ends the learner."""
    rollouts_per_step: AtLeast0 = 2
    """Trained trajectories to record in rollouts/ per learner step."""
    max_rollout_bytes: AtLeast1 = 64 * 1024 * 1024
    """Size of rollouts/trained.jsonl at which its oldest half is removed."""
    deterministic: bool = False
    """Choose operators that compute the same bits each time; slower on a GPU."""
    peak_tflops: NotNegative = 0.0
    """What one rank's device does at most, in TFLOP/s: throughput/mfu is a share of it. 0 looks a
    GPU up by its name (dense bfloat16); there is no such figure of a CPU or an unknown GPU."""
    megatron: dict[str, str | int | float | bool] = msgspec.field(default_factory=dict)
    """Passed on to megatron-core's TransformerConfig."""

    @property
    def sizes(self) -> ParallelSizes:
        """The parallel sizes."""
        return ParallelSizes(
            tensor=self.tensor_parallel,
            pipeline=self.pipeline_parallel,
            context=self.context_parallel,
            expert=self.expert_parallel,
            expert_tensor=self.expert_tensor_parallel,
            chunks=self.interleaved_chunks,
        )


class ProfileSection(Section, frozen=True, kw_only=True):
    """[profile]: a trace of the learner by torch's profiler."""

    steps: tuple[AtLeast1, AtLeast1] | None = None
    """First and last learner step to trace, counted from 1; not set traces nothing."""
    ranks: tuple[AtLeast0, ...] = (0,)
    """Ranks that write a trace, profile/rank-N.json in the run folder."""
    record_shapes: bool = False
    """Note the shapes of operators' inputs."""
    with_stack: bool = False
    """Note the line of code that called each operator."""
    profile_memory: bool = False
    """Record memory allocations."""


class LearnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that the learner reads."""

    run: RunSection
    learner: LearnerSection
    lora: LoraSection = LoraSection()
    algo: AlgoSection
    weightbus: WeightBusSection
    sampling: SamplingSection = SamplingSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    profile: ProfileSection = ProfileSection()
    drops_equal_rewards: bool = True  # broker.drop_zero_variance
    shuffles: bool = True  # data.shuffle, of demonstrations
    environment: EnvironmentSection = EnvironmentSection()  # whether there are several turns

    @property
    def model(self) -> Path:
        """The folder of the policy to start from, and always of config and tokenizer."""
        return model_folder(self.run, with_weights=True)

    @property
    def adapters(self) -> AdapterFacts | None:
        """The adapters that are trained; None if all weights are."""
        return self.lora.facts() if self.lora.is_on else None

    @property
    def shares_prompts(self) -> bool:
        """True if siblings in one microbatch compute their prompt once.

        Context parallelism divides the tokens of each sequence; with R3 each sibling has experts of
        its own in the prompt.
        """
        return self.learner.sizes.context == 1 and self.run.routing_replay != "R3"

    def base_is(self, reference: str) -> bool:
        """True if a reference policy (algo.kl.reference) is the policy without its adapters."""
        return self.lora.is_on and reference in {"", self.run.model, str(model_folder(self.run))}

    @property
    def resume_from(self) -> Path | None:
        """The checkpoint to resume from."""
        return Path(self.run.resume_from) if self.run.resume_from else None

    def resumed(self, checkpoint: Path) -> Self:
        """Return the same settings, resuming from a checkpoint."""
        run = msgspec.structs.replace(self.run, resume_from=str(checkpoint))
        return msgspec.structs.replace(self, run=run)

    @property
    def layout(self) -> Layout:
        """Where the ranks are."""
        learner = self.learner
        return Layout.of(
            ranks=learner.ranks,
            ranks_per_node=learner.ranks_per_node,
            tensor_parallel=learner.tensor_parallel,
        )

    @property
    def lr_decay_steps(self) -> int:
        """The learner step at which the learning rate reaches its minimum."""
        return self.learner.lr_decay_steps or self.run.steps


def learner_settings(table: Table, *, may_resume: bool = False) -> LearnerSettings:
    """Decode and check the learner's sections.

    With ``may_resume`` the run's own checkpoints go before run.resume_from, which by then may have
    been removed.

    Raises:
        ConfigError: naming the wrong setting.
    """
    settings = LearnerSettings(
        run=run_section(table),
        learner=section(table, "learner", LearnerSection),
        lora=lora_section(table),
        algo=section(table, "algo", AlgoSection),
        weightbus=weightbus_section(table),
        sampling=section(table, "sampling", SamplingSection),
        checkpoint=section(table, "checkpoint", CheckpointSection),
        eval=section(table, "eval", EvalSection),
        profile=section(table, "profile", ProfileSection),
        drops_equal_rewards=section(table, "broker", BrokerSection).drop_zero_variance,
        shuffles=section(table, "data", DataSection).shuffle,
        environment=section(table, "environment", EnvironmentSection),
    )
    model_folder(settings.run)
    _check_lora(settings)
    _check_vision(settings)
    if settings.checkpoint.upload:
        RemoteCheckpoints(settings.checkpoint.upload)  # its checks
    if settings.resume_from is not None and not may_resume:
        read_checkpoint_info(settings.resume_from)
    endpoint = settings.algo.teacher.get("endpoint")
    if endpoint and isinstance(endpoint, str):  # before it is written down: it may hold a password
        refuse_no_address(endpoint)
    learner, run = settings.learner, settings.run
    learner.sizes.check(learner.ranks)
    _ = settings.layout  # its checks
    _check_memory(learner)
    replicas = learner.sizes.replicas(learner.ranks)
    trajectories = run.groups_per_step * run.group_size
    if trajectories < replicas * learner.minibatches:
        raise ConfigError(
            f"a learner step of {trajectories} trajectories cannot be split into "
            f"learner.minibatches = {learner.minibatches} for {replicas} replicas"
        )
    _check_schedule(settings)
    profile = settings.profile
    if profile.steps is not None and profile.steps[0] > profile.steps[1]:
        raise ConfigError(f"profile.steps must be [first, last], got {list(profile.steps)}")
    for rank in profile.ranks:
        if rank >= learner.ranks:
            raise ConfigError(
                f"profile.ranks names rank {rank}, there are {learner.ranks} (learner.ranks)"
            )
    return settings


def learner_tenants(
    table: Table, *, may_resume: bool = False
) -> tuple[Tenant[LearnerSettings], ...]:
    """Return the tenants of a pool, each with its settings; none if it is no pool.

    Raises:
        ConfigError: naming the tenant and the wrong setting.
    """

    def decode(tenant: Table) -> LearnerSettings:
        settings = learner_settings(tenant, may_resume=may_resume)
        if not settings.lora.is_named:
            raise ConfigError(
                "a tenant trains adapters that are published as such: set lora.rank, and leave "
                'lora.publish at "named"'
            )
        if "weights" in settings.learner.offload:
            raise ConfigError(
                'learner.offload has "weights", which all tenants share and use in each turn: '
                "leave it out"
            )
        return settings

    return tenants_of(table, decode)


def _check_lora(settings: LearnerSettings) -> None:
    lora = settings.lora
    if not lora.is_on:
        return
    if lora.adapter:
        refuse_other_adapter(Path(lora.adapter), lora.facts())
    if settings.algo.kl.get("renew_every"):
        raise ConfigError(
            f"algo.kl.renew_every = {settings.algo.kl['renew_every']} cannot be had with lora.rank "
            f"= {lora.rank}: the reference policy is the model without adapters, which does not "
            "change"
        )
    if settings.learner.optimizer_offload_fraction:
        raise ConfigError(
            "learner.optimizer_offload_fraction = "
            f"{settings.learner.optimizer_offload_fraction:g} cannot be had with lora.rank = "
            f"{lora.rank}: an optimizer of adapters is small, leave it on the device"
        )


def _check_vision(settings: LearnerSettings) -> None:
    learner = settings.learner
    if learner.vision == "frozen":
        if learner.vision_lr_scale != 1.0:
            raise ConfigError(
                f"learner.vision_lr_scale = {learner.vision_lr_scale:g} has a meaning with "
                'learner.vision = "trained" alone'
            )
        return
    if settings.lora.is_on:
        raise ConfigError(
            f'learner.vision = "trained" cannot be had with lora.rank = {settings.lora.rank}: '
            "adapters alone are trained"
        )


def _check_memory(learner: LearnerSection) -> None:
    if learner.recompute != "selective" and learner.recompute_modules != ("core_attn",):
        raise ConfigError(
            f"learner.recompute_modules = {list(learner.recompute_modules)} has a meaning with "
            f'learner.recompute = "selective" alone, got {learner.recompute!r}'
        )
    if not learner.recompute_modules:
        raise ConfigError(
            "learner.recompute_modules is empty: name what is computed again, or set "
            'learner.recompute = "none"'
        )
    if learner.recompute_layers and learner.recompute != "full":
        raise ConfigError(
            f"learner.recompute_layers = {learner.recompute_layers} has a meaning with "
            f'learner.recompute = "full" alone, got {learner.recompute!r}'
        )
    if learner.moments_dtype == "bfloat16":
        if learner.adam_beta2 > _MOST_BETA2:
            raise ConfigError(
                f'learner.moments_dtype = "bfloat16" needs learner.adam_beta2 <= {_MOST_BETA2}, '
                f"got {learner.adam_beta2:g}: each update changes the second moment by less than "
                "bfloat16 can tell apart"
            )
        if learner.optimizer_offload_fraction:
            raise ConfigError(
                'learner.moments_dtype = "bfloat16" cannot be had with '
                f"learner.optimizer_offload_fraction = {learner.optimizer_offload_fraction:g}, "
                "whose optimizer is Megatron's: set one of them"
            )
    if learner.optimizer_offload_fraction and learner.dtype == "float32":
        raise ConfigError(
            f"learner.optimizer_offload_fraction = {learner.optimizer_offload_fraction:g} needs "
            'weights in bfloat16, got learner.dtype = "float32"'
        )
    if learner.optimizer_offload_fraction and "optimizer" in learner.offload:
        raise ConfigError(
            f"learner.optimizer_offload_fraction = {learner.optimizer_offload_fraction:g} updates "
            'a share on the host, and learner.offload has "optimizer", which updates all on the '
            "device: set one of them"
        )


def _check_schedule(settings: LearnerSettings) -> None:
    learner, decay_steps = settings.learner, settings.lr_decay_steps
    if learner.lr_min > learner.lr:
        raise ConfigError(f"learner.lr_min = {learner.lr_min} is above learner.lr = {learner.lr}")
    if learner.lr_schedule == "constant":
        for name in ("lr_min", "lr_decay_steps"):
            if getattr(learner, name):
                raise ConfigError(
                    f'learner.{name} has no meaning with learner.lr_schedule = "constant"'
                )
        return
    what = "learner.lr_decay_steps" if learner.lr_decay_steps else "run.steps"
    if learner.lr_warmup_steps >= decay_steps:
        raise ConfigError(
            f"learner.lr_warmup_steps = {learner.lr_warmup_steps} must be below "
            f"{what} = {decay_steps}, where the decay ends"
        )
    stable_to = decay_steps - learner.lr_warmup_steps
    if learner.lr_schedule == "WSD" and not 0 < learner.wsd_decay_steps <= stable_to:
        raise ConfigError(
            f'learner.lr_schedule = "WSD" needs learner.wsd_decay_steps from 1 to {stable_to} '
            f"({what} - learner.lr_warmup_steps), got {learner.wsd_decay_steps}"
        )
    if learner.lr_schedule != "WSD" and learner.wsd_decay_steps:
        raise ConfigError(
            "learner.wsd_decay_steps has no meaning with "
            f'learner.lr_schedule = "{learner.lr_schedule}"'
        )


def refuse_no_address(endpoint: str) -> None:
    """Refuse an invalid server address.

    Raises:
        ConfigError: the address is invalid; the message has the reason, but no password.
    """
    try:
        parts = urlsplit(endpoint)
        host = parts.hostname or ""
        host.encode("idna")
        is_whole = parts.port != 0 and endpoint.split() == [endpoint]
    except ValueError as error:
        raise ConfigError(f"algo.teacher.endpoint is no address: {error}") from error
    if parts.scheme not in {"http", "https"} or not host or "@" in parts.netloc:
        raise ConfigError(
            "algo.teacher.endpoint must be http:// or https:// and a host, without a user, got "
            f"{parts.scheme or 'no scheme'} and {host or 'no host'}"
        )
    if not is_whole or parts.query or parts.fragment:
        raise ConfigError(
            "algo.teacher.endpoint must be http:// or https:// and a host, with a port above 0, "
            "and no white space, query or fragment after it"
        )
