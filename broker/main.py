"""`start-broker`: the owner of the truth about every item."""

import argparse
import asyncio

from slipstream.broker.listening.health_port import serving
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.command_line import (
    add_health,
    load_arguments,
    print_json,
    refuse_settings,
    role_parser,
    run_role,
)
from slipstream.wire.process.health import Health
from slipstream.wire.process.logs import start_logging
from slipstream.wire.settings.load import Table


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = role_parser(
        "start-broker",
        "Keep the ledger of a run: leases, trajectories, rewards, batches, dashboard.",
        [
            "start-broker --config run.toml",
            "start-broker --config run.toml broker.redis.url=redis://10.0.0.5:6379",
            "start-broker --config run.toml --from-checkpoint runs/demo/checkpoints/step-000040",
        ],
    )
    parser.add_argument(
        "--from-checkpoint",
        metavar="FOLDER",
        help="resume from it, also on an empty Redis; the same as run.resume_from=FOLDER",
    )
    parser.add_argument(
        "--restarted",
        action="store_true",
        help="continue from the store: an earlier broker of this run has died",
    )
    add_health(parser)
    return parser


def main() -> int:
    """Parse, check, run."""
    return run_role(_main)


def _main() -> int:
    parser = make_parser()
    arguments = parser.parse_args()
    from slipstream.wire.settings.serve import serves

    try:
        table = load_arguments(arguments)
    except ConfigError as error:
        return refuse_settings(error, arguments)
    return _serve_commands(arguments, table) if serves(table) else _serve_run(arguments)


def _serve_run(arguments: argparse.Namespace) -> int:
    """Keep the ledger of a run."""
    from slipstream.broker.config import broker_settings
    from slipstream.broker.data.prompts import load_prompts
    from slipstream.broker.service import serve

    try:
        if arguments.from_checkpoint:
            arguments.overrides.append(f"run.resume_from={arguments.from_checkpoint}")
        settings = broker_settings(load_arguments(arguments))
        if arguments.dry_run:
            load_prompts(settings)
            return print_json(settings)
    except ConfigError as error:
        return refuse_settings(error, arguments)
    start_logging("broker", settings.logging)

    def body() -> int:
        health = Health("broker", stuck_s=settings.run.stuck_s)
        with serving(health, arguments.health):
            asyncio.run(serve(settings, restarted=arguments.restarted, health=health))
        return 0

    return body()


def _serve_commands(arguments: argparse.Namespace, table: Table) -> int:
    """Keep the commands of tenants."""
    from slipstream.broker.commands.config import command_server_settings
    from slipstream.broker.commands.service import serve

    try:
        settings = command_server_settings(table)
        if arguments.dry_run:
            return print_json(settings)
    except ConfigError as error:
        return refuse_settings(error, arguments)
    start_logging("broker", settings.logging)
    health = Health("broker", stuck_s=settings.run.stuck_s)
    with serving(health, arguments.health):
        asyncio.run(serve(settings, health))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
