"""`slipstream quickstart`: a tiny policy learns to add, or to see, with every role real."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.deploy.commands.options import add_overrides, add_resume
from slipstream.deploy.commands.run import run
from slipstream.deploy.config import run_config
from slipstream.deploy.examples import addition, colors, sums
from slipstream.deploy.preflight.check.needs import refuse_without_extras
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.logs import start_logging
from slipstream.wire.settings.load import load_table
from slipstream.wire.settings.sections import run_section
from slipstream.wire.settings.shipped import CONFIGS, settings_file

EXAMPLES = """examples:
  slipstream quickstart                    two-digit addition on this machine
  slipstream quickstart learner.lr=0       the same without learning
  slipstream quickstart --agent            three numbers, with a tool that adds two
  slipstream quickstart --vision           the color of a shape in an image
  slipstream quickstart --policy model     copy its policy to model, for a run of your own

Settings, policy and task ship with the package. It writes into .cache/ and runs/ of the folder that
it is called in.
"""


@dataclass(frozen=True)
class Example:
    """A task with its policy."""

    settings: str  # name of its file of settings
    folder: Path
    policy: Path | None  # policy that ships; None: one is made in the folder
    prepare: Callable[[Path], None]


ADDITION = Example("quickstart", Path(".cache/addition"), addition.SHIPPED_POLICY, addition.prepare)
_SUMS = Example("quickstart-agent", Path(".cache/sums"), sums.SHIPPED_POLICY, sums.prepare)
_COLORS = Example("quickstart-vision", Path(".cache/colors"), None, colors.prepare)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    text = "other settings than configs/quickstart.toml, which ships with the package"
    parser.add_argument("--config", type=settings_file, metavar="RUN.toml", help=text)
    tasks = parser.add_mutually_exclusive_group()
    tasks.add_argument(
        "--agent",
        action="store_true",
        help="sums of three numbers in several turns, by configs/quickstart-agent.toml",
    )
    tasks.add_argument(
        "--vision",
        action="store_true",
        help="colors of shapes in images, by configs/quickstart-vision.toml",
    )
    parser.add_argument(
        "--policy",
        type=Path,
        metavar="DIR",
        help="copy the tiny policy to DIR, for a run of your own, and run nothing",
    )
    add_resume(parser)
    add_overrides(parser)


def main(arguments: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        ConfigError: naming the setting.
    """
    example = _SUMS if arguments.agent else _COLORS if arguments.vision else ADDITION
    if arguments.policy is not None:
        if arguments.config or arguments.overrides or arguments.resume:
            raise ConfigError("--policy runs nothing: leave settings and --resume out")
        copy_policy(example, arguments.policy)
        return 0
    path = arguments.config or CONFIGS / f"{example.settings}.toml"
    return quickstart(path, arguments.overrides, arguments.resume, example)


def copy_policy(example: Example, out: Path) -> None:
    """Make ``out`` a folder with the files of an example's policy.

    Raises:
        ConfigError: it holds something else.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already (--policy)")
    if example.policy is None:
        colors.write_policy(out)
    else:
        addition.copy_folder(example.policy, out)


def quickstart(
    path: Path, overrides: Sequence[str], resume: str | None = None, example: Example = ADDITION
) -> int:
    """Refuse wrong settings, put task and policy into their folder, then run.

    Raises:
        ConfigError: naming the setting.
    """
    table = load_table(path, overrides)
    if example.policy is None:
        example.prepare(example.folder)
        config = run_config(table)
    elif Path(run_section(table).model) == example.folder / "model":  # it may not be there yet
        config = run_config({**table, "run": {**table["run"], "model": str(example.policy)}})
    else:
        config = run_config(table)
    refuse_without_extras(config)
    start_logging("quickstart")
    example.prepare(example.folder)
    return run(path, overrides, dry_run=False, resume=resume)
