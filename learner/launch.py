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

from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]  # not in torch's stubs

from slipstream.algos.compose import Algorithm
from slipstream.learner.batches.background import BackgroundLoop
from slipstream.learner.batches.broker_link import LeaderLink
from slipstream.learner.batches.links import LeadingLink, RankLink
from slipstream.learner.batches.payload_link import PayloadLink
from slipstream.learner.batches.prefetch import EarlyPlans
from slipstream.learner.batches.replay_link import ReplayLink
from slipstream.learner.config import LearnerSettings
from slipstream.learner.coordinator import Coordinator
from slipstream.learner.loop import LearnerLoop
from slipstream.learner.model import device
from slipstream.learner.model.topology import Topology, destroy_topology, init_topology
from slipstream.learner.publish.relay_process import RelayLaunch
from slipstream.learner.starting_policy import start_policy
from slipstream.learner.stop import StopRequest
from slipstream.learner.training.algorithm import algorithm_of
from slipstream.weightbus.net.interfaces import interface_variables
from slipstream.weightbus.net.rendezvous import open_store
from slipstream.wire.errors import ChildDiedError
from slipstream.wire.process.phases import PhaseClock
from slipstream.wire.process.processes import bound_to_me

_log = logging.getLogger(__name__)
_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Launch:
    """Details of this start of a learner, beside its settings."""

    replay: Path | None = None  # trajectory file to train on in place of a broker's batches
    resumes: bool = False  # resume from the run's newest usable checkpoint
    begun_after: int | None = None  # the newest epoch of a checkpoint as the run was started
    relay: RelayLaunch = field(default_factory=RelayLaunch)


def run_learner(
    settings: LearnerSettings, argv: Sequence[str], *, launch: Launch, stop: StopRequest
) -> None:
    """Run rank 0 here and every other rank in a child process, which repeats the command line.

    Raises:
        ConfigError: the settings name no algorithm that this run can train.
        ChildDiedError: a rank ended before its time.
    """
    algorithm = algorithm_of(settings)
    if algorithm.choice.learns_from_equal_rewards and settings.broker.drop_zero_variance:
        _log.warning(
            "groups of equal rewards teach this algorithm as well (algo.advantage, algo.teacher, "
            "algo.likelihood), and broker.drop_zero_variance = true replaces them: set it to false"
        )
    ranks = settings.learner.ranks
    if ranks == 1:
        run_rank(
            settings, algorithm, rank=0, store=HashStore(), early=None, launch=launch, stop=stop
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
        settings, policy = start_policy(
            settings, algorithm, topology, resumes=launch.resumes, begun_after=launch.begun_after
        )
        clock = PhaseClock()
        with (
            _open_link(settings, topology, early, launch, clock, stop) as (link, leader),
            stop.deferred(when=settings.checkpoint.on_stop),
        ):
            coordinator = Coordinator(leader, topology, stop)
            LearnerLoop(settings, topology, policy, algorithm, link, coordinator, clock).run()
    finally:
        destroy_topology()


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
        except SystemExit:  # stopped at once
            if leader is not None:
                leader.end()
            raise
        finally:
            link.close()


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
