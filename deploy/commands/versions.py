"""`slipstream versions`: which weights each engine holds, and how the publishes went."""

import argparse
import json
from pathlib import Path

import msgspec
from rich.console import Console

from slipstream.broker.report.summary import PUBLISHES
from slipstream.deploy.commands.options import add_json, add_run, chosen_run
from slipstream.deploy.launch.observer import status_now
from slipstream.deploy.terminal.console import make_console
from slipstream.deploy.terminal.observe import run_of_folder
from slipstream.deploy.terminal.versions_view import VersionsView, relay_silent_s, render, view_of
from slipstream.wire.errors import ConfigError, PeerLostError
from slipstream.wire.files.run_folder import SUMMARY
from slipstream.wire.messages.weightbus import MemberState, PublishRecord
from slipstream.wire.process.command_line import print_json

EXAMPLES = """examples:
  slipstream versions                       of the newest run
  slipstream versions runs/demo --last 30   and its 30 newest publishes
  slipstream versions runs/demo --json      everything, for programs

An engine is current, behind (it runs an older version, or has none yet), receiving, or torn: it may
hold parts of two versions, and generates nothing until it holds a whole one.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_run(parser)
    parser.add_argument("--last", type=int, default=10, metavar="N", help="show N publishes (10)")
    add_json(parser)


def main(arguments: argparse.Namespace) -> int:
    """Run the command."""
    folder = chosen_run(arguments.folder)
    return print_versions(folder, make_console(), count=arguments.last, as_json=arguments.json)


class _Role(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    silent_s: float


class _Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Fields read from summary.json."""

    run_name: str
    outcome: str
    finished: bool
    steps: int
    roles: list[_Role]
    members: list[MemberState]
    publishes: list[PublishRecord] = msgspec.field(name=PUBLISHES)


def print_versions(folder: Path, console: Console, *, count: int, as_json: bool) -> int:
    """Print engines' versions, now or at the end of the run.

    At most ``count`` publishes are printed; JSON has all that are kept.

    Raises:
        ConfigError: it is no run folder, or nothing was written there.
    """
    run = run_of_folder(folder)
    try:
        view = view_of(status_now(run))
    except PeerLostError:
        path = folder / SUMMARY
        try:
            read = msgspec.convert(json.loads(path.read_bytes()), _Summary)
        except OSError as error:
            raise ConfigError(
                f"no broker answers for {folder}, and {path} cannot be read: {error.strerror}"
            ) from error
        except ValueError as error:  # damaged JSON, or other fields
            raise ConfigError(f"{path} is not a summary of this version: {error}") from error
        as_of = f"as of step {read.steps}: no broker answers for {folder}"
        if read.outcome != "running":
            as_of = "the run has ended" + (f": {read.outcome}" if not read.finished else "")
        view = VersionsView(
            run_name=read.run_name,
            steps=read.steps,
            as_of=as_of,
            relay_silent_s=relay_silent_s([(one.role, one.silent_s) for one in read.roles]),
            members=read.members,
            publishes=read.publishes,
        )
    if as_json:
        return print_json(view)
    for part in render(view, count=count):
        console.print(part)
    return 0
