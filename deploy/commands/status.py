"""`slipstream status`: the screen of `slipstream top`, once and whole; of an ended run its last."""

import argparse

from slipstream.broker.history.columns import read_state
from slipstream.broker.report.summary import summary_of
from slipstream.deploy.commands.options import add_json, add_run, chosen_run
from slipstream.deploy.terminal.console import make_console
from slipstream.deploy.terminal.observe import page_line, run_of_folder
from slipstream.deploy.terminal.recent import newest_status, recent_of
from slipstream.deploy.terminal.screen import ALL, draw
from slipstream.wire.files.run_folder import PAGE_STATE
from slipstream.wire.process.command_line import print_json

EXAMPLES = """examples:
  slipstream status                        of the newest run
  slipstream status runs/demo --json       for programs
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_run(parser)
    add_json(parser)


def main(arguments: argparse.Namespace) -> int:
    """Run the command."""
    run = run_of_folder(chosen_run(arguments.folder))
    stored = read_state(run.folder / PAGE_STATE)
    recent, console = recent_of(run.folder, stored), make_console()
    status = newest_status(run, stored, recent)
    if arguments.json:
        return print_json(summary_of(status))
    page = page_line(run, is_terminal=console.is_terminal)
    console.print(draw(status, recent, console, height=ALL, footer=page))
    return 0
