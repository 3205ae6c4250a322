"""`start-environment`: an environment for generators on other hosts."""

import argparse
import asyncio

from slipstream.broker.config import private_paths
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.command_line import (
    load_arguments,
    log_settings,
    refuse_settings,
    role_parser,
    run_role,
)
from slipstream.wire.process.logs import start_logging
from slipstream.wire.settings.load import section
from slipstream.wire.settings.rendezvous import parse_rendezvous
from slipstream.wire.settings.sections import EnvironmentSection

_MOST = 256


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = role_parser(
        "start-environment",
        "Run the environments of generators on other hosts, which name this one in "
        "environment.servers.",
        [
            "start-environment --config run.toml --listen 10.0.0.9:7100",
            "start-environment --config run.toml --listen 10.0.0.9:7100 --most 64",
        ],
    )
    parser.add_argument(
        "--listen", required=True, metavar="HOST:PORT", help="an address of this host"
    )
    parser.add_argument(
        "--most", type=int, default=_MOST, metavar="N", help=f"trajectories at a time ({_MOST})"
    )
    return parser


def main() -> int:
    """Parse, check, run."""
    return run_role(_main)


def _main() -> int:
    parser = make_parser()
    arguments = parser.parse_args()
    try:
        table = load_arguments(arguments)
        settings = section(table, "environment", EnvironmentSection)
        hidden = [path for path in private_paths(table) if path.exists()]
        logs = log_settings(table)
        address = parse_rendezvous(arguments.listen, setting="--listen")
        _check(settings, arguments.most)
    except ConfigError as error:
        return refuse_settings(error, arguments)
    if arguments.dry_run:
        print(f"would serve {settings.function} at {address}")  # noqa: T201
        return 0
    start_logging("environment", logs)
    from slipstream.generators.environments.remote.service import serve

    asyncio.run(serve(settings, address, most=arguments.most, hide=hidden))
    return 0


def _check(settings: EnvironmentSection, most: int) -> None:
    if not settings.is_named:
        raise ConfigError("name an environment: environment.function")
    if not settings.key_file:
        raise ConfigError(
            "environment.key_file must name the key that generators prove: make one with "
            "slipstream keys make NAME --role observer --keys FOLDER"
        )
    if most < 1:
        raise ConfigError(f"--most must be at least 1, got {most}")


if __name__ == "__main__":
    raise SystemExit(main())
