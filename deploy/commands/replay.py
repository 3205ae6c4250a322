"""`slipstream replay`: trains on recorded batches or demonstrations, without other roles."""

import argparse
import filecmp
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from slipstream.algos.presets import IMITATION
from slipstream.broker.config import DataSection
from slipstream.deploy.commands.options import RUNS, add_config, add_overrides
from slipstream.deploy.config import free_name
from slipstream.learner.config import LearnerSettings, learner_settings
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import BATCHES, newest_run
from slipstream.wire.settings.load import Table, load_table, section
from slipstream.wire.settings.sections import local_file, model_folder, run_section

_log = logging.getLogger(__name__)

EXAMPLES = """examples:
  slipstream replay --config run.toml                    train on recorded batches of the newest run
  slipstream replay runs/demo --config run.toml          on those of a run
  slipstream replay a.trajectories --config run.toml     or on those of a file
  slipstream replay --demonstrations a.jsonl --config run.toml   supervised: imitate conversations
"""
_FILE = Path("replay") / "demonstrations.trajectories"
_RESET = {"preset": IMITATION, "anchor": "", "whiten": "", "entropy_bonus": 0.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_config(parser, required=True)
    parser.add_argument(
        "--demonstrations",
        metavar="FILE",
        help="train on the policy's own turns in a JSONL or parquet file, as verl's and TRL's "
        "supervised fine-tuning does (docs/checkpoints.md)",
    )
    text = "check and print the settings, and what of a file of demonstrations would be trained"
    parser.add_argument("--dry-run", action="store_true", help=text)
    add_overrides(
        parser,
        "RUN|FILE|section.key=value",
        "a run folder, or a file of trajectories, default: the newest run that recorded any; and "
        "settings that win over the file's",
    )


def main(arguments: argparse.Namespace) -> int:
    """Turn this process into the learner of a new run, NAME-replay; or say how its nodes start.

    It starts from run.model, even where the settings are those of a resumed run, and uploads
    nothing, unless an override names run.resume_from or checkpoint.upload.
    """
    config, demonstrations = arguments.config, arguments.demonstrations
    target, words = split_target(arguments.overrides)
    if demonstrations is not None and target is not None:
        raise ConfigError(f"slipstream replay takes {target} or --demonstrations, got both")
    overrides = ["run.resume_from=", "checkpoint.upload="]
    recorded = None
    if demonstrations is None:
        recorded = recorded_file(target or newest_run(RUNS, BATCHES))
    else:
        overrides += imitating(load_table(config))
    overrides += words
    table = load_table(config, overrides)
    named = {**table.get("run", {}), "name": f"{run_section(table).name}-replay"}
    name = free_name(run_section({**table, "run": named}))
    table = {**table, "run": {**named, "name": name}}
    settings = learner_settings(table)
    file = recorded or settings.run.folder / _FILE
    if demonstrations is not None:
        data = section(table, "data", DataSection)
        steps = _prepare(demonstrations, settings, data, None if arguments.dry_run else file)
        overrides.append(f"run.steps={steps}")
    words = ["--config", str(config), "--replay", str(file), *overrides, f"run.name={name}"]
    if settings.layout.nodes > 1 and not arguments.dry_run:
        nodes, started = settings.layout.nodes, shlex.join(["start-learner", *words])
        sys.stdout.write(f"{started} --node K --rendezvous HOST:PORT\n")
        _log.warning("%d nodes train this: start each so, K from 0, HOST one of node 0", nodes)
    else:
        dry = ["--dry-run"] if arguments.dry_run else []
        command = [sys.executable, "-m", "slipstream.learner.main", *words, *dry]
        os.execv(sys.executable, command)  # noqa: S606 our own program
    return 0


def imitating(table: Table) -> list[str]:
    """Return settings that train demonstrations by their likelihood, whatever the file's [algo].

    A step trains run.groups_per_step demonstrations.
    """
    own = {"preset": IMITATION, **table.get("algo", {})}
    algo = [f"algo.{key}={_RESET.get(key, {})}" for key in own]
    return [*algo, "run.group_size=1", "run.routing_replay=off"]


def _prepare(name: str, settings: LearnerSettings, data: DataSection, out: Path | None) -> int:
    """Write demonstrations for the learner, and say how many; return the steps to train.

    Raises:
        ConfigError: the file cannot be read or written, or a row is bad.
    """
    from slipstream.deploy.demonstrations import OPTION, DemonstrationReader, write_demonstrations
    from slipstream.generators.text.codec import TextCodec
    from slipstream.wire.process.logs import start_logging

    start_logging("replay")
    run, sampling = settings.run, settings.sampling
    codec = TextCodec(model_folder(run), sampling)
    reader = DemonstrationReader(codec, data, longest=settings.environment.longest(sampling))
    file = Path(local_file(run, name, OPTION))
    try:
        counts = write_demonstrations(reader, file, out)
    except BaseException:
        if out is not None:  # the run's name stays free
            shutil.rmtree(run.folder, ignore_errors=True)
        raise
    for line in counts.lines(run):
        _log.info("%s", line)
    if out is not None and settings.resume_from is not None:
        for other in other_demonstrations(settings.resume_from, out):
            _log.warning("run.resume_from was trained on other demonstrations: %s", other)
    return counts.steps(run)


def other_demonstrations(checkpoint: Path, file: Path) -> list[Path]:
    """Return the demonstrations of a checkpoint's run that are still there and not these."""
    trained = checkpoint.absolute().parents[1] / _FILE
    same = not trained.is_file() or filecmp.cmp(trained, file, shallow=False)
    return [] if same else [trained]


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
