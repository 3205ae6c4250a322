"""Options that several subcommands take."""

import argparse
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import newest_run
from slipstream.wire.process.command_line import OVERRIDES_HELP
from slipstream.wire.process.extras import pip_install
from slipstream.wire.settings.shipped import settings_file

RUNS = Path("runs")


def chosen_run(folder: Path | str | None) -> Path:
    """Return the run folder that was named, else the newest one."""
    return Path(folder) if folder else newest_run(RUNS)


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Name the option that chose a path if nothing can be written there.

    Raises:
        ConfigError: of an OSError in the block.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror} ({option})") from error


def add_config(parser: argparse.ArgumentParser, *, required: bool, text: str = "") -> None:
    """Add ``--config RUN.toml``; where it is required, the file may stand among the words too."""
    text = text or "the run's settings"
    parser.add_argument("--config", type=settings_file, metavar="RUN.toml", help=text)
    parser.set_defaults(needs_config=required)


def take_config(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Take the settings file from the words of a command that needs one, or end with usage."""
    if not getattr(arguments, "needs_config", False) or arguments.config is not None:
        return
    words: list[str] = arguments.overrides
    found = [word for word in words if word.endswith(".toml") and "=" not in word]
    if len(found) != 1:
        parser.error("name one settings file: --config RUN.toml")
    words.remove(found[0])
    arguments.config = settings_file(found[0])


def add_overrides(
    parser: argparse.ArgumentParser, metavar: str = "section.key=value", text: str = OVERRIDES_HELP
) -> None:
    """Add settings that override the file's."""
    parser.add_argument("overrides", nargs="*", metavar=metavar, help=text)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add a run folder, by default the newest one."""
    text = "a run folder; default: the newest one in runs/"
    parser.add_argument("folder", type=Path, nargs="?", metavar="RUN", help=text)


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Add ``--resume``."""
    text = "resume from the newest checkpoint of this run (auto), of a run folder, or from one"
    parser.add_argument("--resume", metavar="auto|FOLDER", help=text)


def add_place(parser: argparse.ArgumentParser, text: str) -> None:
    """Add ``--on`` with its help, and ``--address``."""
    parser.add_argument("--on", choices=("local", "ray", "hosts"), default="local", help=text)
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="address of the Ray cluster, the same as deploy.ray.address",
    )


def placed_overrides(arguments: argparse.Namespace) -> list[str]:
    """Return the overrides of a command line, ``--address`` among them.

    Raises:
        ConfigError: there is one, and no Ray cluster.
    """
    overrides = list(arguments.overrides)
    if arguments.address is not None:
        if arguments.on != "ray":
            raise ConfigError("--address is that of a Ray cluster: it goes with --on ray")
        overrides.append(f"deploy.ray.address={arguments.address}")
    return overrides


def import_ray() -> ModuleType:
    """Return the module for runs on Ray, which is an extra.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("slipstream.deploy.launch.cluster.ray_site")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(f"--on ray needs ray: {pip_install(['cluster'])}") from error


def add_json(parser: argparse.ArgumentParser, text: str = "everything, for programs") -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help=text)
