"""`slipstream quickstart`: two-digit addition for a tiny policy, with every role real."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from slipstream.deploy.commands.options import add_overrides, add_resume
from slipstream.deploy.commands.run import run
from slipstream.deploy.config import run_config
from slipstream.deploy.examples.addition import SHIPPED_POLICY, prepare
from slipstream.wire.process.logs import start_logging
from slipstream.wire.settings.load import load_table
from slipstream.wire.settings.sections import run_section

EXAMPLES = """examples:
  slipstream quickstart                    two-digit addition on this machine
  slipstream quickstart learner.lr=0       the same without learning
"""
_FOLDER = Path(".cache/addition")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.toml"))
    add_resume(parser)
    add_overrides(parser)


def main(arguments: argparse.Namespace) -> int:
    """Run the command."""
    return quickstart(arguments.config, arguments.overrides, arguments.resume)


def quickstart(path: Path, overrides: Sequence[str], resume: str | None = None) -> int:
    """Refuse wrong settings, put task and policy into their folder, then run.

    Raises:
        ConfigError: naming the setting.
    """
    table = load_table(path, overrides)
    if Path(run_section(table).model) == _FOLDER / "model":  # it may not be there yet
        run_config({**table, "run": {**table["run"], "model": str(SHIPPED_POLICY)}})
    else:
        run_config(table)
    start_logging("quickstart")
    prepare(_FOLDER)
    return run(path, overrides, dry_run=False, resume=resume)
