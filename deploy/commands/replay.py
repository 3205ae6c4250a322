"""`slipstream replay`: trains on recorded batches, without broker and generators."""

import argparse
import os
import sys
from pathlib import Path

from slipstream.deploy.commands.options import add_config, add_overrides
from slipstream.deploy.config import free_name
from slipstream.learner.config import learner_settings
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import BATCHES
from slipstream.wire.settings.load import load_table
from slipstream.wire.settings.sections import run_section

EXAMPLES = """examples:
  slipstream replay runs/demo --config run.toml          train on its recorded batches alone
  slipstream replay a.trajectories --config run.toml     or on those of a file
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("target", type=Path, metavar="RUN|FILE")
    add_config(parser, required=True)
    parser.add_argument("--dry-run", action="store_true", help="check and print the settings")
    add_overrides(parser)


def main(arguments: argparse.Namespace) -> int:
    """Turn this process into the learner of a new run, NAME-replay.

    It starts from run.model, even where the settings are those of a resumed run, and uploads
    nothing, unless an override names run.resume_from or checkpoint.upload.
    """
    config = arguments.config
    file = recorded_file(arguments.target)
    overrides = ["run.resume_from=", "checkpoint.upload=", *arguments.overrides]
    table = load_table(config, overrides)
    named = {**table.get("run", {}), "name": f"{run_section(table).name}-replay"}
    name = free_name(run_section({**table, "run": named}))
    learner_settings({**table, "run": {**named, "name": name}})
    command = [sys.executable, "-m", "slipstream.learner.main", "--config", str(config)]
    command += ["--replay", str(file), *(["--dry-run"] if arguments.dry_run else [])]
    command += [*overrides, f"run.name={name}"]
    os.execv(sys.executable, command)  # noqa: S606 our own program


def recorded_file(target: Path) -> Path:
    """Return the trajectory file that a command line names.

    Raises:
        ConfigError: there is none.
    """
    if target.is_file():
        return target
    file = target / BATCHES
    if not file.is_file():
        raise ConfigError(
            f"{target} is not a trajectory file and holds no {BATCHES}, which a run writes with "
            "broker.record_batches = true"
        )
    return file
