"""The policy that a learner starts from, with the other models of its algorithm."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import torch

from slipstream.algos.compose import Algorithm
from slipstream.learner.checkpoints.identity import architecture_of
from slipstream.learner.checkpoints.loading import DamagedCheckpointError, load_checkpoint
from slipstream.learner.checkpoints.resume import resume_order
from slipstream.learner.config import LearnerSection, LearnerSettings
from slipstream.learner.model import device
from slipstream.learner.model.adapters.lora import add_adapters
from slipstream.learner.model.adapters.peft import hash_of_base, load_adapter
from slipstream.learner.model.collectives import broadcast_bytes
from slipstream.learner.model.division import POLICY, section_for, with_vision
from slipstream.learner.model.gpt import build_model
from slipstream.learner.model.rank_model import RankModel
from slipstream.learner.model.topology import Topology
from slipstream.learner.model.weights.hf_weights import load_hf_weights
from slipstream.learner.training.critic import Critic, with_value_head
from slipstream.learner.training.offload import Offload
from slipstream.learner.training.policy import Policy, ReferencePolicy, Teacher
from slipstream.learner.training.teacher import EndpointTeacher
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import read_checkpoint_info, readable_checkpoints
from slipstream.wire.models.hf_config import HfConfig, load_hf_config, refuse_other_tokens
from slipstream.wire.settings.sections import local_model

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FrozenBase:
    """A model without adapters, for policies that are sets of adapters of it."""

    model: RankModel
    offload: Offload
    digest: str  # hash of its weight files

    @classmethod
    def load(cls, settings: LearnerSettings, topology: Topology) -> Self:
        """Load the model of run.model; every rank calls this."""
        data = hash_of_base(settings.model).encode() if topology.rank == 0 else None
        model = load_model(settings.learner, settings.model)
        return cls(model, Offload(settings.learner.offload), broadcast_bytes(data).decode())


def start_policy(
    settings: LearnerSettings,
    algorithm: Algorithm,
    topology: Topology,
    *,
    resumes: bool,
    begun_after: int | None,
    base: FrozenBase | None = None,
) -> tuple[LearnerSettings, Policy]:
    """Return the policy to start from, and the settings that name it. Every rank calls this.

    A learner that resumes starts from the newest checkpoint of its run that can be loaded, or else
    from the policy of the settings. ``base`` is that of ``build_policy``.

    Raises:
        ConfigError: the checkpoint named by run.resume_from cannot be used, or one of the run's is
            of another model.
    """
    names: list[str] = []  # the run's own checkpoints, best first, as rank 0 sees them
    if resumes and topology.rank == 0:
        infos = {p.resolve(): i for p, i in readable_checkpoints(settings.run.checkpoints).items()}
        named = settings.resume_from.resolve() if settings.resume_from is not None else None
        names = [str(path) for path in resume_order(infos, named, begun_after=begun_after)]
    if resumes:
        data = msgspec.msgpack.encode(names)
        data = broadcast_bytes(data)
        names = msgspec.msgpack.decode(data, type=list[str])
    for name in names:
        chosen = settings.resumed(Path(name))
        try:
            return chosen, build_policy(chosen, algorithm, topology, base)
        except DamagedCheckpointError as error:
            _log.error("%s; the one before it is tried", error)
    return settings, build_policy(settings, algorithm, topology, base)


def build_policy(
    settings: LearnerSettings,
    algorithm: Algorithm,
    topology: Topology,
    base: FrozenBase | None = None,
) -> Policy:
    """Return the policy to start from: a checkpoint's, or that of a Hugging Face folder.

    Its adapters are added to ``base``, which other policies may share; None loads a model.
    """
    learner, choice = settings.learner, algorithm.choice
    fill = settings.resume_from is None
    hf = load_hf_config(settings.model)
    if settings.run.routing_replay != "off" and not hf.num_routed_experts:
        raise ConfigError(
            f'run.routing_replay = "{settings.run.routing_replay}" needs experts to route to, and '
            f"run.model is {hf.model_type} without any"
        )
    offload = base.offload if base is not None else Offload(learner.offload)
    others = _OtherModels(settings, algorithm, topology, hf, offload)
    reference, teacher = others.reference(), others.teacher()
    decay_steps = settings.lr_decay_steps
    critic = others.critic(decay_steps, fill=fill)
    if critic is not None and not learner.lr_decay_steps:
        # The policy is trained in the steps after the critic's warm-up.
        decay_steps = max(1, decay_steps - choice.critic.warmup_steps)
    policy = Policy(
        _policy_model(settings, topology, base, fill=fill),
        learner,
        topology,
        decay_steps=decay_steps,
        reference=reference,
        base_is_reference=others.base_is_reference,
        renews_reference=choice.kl.renew_every > 0,
        teacher=teacher,
        critic=critic,
        needs_full_kl=algorithm.needs_full_kl,
        needs_squares=algorithm.needs_squares,
        offload=offload,
        replay=settings.run.routing_replay,
    )
    if settings.resume_from is not None:
        info = read_checkpoint_info(settings.resume_from)
        load_checkpoint(policy, topology, settings.resume_from, info)
        _log.info("resumes from %s", settings.resume_from)
    return policy


class _OtherModels:
    """The models besides the policy that an algorithm needs."""

    def __init__(
        self,
        settings: LearnerSettings,
        algorithm: Algorithm,
        topology: Topology,
        hf: HfConfig,
        offload: Offload,
    ) -> None:
        choice = algorithm.choice
        self._settings = settings
        self._algorithm = algorithm
        self._choice = choice
        self._topology = topology
        self._hf = hf
        self._frozen: dict[Path, ReferencePolicy] = {}
        self.offload = offload
        self.base_is_reference = choice.needs_reference and settings.base_is(choice.kl.reference)

    def reference(self) -> ReferencePolicy | None:
        """Load the reference policy, if it is a model of its own."""
        settings, kl = self._settings, self._choice.kl
        if not self._choice.needs_reference or self.base_is_reference:
            return None
        folder, setting = settings.model, "run.model"
        if kl.reference:
            setting = "algo.kl.reference"
            folder = local_model(settings.run, kl.reference, setting, with_weights=True)
        reference = self._frozen_policy(folder, setting)
        if not kl.renew_every:
            self._frozen[folder.resolve()] = reference  # a teacher of this folder is the same model
        elif architecture_of(load_hf_config(folder)) != architecture_of(self._hf):
            raise ConfigError(
                f"{folder} (algo.kl.reference) has another architecture than run.model: it cannot "
                "become the policy (algo.kl.renew_every)"
            )
        return reference

    def teacher(self) -> Teacher | None:
        """Load the teacher, or connect to it; after the reference policy, which it may be."""
        if not self._choice.has_teacher:
            return None
        options, settings = self._choice.teacher, self._settings
        if options.endpoint and self._hf.vision is not None:
            raise ConfigError(
                "algo.teacher.endpoint is given tokens alone, and run.model "
                f"({self._hf.model_type}) sees images: name a folder in algo.teacher.model"
            )
        if options.endpoint:
            vocab_size, timeout_s = self._hf.vocab_size, settings.learner.timeout_s
            return EndpointTeacher(
                options, self._topology, vocab_size=vocab_size, timeout_s=timeout_s
            )
        setting = "algo.teacher.model"
        folder = local_model(settings.run, options.model, setting, with_weights=True)
        return self._frozen_policy(folder, setting)

    def critic(self, decay_steps: int, *, fill: bool) -> Critic | None:
        """Make a critic of the policy's architecture."""
        if not self._choice.needs_values:
            return None
        learner, lr = self._settings.learner, self._choice.critic.lr
        lr_min = lr * learner.lr_min / learner.lr if learner.lr > 0 else 0.0
        return Critic(
            with_value_head(load_model(learner, self._settings.model, fill=fill)),
            msgspec.structs.replace(learner, lr=lr, lr_min=lr_min),
            self._topology,
            decay_steps=decay_steps,
            offload=self.offload,
        )

    def _frozen_policy(self, folder: Path, setting: str) -> ReferencePolicy:
        whole = self._algorithm.needs_full_kl
        refuse_other_tokens(folder, self._settings.model, setting, whole=whole)
        _refuse_other_eyes(self._hf, folder, setting)
        if (known := self._frozen.get(folder.resolve())) is not None:
            return known
        model = load_model(self._settings.learner, folder, setting)
        return ReferencePolicy(model, self._topology, offload=self.offload)


def _refuse_other_eyes(policy: HfConfig, folder: Path, setting: str) -> None:
    """Refuse a frozen policy that does not see the images that the policy sees.

    Raises:
        ConfigError: it has no vision tower, or one that reads other patches.
    """
    ours, theirs = (
        (hf.vision.channels, hf.vision.spatial_merge_size, hf.image_token) if hf.vision else None
        for hf in (policy, load_hf_config(folder, setting))
    )
    if ours is not None and ours != theirs:
        raise ConfigError(
            f"{folder} ({setting}) must see what run.model sees: numbers of a patch, patches "
            f"merged each way and the token of images are {theirs}, expected {ours}"
        )


def _policy_model(
    settings: LearnerSettings, topology: Topology, base: FrozenBase | None, *, fill: bool
) -> RankModel:
    """Return the model under training; the weights below adapters are in no checkpoint."""
    lora = settings.lora
    if not lora.is_on:
        return load_model(settings.learner, settings.model, fill=fill)
    base = base or FrozenBase.load(settings, topology)
    model = base.model.sharing()
    add_adapters(model, lora.facts(base=base.digest), seed=settings.run.seed)
    if fill and lora.adapter:
        load_adapter(model, Path(lora.adapter))
    return model


def load_model(
    learner: LearnerSection, folder: Path, setting: str = "run.model", *, fill: bool = True
) -> RankModel:
    """Return the model in a folder that a setting names, with its weights or random ones."""
    on_gpu = device.device().type == "cuda"
    bfloat16 = learner.dtype == "bfloat16" or (learner.dtype == "auto" and on_gpu)
    hf = with_vision(load_hf_config(folder, setting), learner, setting)
    section = learner if setting == POLICY else section_for(hf, learner)
    extra = dict(section.megatron)
    if learner.deterministic:
        extra.setdefault("deterministic_mode", True)
    model = build_model(
        hf,
        dtype=torch.bfloat16 if bfloat16 else torch.float32,
        extra=extra,
        learner=section,
        setting=setting,
    )
    if fill:
        load_hf_weights(model, folder, setting)
    model.train()
    return model
