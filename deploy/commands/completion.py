"""`slipstream completion`: a script that completes commands, options and run folders in a shell."""

import argparse
import importlib
import sys
from collections.abc import Callable

from slipstream.deploy.terminal.completion import MAIN, SHELLS, Command, command_of, script

EXAMPLES = """examples:
  slipstream completion bash >> ~/.bashrc                              for all shells from now on
  slipstream completion zsh >> ~/.zshrc
  slipstream completion fish > ~/.config/fish/completions/slipstream.fish
  source <(slipstream completion bash)                                 for this shell alone
"""
ROLES = {
    "start-broker": "broker.main",
    "start-learner": "learner.main",
    "start-generator": "generators.main",
    "start-environment": "generators.environments.main",
    "start-reward-worker": "broker.reward_worker.main",
}
"""Programs of the roles, and where their parsers are made."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("shell", choices=tuple(SHELLS), help="the shell to write for")


def main(arguments: argparse.Namespace) -> int:
    """Print the script."""
    sys.stdout.write(script(arguments.shell, programs(arguments.make_parser)))
    return 0


def programs(make_parser: Callable[[], argparse.ArgumentParser]) -> dict[str, Command]:
    """Return every program and what it takes; all modules of commands are imported.

    Args:
        make_parser: that of ``slipstream`` with all of its commands.
    """
    parsers = {MAIN: make_parser()}
    for name, module in ROLES.items():
        parsers[name] = importlib.import_module(f"slipstream.{module}").make_parser()
    return {name: command_of(parser) for name, parser in parsers.items()}
