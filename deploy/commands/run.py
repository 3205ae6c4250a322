"""`slipstream run`: every role of a run on this host."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from slipstream.deploy.commands.options import add_config, add_overrides, add_resume
from slipstream.deploy.config import free_name, run_config
from slipstream.deploy.launch.dry_run import print_dry_run
from slipstream.deploy.launch.local import run_locally
from slipstream.deploy.launch.plan import plan_roles
from slipstream.deploy.launch.resume import find_resume_point, resumed_table
from slipstream.deploy.terminal.console import make_console
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import SETTINGS
from slipstream.wire.process.gpus import usable_gpus
from slipstream.wire.settings.load import load_table
from slipstream.wire.settings.sections import run_section

EXAMPLES = """examples:
  slipstream run --config run.toml generators.count=4    a run with every role on this host
  slipstream run --config run.toml --dry-run             check the settings, print the processes
  slipstream run --config run.toml --resume auto         resume from the newest checkpoint
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_config(parser, required=True)
    parser.add_argument("--dry-run", action="store_true", help="check, print the processes, exit")
    add_resume(parser)
    add_overrides(parser)


def main(arguments: argparse.Namespace) -> int:
    """Run the command."""
    return run(arguments.config, arguments.overrides, arguments.dry_run, arguments.resume)


def run(path: Path, overrides: Sequence[str], dry_run: bool, resume: str | None = None) -> int:
    """Run every role of a run on this host."""
    console = make_console()
    table = load_table(path, overrides)
    section = run_section(table)
    point = find_resume_point(section, resume) if resume else None
    if point is not None:
        start = point.checkpoint or f"the ledger of {point.run_folder}: no checkpoint was saved yet"
        console.print(f"resuming from {start}", soft_wrap=True)
        config = run_config(resumed_table(table, point))
    else:
        if resume:
            console.print(f"nothing to resume in {section.dir}: a new run starts", soft_wrap=True)
        name = free_name(section)
        config = run_config({**table, "run": {**table.get("run", {}), "name": name}})
    if dry_run:
        resolved = config.run.folder / SETTINGS
        plans = plan_roles(config, resolved, gpus=usable_gpus())
        print_dry_run(config, plans, console)
        return 0
    if len(config.deploy.hosts) > 1:
        raise ConfigError(
            f"deploy.hosts names {len(config.deploy.hosts)} hosts; this command starts "
            "processes on its own host only (--dry-run shows the plan): see docs/weight-bus.md "
            "for how to start generators on others by hand"
        )
    return run_locally(config, console)
