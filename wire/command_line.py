"""The command line that all roles share."""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from wire.errors import SlipstreamError
from wire.settings import Table, load_table

EXIT_FAILED = 1
EXIT_BAD_SETTINGS = 2


def role_parser(prog: str, description: str, examples: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser with the options that every role takes."""
    epilog = "examples:\n" + "\n".join(f"  {example}" for example in examples)
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", type=Path, required=True, metavar="RUN.toml", help="the run's settings"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="resolve and check the settings, print them, exit"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings that win over the file"
    )
    return parser


def load_arguments(arguments: argparse.Namespace) -> Table:
    """Return the settings that the command line names."""
    return load_table(arguments.config, arguments.overrides)


def run_role(body: Callable[[], int]) -> int:
    """Run a role's body; a known error becomes one clear line and a failing exit code."""
    try:
        return body()
    except SlipstreamError as error:
        logging.getLogger("slipstream").error("%s: %s", type(error).__name__, error)  # noqa: TRY400
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130


def refuse_settings(error: SlipstreamError) -> int:
    """Print why settings were refused and return the exit code for it."""
    sys.stderr.write(f"{error}\n")
    return EXIT_BAD_SETTINGS
