"""`slipstream status`: figures of a run that is running."""

import argparse

from slipstream.broker.report.summary import summary_of
from slipstream.deploy.commands.options import RUNS, add_json, add_run
from slipstream.deploy.terminal.console import make_console
from slipstream.deploy.terminal.observe import dashboard_address, run_of_folder, status_now
from slipstream.deploy.terminal.view import live_view
from slipstream.wire.files.run_folder import newest_run
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
    run = run_of_folder(arguments.folder or newest_run(RUNS))
    status = status_now(run)
    if arguments.json:
        return print_json(summary_of(status))
    make_console().print(live_view(status, dashboard_address(run)))
    return 0
