"""Builds the learner's ranks and runs them. Import it only after ``device.prepare()``."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]  # not in torch's stubs

from learner import device
from learner.background import BackgroundLoop
from learner.broker_link import LeaderLink, PayloadLink
from learner.checkpoint import load_checkpoint
from learner.config import LearnerSettings
from learner.hf_config import load_hf_config
from learner.hf_weights import load_hf_weights
from learner.links import LeadingLink, RankLink
from learner.loop import LearnerLoop
from learner.model import build_model
from learner.policy import Policy
from learner.replay_link import ReplayLink
from learner.stop import StopRequest
from learner.topology import Topology, destroy_topology, init_topology
from weightbus.rendezvous import open_store
from wire.checkpoints import read_checkpoint_info
from wire.errors import ChildDiedError, ConfigError
from wire.phases import PhaseClock
from wire.processes import bound_to_me

_log = logging.getLogger(__name__)
_HOST = "127.0.0.1"


def run_learner(
    settings: LearnerSettings, argv: Sequence[str], *, replay: Path | None, stop: StopRequest
) -> None:
    """Run rank 0 here and every other rank in a child process.

    Args:
        settings: the run's.
        argv: the command line that the children repeat.
        replay: trajectory file to train on in place of what a broker delivers.
        stop: whether this process has been asked to end.

    Raises:
        ChildDiedError: a rank ended before its time.
    """
    ranks = settings.learner.ranks
    if ranks == 1:
        run_rank(settings, rank=0, store=HashStore(), replay=replay, stop=stop)
        return
    store = open_store(_HOST, world_size=ranks, timeout_s=settings.learner.timeout_s)
    children = [_start_rank(argv, rank, store.port) for rank in range(1, ranks)]
    try:
        run_rank(settings, rank=0, store=store, replay=replay, stop=stop)
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


def join_ranks(settings: LearnerSettings, *, rank: int, port: int, replay: Path | None) -> None:
    """Run one of the other ranks, in a process that rank 0 started."""
    store = TCPStore(_HOST, port, is_master=False)
    run_rank(settings, rank=rank, store=store, replay=replay, stop=StopRequest())


def run_rank(
    settings: LearnerSettings,
    *,
    rank: int,
    store: Store,
    replay: Path | None,
    stop: StopRequest,
) -> None:
    """Build the policy on this rank and train."""
    learner = settings.learner
    if settings.weightbus.host.startswith("127."):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # noqa: TID251 read by gloo, which has no setting
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
        policy = _build_policy(settings, topology)
        clock = PhaseClock()
        with (
            _open_link(settings, rank, replay, clock, lambda: stop.requested) as (link, leader),
            stop.deferred(when=settings.checkpoint.on_stop),
        ):
            LearnerLoop(settings, topology, policy, link, leader, clock, stop).run()
    finally:
        destroy_topology()


def _build_policy(settings: LearnerSettings, topology: Topology) -> Policy:
    """Return the policy to start from: a checkpoint's, or that of a Hugging Face folder."""
    learner = settings.learner
    extra = dict(learner.megatron)
    if learner.deterministic:
        extra.setdefault("deterministic_mode", True)
    hf = load_hf_config(settings.model)
    model = build_model(hf, dtype=_dtype(learner.dtype), extra=extra)
    if settings.resume_from is None:
        load_hf_weights(model, settings.model)
    model.train()
    policy = Policy(model, learner, topology, decay_steps=settings.lr_decay_steps)
    if settings.resume_from is not None:
        info = read_checkpoint_info(settings.resume_from)
        load_checkpoint(policy, topology, settings.resume_from, info)
        _log.info("goes on from %s", settings.resume_from)
    return policy


@contextmanager
def _open_link(
    settings: LearnerSettings,
    rank: int,
    replay: Path | None,
    clock: PhaseClock,
    should_stop: Callable[[], bool],
) -> Iterator[tuple[RankLink, LeadingLink | None]]:
    """Open this rank's link, and the same as the leading one on rank 0."""
    if replay is not None:
        file = ReplayLink(replay, settings)
        yield file, file if rank == 0 else None
        return
    with BackgroundLoop() as loop:
        link: PayloadLink
        leader: LeaderLink | None = None
        if rank == 0:
            link = leader = LeaderLink(loop, settings, clock, should_stop)
        else:
            link = PayloadLink(loop, settings, f"learner-rank-{rank}")
        try:
            yield link, leader
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
        [sys.executable, "-m", "learner.main", *argv, "--rank", str(rank), "--port", str(port)],
        preexec_fn=prepare,
    )
