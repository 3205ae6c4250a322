"""`slipstream completion`: a script that completes commands, options and files in a shell."""

import argparse
import importlib
import sys
from collections.abc import Callable

import shtab

EXAMPLES = """examples:
  slipstream completion bash >> ~/.bashrc                   for all shells from now on
  echo 'eval "$(slipstream completion zsh)"' >> ~/.zshrc    after compinit
  slipstream completion fish >> ~/.config/fish/config.fish
  source <(slipstream completion bash)                      for this shell alone
"""
ROLES = {
    "start-broker": "broker.main",
    "start-learner": "learner.main",
    "start-generator": "generators.main",
    "start-environment": "generators.environments.main",
    "start-reward-worker": "broker.reward_worker.main",
}
"""Programs of the roles, and where their parsers are made."""
SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("shell", choices=SHELLS, help="the shell to write for")


def main(arguments: argparse.Namespace) -> int:
    """Print the script; all modules of commands are imported."""
    sys.stdout.write(script(arguments.shell, arguments.make_parser))
    return 0


def script(shell: str, make_parser: Callable[[], argparse.ArgumentParser]) -> str:
    """Return what completes ``slipstream`` and the programs of the roles.

    Args:
        shell: One of SHELLS.
        make_parser: Maker of the parser of ``slipstream``, with all of its commands.
    """
    makers = [make_parser]
    makers += [importlib.import_module(f"slipstream.{name}").make_parser for name in ROLES.values()]
    parsers = [make() for make in makers]
    for parser in parsers:
        _complete_files(parser)
    return "".join(f"{shtab.complete(parser, shell)}\n" for parser in parsers)


def _complete_files(parser: argparse.ArgumentParser) -> None:
    """Offer files and folders wherever a value is free."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command)
        elif action.nargs != 0 and not action.choices:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
