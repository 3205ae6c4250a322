"""`slipstream replay`: trains on recorded batches, without broker and generators."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from slipstream.deploy.commands.options import RUNS, add_config, add_overrides
from slipstream.deploy.config import free_name
from slipstream.learner.config import learner_settings
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import BATCHES, newest_run
from slipstream.wire.settings.load import load_table
from slipstream.wire.settings.sections import run_section

EXAMPLES = """examples:
  slipstream replay --config run.toml                    train on recorded batches of the newest run
  slipstream replay runs/demo --config run.toml          on those of a run
  slipstream replay a.trajectories --config run.toml     or on those of a file
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_config(parser, required=True)
    parser.add_argument("--dry-run", action="store_true", help="check and print the settings")
    add_overrides(
        parser,
        "RUN|FILE|section.key=value",
        "a run folder, or a file of trajectories, default: the newest run that recorded any; and "
        "settings that win over the file's",
    )


def main(arguments: argparse.Namespace) -> int:
    """Turn this process into the learner of a new run, NAME-replay.

    It starts from run.model, even where the settings are those of a resumed run, and uploads
    nothing, unless an override names run.resume_from or checkpoint.upload.
    """
    config = arguments.config
    target, words = split_target(arguments.overrides)
    file = recorded_file(target or newest_run(RUNS, BATCHES))
    overrides = ["run.resume_from=", "checkpoint.upload=", *words]
    table = load_table(config, overrides)
    named = {**table.get("run", {}), "name": f"{run_section(table).name}-replay"}
    name = free_name(run_section({**table, "run": named}))
    learner_settings({**table, "run": {**named, "name": name}})
    command = [sys.executable, "-m", "slipstream.learner.main", "--config", str(config)]
    command += ["--replay", str(file), *(["--dry-run"] if arguments.dry_run else [])]
    command += [*overrides, f"run.name={name}"]
    os.execv(sys.executable, command)  # noqa: S606 our own program


def split_target(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the run or file among some words, if there is one, and the settings.

    Raises:
        ConfigError: there are several.
    """
    targets = [word for word in words if "=" not in word or Path(word).exists()]
    if len(targets) > 1:
        raise ConfigError(f"slipstream replay takes one RUN or FILE, got {' '.join(targets)}")
    settings = [word for word in words if word not in targets]
    return Path(targets[0]) if targets else None, settings


def recorded_file(target: Path) -> Path:
    """Return the trajectory file that a command line names.

    Raises:
        ConfigError: No trajectory file was found.
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
