"""Builds the learner's ranks and runs them. Import it only after ``device.prepare()``."""

import logging
import os
import subprocess
import sys
from collections.abc import Sequence

import torch
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]  # not in torch's stubs

from learner import device
from learner.background import BackgroundLoop
from learner.config import LearnerSettings
from learner.hf_config import load_hf_config
from learner.hf_weights import load_hf_weights
from learner.loop import LearnerLoop
from learner.model import build_model
from learner.policy import Policy
from learner.topology import destroy_topology, init_topology
from weightbus.rendezvous import open_store
from wire.errors import ChildDiedError, ConfigError
from wire.processes import bound_to_me

_log = logging.getLogger(__name__)
_HOST = "127.0.0.1"


def run_learner(settings: LearnerSettings, argv: Sequence[str]) -> None:
    """Run rank 0 here and every other rank in a child process.

    Args:
        settings: the run's.
        argv: the command line that the children repeat.

    Raises:
        ChildDiedError: a rank ended before its time.
    """
    ranks = settings.learner.ranks
    if ranks == 1:
        run_rank(settings, rank=0, store=HashStore())
        return
    store = open_store(_HOST, world_size=ranks, timeout_s=settings.learner.timeout_s)
    children = [_start_rank(argv, rank, store.port) for rank in range(1, ranks)]
    try:
        run_rank(settings, rank=0, store=store)
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


def join_ranks(settings: LearnerSettings, *, rank: int, port: int) -> None:
    """Run one of the other ranks, in a process that rank 0 started."""
    store = TCPStore(_HOST, port, is_master=False)
    run_rank(settings, rank=rank, store=store)


def run_rank(settings: LearnerSettings, *, rank: int, store: Store) -> None:
    """Build the policy on this rank and train."""
    learner = settings.learner
    if settings.weightbus.host.startswith("127."):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # noqa: TID251 read by gloo, which has no setting
    device.set_threads(learner.threads)
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
        dtype = _dtype(learner.dtype)
        model = build_model(load_hf_config(settings.model), dtype=dtype, extra=learner.megatron)
        load_hf_weights(model, settings.model)
        model.train()
        policy = Policy(model, learner, topology)
        with BackgroundLoop() as loop:
            LearnerLoop(settings, topology, policy, loop).run()
    finally:
        destroy_topology()


def _dtype(name: str) -> torch.dtype:
    on_gpu = device.device().type == "cuda"
    if name == "float32" and on_gpu:
        raise ConfigError("learner.dtype = float32 cannot run on a GPU: flash attention needs bf16")
    bfloat16 = name == "bfloat16" or (name == "auto" and on_gpu)
    return torch.bfloat16 if bfloat16 else torch.float32


def _start_rank(argv: Sequence[str], rank: int, port: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(  # noqa: S603 our own program
        [sys.executable, "-m", "learner.main", *argv, "--rank", str(rank), "--port", str(port)],
        preexec_fn=bound_to_me(),
    )
