"""Builds the learner's ranks and runs them. Import it only after ``device.prepare()``."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
from megatron.core.models.gpt import GPTModel
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]  # not in torch's stubs

from slipstream.algos.compose import Algorithm
from slipstream.learner.batches.background import BackgroundLoop
from slipstream.learner.batches.broker_link import LeaderLink
from slipstream.learner.batches.links import LeadingLink, RankLink
from slipstream.learner.batches.payload_link import PayloadLink
from slipstream.learner.batches.prefetch import EarlyPlans
from slipstream.learner.batches.replay_link import ReplayLink
from slipstream.learner.checkpoints.files import (
    DamagedCheckpointError,
    architecture_of,
    load_checkpoint,
)
from slipstream.learner.checkpoints.resume import resume_order
from slipstream.learner.config import LearnerSettings
from slipstream.learner.coordinator import Coordinator
from slipstream.learner.loop import LearnerLoop
from slipstream.learner.model import device
from slipstream.learner.model.collectives import broadcast_bytes
from slipstream.learner.model.gpt import build_model
from slipstream.learner.model.hf_config import load_hf_config, refuse_other_tokens
from slipstream.learner.model.hf_weights import load_hf_weights
from slipstream.learner.model.topology import Topology, destroy_topology, init_topology
from slipstream.learner.publish.relay_link import RelayLaunch
from slipstream.learner.stop import StopRequest
from slipstream.learner.training.algorithm import algorithm_of
from slipstream.learner.training.critic import Critic, with_value_head
from slipstream.learner.training.policy import Policy, ReferencePolicy, Teacher
from slipstream.learner.training.teacher import EndpointTeacher
from slipstream.weightbus.net.interfaces import interface_variables
from slipstream.weightbus.net.rendezvous import open_store
from slipstream.wire.errors import ChildDiedError, ConfigError
from slipstream.wire.files.checkpoints import read_checkpoint_info, readable_checkpoints
from slipstream.wire.process.phases import PhaseClock
from slipstream.wire.process.processes import bound_to_me

_log = logging.getLogger(__name__)
_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Launch:
    """How this start of a learner differs from others of the same settings."""

    replay: Path | None = None  # trajectory file to train on in place of what a broker delivers
    resumes: bool = False  # resume from the run's newest usable checkpoint
    relay: RelayLaunch = field(default_factory=RelayLaunch)


def run_learner(
    settings: LearnerSettings, argv: Sequence[str], *, launch: Launch, stop: StopRequest
) -> None:
    """Run rank 0 here and every other rank in a child process.

    Args:
        settings: the run's.
        argv: the command line that the children repeat.
        launch: how it starts.
        stop: whether this process has been asked to stop.

    Raises:
        ConfigError: the settings name no algorithm that this run can train.
        ChildDiedError: a rank ended before its time.
    """
    algorithm = algorithm_of(settings)
    if algorithm.choice.learns_from_equal_rewards and settings.drops_equal_rewards:
        _log.warning(
            "groups of equal rewards teach this algorithm as well (algo.advantage, algo.teacher, "
            "algo.likelihood), and "
            "broker.drop_zero_variance = true has them replaced: set it to false"
        )
    ranks = settings.learner.ranks
    if ranks == 1:
        run_rank(
            settings,
            algorithm,
            rank=0,
            store=HashStore(),
            early=None,
            launch=launch,
            stop=stop,
        )
        return
    store = open_store(_HOST, world_size=ranks, timeout_s=settings.learner.timeout_s)
    children = [_start_rank(argv, rank, store.port) for rank in range(1, ranks)]
    try:
        early = EarlyPlans(_join_store(settings, store.port))
        run_rank(settings, algorithm, rank=0, store=store, early=early, launch=launch, stop=stop)
        for rank, child in enumerate(children, start=1):
            try:
                code = child.wait(settings.learner.timeout_s)
            except subprocess.TimeoutExpired as error:
                raise ChildDiedError(f"learner rank {rank} did not end") from error
            if code != 0:
                raise ChildDiedError(f"learner rank {rank} ended with code {code}")
    except RuntimeError as error:
        dead = [r for r, child in enumerate(children, 1) if child.poll() not in {None, 0}]
        raise ChildDiedError(f"learner ranks {dead} ended; {error}") from error
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()


def join_ranks(settings: LearnerSettings, *, rank: int, port: int, launch: Launch) -> None:
    """Run one of the other ranks, in a process that rank 0 started."""
    run_rank(
        settings,
        algorithm_of(settings),
        rank=rank,
        store=_join_store(settings, port),
        early=EarlyPlans(_join_store(settings, port)),
        launch=launch,
        stop=StopRequest(),
    )


def _join_store(settings: LearnerSettings, port: int) -> TCPStore:
    timeout = timedelta(seconds=settings.learner.timeout_s)
    return TCPStore(_HOST, port, is_master=False, timeout=timeout)


def run_rank(
    settings: LearnerSettings,
    algorithm: Algorithm,
    *,
    rank: int,
    store: Store,
    early: EarlyPlans | None,
    launch: Launch,
    stop: StopRequest,
) -> None:
    """Build the policy on this rank and train."""
    learner = settings.learner
    os.environ.update(interface_variables(_HOST, os.environ))  # noqa: TID251 they have no setting
    device.set_threads(learner.threads)
    if learner.deterministic:
        device.set_deterministic()
    device.select(rank)
    topology = init_topology(
        rank=rank,
        world_size=learner.ranks,
        tensor_parallel=learner.tensor_parallel,
        store=store,
        seed=settings.run.seed,
        timeout_s=learner.timeout_s,
    )
    try:
        settings, policy = start_policy(settings, algorithm, topology, resumes=launch.resumes)
        clock = PhaseClock()
        with (
            _open_link(settings, topology, early, launch, clock, stop) as (link, leader),
            stop.deferred(when=settings.checkpoint.on_stop),
        ):
            coordinator = Coordinator(leader, topology, stop)
            LearnerLoop(settings, topology, policy, algorithm, link, coordinator, clock).run()
    finally:
        destroy_topology()


def start_policy(
    settings: LearnerSettings, algorithm: Algorithm, topology: Topology, *, resumes: bool
) -> tuple[LearnerSettings, Policy]:
    """Return the policy to start from, and the settings that name it. Every rank calls this.

    A learner that resumes starts from the newest checkpoint of its run that can be loaded; where
    there is none it starts from the policy of the settings.

    Raises:
        ConfigError: the checkpoint named by run.resume_from cannot be used, or one of the run's is
            of another model.
    """
    if resumes:
        for path in _resume_order(settings, topology):
            chosen = settings.resumed(path)
            try:
                return chosen, build_policy(chosen, algorithm, topology)
            except DamagedCheckpointError as error:
                _log.error("%s; the one before it is tried", error)
    return settings, build_policy(settings, algorithm, topology)


def _resume_order(settings: LearnerSettings, topology: Topology) -> list[Path]:
    """Return the run's own checkpoints to try, as rank 0 sees them."""
    names: list[str] = []
    if topology.rank == 0:
        infos = {p.resolve(): i for p, i in readable_checkpoints(settings.run.checkpoints).items()}
        named = settings.resume_from.resolve() if settings.resume_from is not None else None
        names = [str(path) for path in resume_order(infos, named)]
    data = msgspec.msgpack.encode(names)
    agreed = broadcast_bytes(data, rank=topology.rank, world_size=topology.world_size)
    return [Path(name) for name in msgspec.msgpack.decode(agreed, type=list[str])]


def build_policy(settings: LearnerSettings, algorithm: Algorithm, topology: Topology) -> Policy:
    """Return the policy to start from: a checkpoint's, or that of a Hugging Face folder."""
    learner = settings.learner
    extra = dict(learner.megatron)
    if learner.deterministic:
        extra.setdefault("deterministic_mode", True)
    choice = algorithm.choice
    resumes = settings.resume_from is not None

    def build(folder: Path, setting: str = "run.model", *, fill: bool = True) -> GPTModel:
        hf = load_hf_config(folder, setting)
        model = build_model(hf, dtype=_dtype(learner.dtype), extra=extra)
        if fill:
            load_hf_weights(model, folder, setting)
        model.train()
        return model

    hf = load_hf_config(settings.model)
    critic = None
    frozen: dict[Path, ReferencePolicy] = {}

    def frozen_policy(folder: Path, setting: str) -> ReferencePolicy:
        refuse_other_tokens(folder, settings.model, setting, whole=algorithm.needs_full_kl)
        known = frozen.get(folder.resolve())
        return known if known is not None else ReferencePolicy(build(folder, setting), topology)

    reference: ReferencePolicy | None = None
    decay_steps = settings.lr_decay_steps
    if choice.needs_reference:
        folder = Path(choice.kl.reference) if choice.kl.reference else settings.model
        setting = "algo.kl.reference" if choice.kl.reference else "run.model"
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
            choice.teacher,
            topology,
            vocab_size=hf.vocab_size,
            timeout_s=learner.timeout_s,
        )
    elif choice.has_teacher:
        teacher = frozen_policy(Path(choice.teacher.model), "algo.teacher.model")
    if choice.needs_values:
        lr = choice.critic.lr
        lr_min = lr * learner.lr_min / learner.lr if learner.lr > 0 else 0.0
        critic = Critic(
            with_value_head(build(settings.model, fill=not resumes)),
            msgspec.structs.replace(learner, lr=lr, lr_min=lr_min),
            topology,
            decay_steps=decay_steps,
        )
        if not learner.lr_decay_steps:  # the policy is trained in the steps after the warm-up
            decay_steps = max(1, decay_steps - choice.critic.warmup_steps)
    policy = Policy(
        build(settings.model, fill=not resumes),
        learner,
        topology,
        decay_steps=decay_steps,
        reference=reference,
        renews_reference=choice.kl.renew_every > 0,
        teacher=teacher,
        critic=critic,
        needs_full_kl=algorithm.needs_full_kl,
        needs_squares=algorithm.needs_squares,
    )
    if settings.resume_from is not None:
        info = read_checkpoint_info(settings.resume_from)
        load_checkpoint(policy, topology, settings.resume_from, info)
        _log.info("resumes from %s", settings.resume_from)
    return policy


@contextmanager
def _open_link(
    settings: LearnerSettings,
    topology: Topology,
    early: EarlyPlans | None,
    launch: Launch,
    clock: PhaseClock,
    stop: StopRequest,
) -> Iterator[tuple[RankLink | None, LeadingLink | None]]:
    """Open the link of a rank that fetches payloads, and the same as the leading one on rank 0."""
    if topology.tensor_parallel_rank != 0:
        yield None, None
        return
    if launch.replay is not None:
        file = ReplayLink(launch.replay, settings)
        yield file, file if topology.rank == 0 else None
        return
    with BackgroundLoop() as loop:
        link: PayloadLink
        leader: LeaderLink | None = None
        if topology.rank == 0:
            several = early if topology.data_parallel > 1 else None
            link = leader = LeaderLink(
                loop, settings, clock, lambda: stop.requested, relay=launch.relay, early=several
            )
        else:
            name, replica = f"learner-rank-{topology.rank}", topology.data_parallel_rank
            link = PayloadLink(loop, settings, name, replica=replica, early=early)
        try:
            yield link, leader
        except SystemExit:  # asked to stop at once
            if leader is not None:
                leader.end()
            raise
        finally:
            link.close()


def _dtype(name: str) -> torch.dtype:
    on_gpu = device.device().type == "cuda"
    if name == "float32" and on_gpu:
        raise ConfigError("learner.dtype = float32 cannot run on a GPU: flash attention needs bf16")
    bfloat16 = name == "bfloat16" or (name == "auto" and on_gpu)
    return torch.bfloat16 if bfloat16 else torch.float32


def _start_rank(argv: Sequence[str], rank: int, port: int) -> "subprocess.Popen[bytes]":
    die_with_me = bound_to_me()

    def prepare() -> None:
        die_with_me()
        for signum in (signal.SIGTERM, signal.SIGINT):  # rank 0 alone decides when to end
            signal.signal(signum, signal.SIG_IGN)

    return subprocess.Popen(  # noqa: S603 our own program
        [
            sys.executable,
            "-m",
            "slipstream.learner.main",
            *argv,
            "--rank",
            str(rank),
            "--port",
            str(port),
        ],
        preexec_fn=prepare,
    )
