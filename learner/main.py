"""`start-learner`: trains on the broker's batches and publishes versioned weights."""

import os
import sys
from pathlib import Path

from slipstream.learner.gpu_variables import gpu_variables
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.command_line import (
    load_arguments,
    print_json,
    refuse_settings,
    role_parser,
    run_role,
    settings_arguments,
)
from slipstream.wire.process.gpus import usable_gpus
from slipstream.wire.process.logs import start_logging
from slipstream.wire.process.processes import LIFELINE_VARIABLE


def main() -> int:
    """Parse, check, run."""
    parser = role_parser(
        "start-learner",
        "Train the policy of a run with Megatron-Core and publish its weights.",
        [
            "start-learner --config run.toml",
            "start-learner --config run.toml learner.ranks=2 learner.lr=1e-6",
            "start-learner --config run.toml --resume auto",
            "start-learner --config run.toml --replay runs/a/rollouts/batches.trajectories",
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
    parser.add_argument("--rank", type=int, default=0, help="set by start-learner itself")
    parser.add_argument("--port", type=int, default=0, help="set by start-learner itself")
    arguments = parser.parse_args()
    if arguments.begun_after is not None and arguments.resume is None:
        parser.error("--begun-after goes with --resume auto")
    from slipstream.learner.config import learner_settings

    try:
        settings = learner_settings(
            load_arguments(arguments), may_resume=arguments.resume is not None
        )
        if arguments.dry_run:
            from slipstream.learner.training.algorithm import algorithm_of

            algorithm_of(settings)
    except ConfigError as error:
        return refuse_settings(error)
    if arguments.dry_run:
        return print_json(settings)
    start_logging("learner" if arguments.rank == 0 else f"learner-rank-{arguments.rank}")

    def body() -> int:
        if usable_gpus():
            os.environ.update(gpu_variables(os.environ))  # noqa: TID251 libraries read them there
        from slipstream.learner.model import device
        from slipstream.learner.stop import StopRequest

        stop = StopRequest()
        if arguments.rank == 0:
            stop.listen()
        device.prepare()
        from slipstream.learner.launch import Launch, join_ranks, run_learner
        from slipstream.learner.publish.relay_process import RelayLaunch

        lifeline = os.environ.get(LIFELINE_VARIABLE)  # noqa: TID251 from our parent
        launch = Launch(
            replay=arguments.replay,
            resumes=arguments.resume is not None,
            begun_after=arguments.begun_after,
            relay=RelayLaunch(settings_arguments(arguments), int(lifeline) if lifeline else None),
        )
        if arguments.rank == 0:
            run_learner(settings, sys.argv[1:], launch=launch, stop=stop)
        else:
            join_ranks(settings, rank=arguments.rank, port=arguments.port, launch=launch)
        return 0

    return run_role(body)


if __name__ == "__main__":
    raise SystemExit(main())
