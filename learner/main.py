"""`start-learner`: trains on the broker's batches and publishes versioned weights."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slipstream.broker.listening.health_port import serving
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.model_digests import short_digest
from slipstream.wire.process.command_line import (
    add_health,
    load_arguments,
    log_settings,
    print_json,
    refuse_settings,
    role_parser,
    run_role,
    settings_arguments,
)
from slipstream.wire.process.gpus import usable_gpus
from slipstream.wire.process.health import Health
from slipstream.wire.process.logs import start_logging
from slipstream.wire.process.processes import LIFELINE_VARIABLE
from slipstream.wire.settings.sections import model_folder
from slipstream.wire.settings.serve import serve_section, serves
from slipstream.wire.settings.tenants import Tenant

if TYPE_CHECKING:
    from slipstream.learner.config import LearnerSettings
    from slipstream.learner.layout import Place

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # before torch 2.9, since torch 2.9
_THREADS_S = 1.0  # grace for requests to a silent store, and for an abandoned checkpoint


def main() -> int:
    """Parse, check, run."""
    return run_role(_main)


def _main() -> int:
    parser = make_parser()
    arguments = parser.parse_args()
    if arguments.begun_after is not None and arguments.resume is None:
        parser.error("--begun-after goes with --resume auto")
    from slipstream.learner.config import learner_settings, learner_tenants
    from slipstream.learner.layout import place_of

    try:
        table = load_arguments(arguments)
        may_resume = arguments.resume is not None
        settings = learner_settings(table, may_resume=may_resume)
        tenants = learner_tenants(table, may_resume=may_resume)
        if serves(table):
            serve_section(table)  # its checks
        logs = log_settings(table)
        place = place_of(settings.layout, arguments.node, arguments.rendezvous)
        if arguments.dry_run:
            from slipstream.learner.model.division import refuse_policy
            from slipstream.learner.training.algorithm import algorithm_of
            from slipstream.wire.models.hf_config import load_hf_config

            hf = load_hf_config(model_folder(settings.run))
            for run in [tenant.settings for tenant in tenants] or [settings]:
                algorithm_of(run)
                refuse_policy(hf, run)
    except ConfigError as error:
        return refuse_settings(error, arguments)
    if arguments.dry_run:
        return print_json(settings)
    rank = place.ranks[0] if arguments.rank is None else arguments.rank
    name = "learner" if rank == 0 else f"learner-rank-{rank}"
    start_logging(name, logs)

    health = Health(name, stuck_s=settings.run.stuck_s)
    port = arguments.health if arguments.rank is None else 0  # a node's first rank
    train = partial(_train, arguments, settings, place, health, tenants, serves=serves(table))
    return run_and_leave(serving(health, port)(train))


def _train(
    arguments: argparse.Namespace,
    settings: "LearnerSettings",
    place: "Place",
    health: Health,
    tenants: "tuple[Tenant[LearnerSettings], ...]",
    *,
    serves: bool,
) -> int:
    """Run one rank of this node, or the first and with it the others."""
    if usable_gpus():
        os.environ.update(gpu_variables(os.environ))  # noqa: TID251 libraries read them there
    if place.address is not None:  # our log says why a store ends
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # noqa: TID251 the same
    from slipstream.learner.model import device
    from slipstream.learner.stop import StopRequest

    stop = StopRequest()
    if arguments.rank is None:
        stop.listen()
    device.prepare()
    from slipstream.learner.launch import Launch, join_ranks, run_learner
    from slipstream.learner.publish.relay_process import RelayLaunch

    health.drains_when(lambda: stop.requested)
    health.waits_for("its policy to load")
    lifeline = os.environ.get(LIFELINE_VARIABLE)  # noqa: TID251 from our parent
    launch = Launch(
        replay=arguments.replay,
        resumes=arguments.resume is not None,
        begun_after=arguments.begun_after,
        relay=RelayLaunch(
            settings_arguments(arguments),
            int(lifeline) if lifeline else None,
            digest=short_digest(msgspec.json.encode(settings.weightbus)),
        ),
        health=health,
        tenants=tenants,
        serves=serves,
    )
    if arguments.rank is not None:
        return join_ranks(settings, place, rank=arguments.rank, port=arguments.port, launch=launch)
    run_learner(settings, place, sys.argv[1:], launch=launch, stop=stop)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = role_parser(
        "start-learner",
        "Train the policy of a run with Megatron-Core and publish its weights.",
        [
            "start-learner --config run.toml",
            "start-learner --config run.toml learner.ranks=2 learner.lr=1e-6",
            "start-learner --config run.toml --resume auto",
            "start-learner --config run.toml --node 1 --rendezvous 10.0.0.1:29400",
            "start-learner --config run.toml --replay runs/a/rollouts/batches.trajectories",
            "start-learner --config pool.toml              # all tenants of a pool, in turns",
        ],
    )
    parser.add_argument(
        "--replay", type=Path, metavar="FILE", help="train on recorded batches, without a broker"
    )
    parser.add_argument(
        "--resume",
        choices=["auto"],
        help="resume from the run's newest usable checkpoint, if there is one",
    )
    parser.add_argument(
        "--begun-after",
        type=int,
        metavar="EPOCH",
        help="newest epoch of a checkpoint as the run was started; set by slipstream run",
    )
    parser.add_argument(
        "--node",
        type=int,
        metavar="K",
        help="which node of a learner on several this is, from 0 (learner.ranks_per_node)",
    )
    parser.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="where node 0 listens and the others find it: an address of node 0, the same on all",
    )
    parser.add_argument("--rank", type=int, help="number of a rank; set by start-learner itself")
    parser.add_argument(
        "--port", type=int, default=0, help="where ranks meet; set by start-learner itself"
    )
    add_health(parser)
    return parser


def gpu_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables to add to a learner's environment on a GPU; variables already set stay.

    Libraries read them once, when torch is imported.
    A single queue to the GPU keeps kernels and communication in launch order, which Megatron's
    tensor parallelism relies on. Memory segments that can grow are not fragmented by microbatches
    of different lengths.
    """
    wanted = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", _ALLOCATOR[0]: "expandable_segments:True"}
    if any(name in environment for name in _ALLOCATOR):
        del wanted[_ALLOCATOR[0]]
    return {name: value for name, value in wanted.items() if name not in environment}


def run_and_leave(body: Callable[[], int]) -> int:
    """Run the learner; return its exit code, or end the process with that code."""
    try:
        code = run_role(body)
    except SystemExit as end:  # stopped at once
        code = end.code if isinstance(end.code, int) else 1
    leave(code)
    return code


def leave(code: int) -> None:
    """End the process at once if a thread is still inside torch, which would abort the process."""
    from slipstream.weightbus.net.threads import are_done

    if not are_done(_THREADS_S):
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    raise SystemExit(main())
