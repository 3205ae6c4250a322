"""`slipstream quickstart`: a tiny policy learns to add, with every role real."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.deploy.commands.options import add_overrides, add_resume
from slipstream.deploy.commands.run import run
from slipstream.deploy.config import run_config
from slipstream.deploy.examples import addition, sums
from slipstream.wire.process.logs import start_logging
from slipstream.wire.settings.load import load_table
from slipstream.wire.settings.sections import run_section

EXAMPLES = """examples:
  slipstream quickstart                    two-digit addition on this machine
  slipstream quickstart learner.lr=0       the same without learning
  slipstream quickstart --agent            three numbers, with a tool that adds two
"""
_CONFIG = Path("configs/quickstart.toml")


@dataclass(frozen=True)
class _Example:
    folder: Path
    policy: Path
    prepare: Callable[[Path], None]


_ADDITION = _Example(Path(".cache/addition"), addition.SHIPPED_POLICY, addition.prepare)
_SUMS = _Example(Path(".cache/sums"), sums.SHIPPED_POLICY, sums.prepare)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("--config", type=Path, metavar="RUN.toml", help=f"default {_CONFIG}")
    parser.add_argument(
        "--agent",
        action="store_true",
        help="sums of three numbers in several turns, by configs/quickstart-agent.toml",
    )
    add_resume(parser)
    add_overrides(parser)


def main(arguments: argparse.Namespace) -> int:
    """Run the command."""
    example = _SUMS if arguments.agent else _ADDITION
    default = _CONFIG.with_name("quickstart-agent.toml") if arguments.agent else _CONFIG
    path = arguments.config or default
    return quickstart(path, arguments.overrides, arguments.resume, example)


def quickstart(
    path: Path, overrides: Sequence[str], resume: str | None = None, example: _Example = _ADDITION
) -> int:
    """Refuse wrong settings, put task and policy into their folder, then run.

    Raises:
        ConfigError: naming the setting.
    """
    table = load_table(path, overrides)
    if Path(run_section(table).model) == example.folder / "model":  # it may not be there yet
        run_config({**table, "run": {**table["run"], "model": str(example.policy)}})
    else:
        run_config(table)
    start_logging("quickstart")
    example.prepare(example.folder)
    return run(path, overrides, dry_run=False, resume=resume)
