"""`start-generator`: an agent and its SGLang server."""

import argparse
import asyncio
from pathlib import Path

from slipstream.broker.listening.health_port import serving
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.command_line import (
    add_health,
    load_arguments,
    log_settings,
    own_name,
    refuse_settings,
    role_parser,
    run_role,
)
from slipstream.wire.process.health import Health
from slipstream.wire.process.logs import start_logging
from slipstream.wire.settings.serve import serves

_OFFLINE_NAME = "generator-0"  # the only one; seeds depend on it, so answers are reproducible


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = role_parser(
        "start-generator",
        "Generate trajectories for the broker of a run with an SGLang server of its own.",
        [
            "start-generator --config run.toml --name generator-0",
            "start-generator --config run.toml --name generator-1 generators.device=cpu",
            "start-generator --config run.toml --name generator-0 --rendezvous 10.0.0.7:29500",
            "start-generator --config run.toml --name generator-0 --rendezvous 10.0.0.7:29500 "
            "--follow 1",
            "start-generator --config run.toml --offline --out train.trajectories",
        ],
    )
    parser.add_argument("--name", default="", help="unique within the run; default HOST-PID")
    parser.add_argument(
        "--offline",
        action="store_true",
        help="no broker, no learner: answer and score the prompts of [data] into a file",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="with --offline: a new file, or one to continue"
    )
    parser.add_argument(
        "--num-prompts", type=int, default=0, metavar="N", help="with --offline; default is all"
    )
    parser.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="where the first host, node 0, of an engine on several (generators.nodes) listens and "
        "the others find it; the same on all",
    )
    parser.add_argument(
        "--follow",
        type=int,
        metavar="N",
        help="run the ranks of node N, from 1, for node 0, which is started without this",
    )
    add_health(parser)
    return parser


def main() -> int:
    """Parse, check, run."""
    return run_role(_main)


def _main() -> int:
    parser = make_parser()
    arguments = parser.parse_args()
    if arguments.offline != (arguments.out is not None):
        parser.error("--offline and --out FILE go together")
    if arguments.offline and arguments.health:
        parser.error("--health is for a generator with a broker, not for --offline")
    if arguments.num_prompts and not arguments.offline:
        parser.error("--num-prompts needs --offline")
    is_of_several = arguments.follow is not None or arguments.rendezvous is not None
    if is_of_several and (arguments.offline or not arguments.name):
        parser.error("--rendezvous and --follow go with --name, the same on all hosts of an engine")
    if arguments.offline:
        return _offline(arguments)
    name = own_name(arguments.name)
    from slipstream.generators.config import generator_settings
    from slipstream.generators.nodes.membership import place_of
    from slipstream.generators.sglang.start_order import described

    try:
        table = load_arguments(arguments)
        settings, logs = generator_settings(table), log_settings(table)
        place = place_of(settings, arguments.follow, arguments.rendezvous)
        if arguments.dry_run:
            print("\n".join(described(settings, name)))  # noqa: T201
            return 0
    except ConfigError as error:
        return refuse_settings(error, arguments)
    role = name if place is None or place.node == 0 else f"{name}-node-{place.node}"
    start_logging(role, logs)

    health = Health(role, stuck_s=settings.run.stuck_s)
    with serving(health, arguments.health):
        if place is not None and place.node > 0:
            from slipstream.generators.nodes.service import follow

            asyncio.run(follow(settings, name, place, health))
        elif serves(table):
            from slipstream.generators.serving.service import serve_samples

            asyncio.run(serve_samples(settings, name, health))
        else:
            from slipstream.generators.service import serve

            asyncio.run(serve(settings, name, health, place))
    return 0


def _offline(arguments: argparse.Namespace) -> int:
    from slipstream.generators.tools.offline import generate
    from slipstream.generators.tools.offline_config import offline_settings

    try:
        table = load_arguments(arguments)
        logs = log_settings(table)
        settings = offline_settings(table, arguments.out, arguments.num_prompts)
    except ConfigError as error:
        return refuse_settings(error, arguments)
    if arguments.dry_run:
        print(f"would write {settings.out}")  # noqa: T201
        return 0
    name = arguments.name or _OFFLINE_NAME
    start_logging(name, logs)
    return asyncio.run(generate(settings, name))


if __name__ == "__main__":
    raise SystemExit(main())
