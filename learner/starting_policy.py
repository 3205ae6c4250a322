"""The policy that a learner starts from, with the models beside it."""

import logging
from pathlib import Path

import msgspec
import torch

from slipstream.algos.compose import Algorithm
from slipstream.learner.checkpoints.identity import architecture_of
from slipstream.learner.checkpoints.loading import DamagedCheckpointError, load_checkpoint
from slipstream.learner.checkpoints.resume import resume_order
from slipstream.learner.config import LearnerSection, LearnerSettings
from slipstream.learner.model import device
from slipstream.learner.model.collectives import broadcast_bytes
from slipstream.learner.model.division import POLICY, section_for
from slipstream.learner.model.gpt import build_model
from slipstream.learner.model.hf_weights import load_hf_weights
from slipstream.learner.model.lora import add_adapters
from slipstream.learner.model.peft import hash_of_base, load_adapter
from slipstream.learner.model.rank_model import RankModel
from slipstream.learner.model.topology import Topology
from slipstream.learner.training.critic import Critic, with_value_head
from slipstream.learner.training.offload import Offload
from slipstream.learner.training.policy import Policy, ReferencePolicy, Teacher
from slipstream.learner.training.teacher import EndpointTeacher
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import read_checkpoint_info, readable_checkpoints
from slipstream.wire.models.hf_config import load_hf_config, refuse_other_tokens
from slipstream.wire.settings.sections import local_model

_log = logging.getLogger(__name__)


def start_policy(
    settings: LearnerSettings,
    algorithm: Algorithm,
    topology: Topology,
    *,
    resumes: bool,
    begun_after: int | None,
) -> tuple[LearnerSettings, Policy]:
    """Return the policy to start from, and the settings that name it. Every rank calls this.

    A learner that resumes starts from the newest checkpoint of its run that can be loaded; where
    there is none it starts from the policy of the settings.

    Raises:
        ConfigError: the checkpoint named by run.resume_from cannot be used, or one of the run's is
            of another model.
    """
    names: list[str] = []  # of the run's own checkpoints, best first, as rank 0 sees them
    if resumes and topology.rank == 0:
        infos = {p.resolve(): i for p, i in readable_checkpoints(settings.run.checkpoints).items()}
        named = settings.resume_from.resolve() if settings.resume_from is not None else None
        names = [str(path) for path in resume_order(infos, named, begun_after=begun_after)]
    if resumes:
        data = msgspec.msgpack.encode(names)
        data = broadcast_bytes(data, rank=topology.rank, world_size=topology.world_size)
        names = msgspec.msgpack.decode(data, type=list[str])
    for name in names:
        chosen = settings.resumed(Path(name))
        try:
            return chosen, build_policy(chosen, algorithm, topology)
        except DamagedCheckpointError as error:
            _log.error("%s; the one before it is tried", error)
    return settings, build_policy(settings, algorithm, topology)


def build_policy(settings: LearnerSettings, algorithm: Algorithm, topology: Topology) -> Policy:
    """Return the policy to start from: a checkpoint's, or that of a Hugging Face folder."""
    learner, choice = settings.learner, algorithm.choice
    resumes = settings.resume_from is not None
    hf = load_hf_config(settings.model)
    if settings.run.routing_replay != "off" and not hf.num_routed_experts:
        raise ConfigError(
            f'run.routing_replay = "{settings.run.routing_replay}" needs experts to route to, and '
            f"run.model is {hf.model_type} without any"
        )
    offload = Offload(learner.offload)
    critic = None
    frozen: dict[Path, ReferencePolicy] = {}

    def frozen_policy(folder: Path, setting: str) -> ReferencePolicy:
        refuse_other_tokens(folder, settings.model, setting, whole=algorithm.needs_full_kl)
        if (known := frozen.get(folder.resolve())) is not None:
            return known
        return ReferencePolicy(load_model(learner, folder, setting), topology, offload=offload)

    reference: ReferencePolicy | None = None
    base_is_reference = choice.needs_reference and settings.base_is(choice.kl.reference)
    decay_steps = settings.lr_decay_steps
    if choice.needs_reference and not base_is_reference:
        folder, setting = settings.model, "run.model"
        if choice.kl.reference:
            setting = "algo.kl.reference"
            folder = local_model(settings.run, choice.kl.reference, setting, with_weights=True)
        reference = frozen_policy(folder, setting)
        if not choice.kl.renew_every:
            frozen[folder.resolve()] = reference  # a teacher of this folder is the same model
        elif architecture_of(load_hf_config(folder)) != architecture_of(hf):
            raise ConfigError(
                f"{folder} (algo.kl.reference) has another architecture than run.model: it cannot "
                "become the policy (algo.kl.renew_every)"
            )
    teacher: Teacher | None = None
    if choice.has_teacher and choice.teacher.endpoint:
        teacher = EndpointTeacher(
            choice.teacher, topology, vocab_size=hf.vocab_size, timeout_s=learner.timeout_s
        )
    elif choice.has_teacher:
        setting = "algo.teacher.model"
        folder = local_model(settings.run, choice.teacher.model, setting, with_weights=True)
        teacher = frozen_policy(folder, setting)
    if choice.needs_values:
        lr = choice.critic.lr
        lr_min = lr * learner.lr_min / learner.lr if learner.lr > 0 else 0.0
        critic = Critic(
            with_value_head(load_model(learner, settings.model, fill=not resumes)),
            msgspec.structs.replace(learner, lr=lr, lr_min=lr_min),
            topology,
            decay_steps=decay_steps,
            offload=offload,
        )
        if not learner.lr_decay_steps:  # the policy is trained in the steps after the warm-up
            decay_steps = max(1, decay_steps - choice.critic.warmup_steps)
    policy = Policy(
        _policy_model(settings, topology, fill=not resumes),
        learner,
        topology,
        decay_steps=decay_steps,
        reference=reference,
        base_is_reference=base_is_reference,
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


def _policy_model(settings: LearnerSettings, topology: Topology, *, fill: bool) -> RankModel:
    """Return the model under training; the weights below adapters are in no checkpoint."""
    lora = settings.lora
    if not lora.is_on:
        return load_model(settings.learner, settings.model, fill=fill)
    data = hash_of_base(settings.model).encode() if topology.rank == 0 else None
    base = broadcast_bytes(data, rank=topology.rank, world_size=topology.world_size).decode()
    model = load_model(settings.learner, settings.model)
    add_adapters(model, lora.facts(base=base), seed=settings.run.seed)
    if fill and lora.adapter:
        load_adapter(model, Path(lora.adapter))
    return model


def load_model(
    learner: LearnerSection, folder: Path, setting: str = "run.model", *, fill: bool = True
) -> RankModel:
    """Return the model in a folder that a setting names, with its weights or random ones."""
    on_gpu = device.device().type == "cuda"
    bfloat16 = learner.dtype == "bfloat16" or (learner.dtype == "auto" and on_gpu)
    hf = load_hf_config(folder, setting)
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
