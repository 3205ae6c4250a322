"""`slipstream`: run, check and watch runs."""

import argparse
import difflib
import importlib
import logging
import sys
from collections.abc import Container, Iterable

from slipstream.deploy.commands.options import take_config
from slipstream.wire.process.command_line import add_version, naming_places, run_role

_EXAMPLES = """examples:
  slipstream quickstart                              two-digit addition on this machine
  slipstream run --config run.toml --dry-run         check the settings, print the processes
  slipstream top                                     watch the newest run, live
  slipstream ledger trace 17                         the life of one prompt
  slipstream COMMAND --help                          options and examples of a command
"""
# command -> its module in deploy/commands, imported once it is called, and one line of help
COMMANDS = {
    "quickstart": ("quickstart", "teach a tiny policy to add, in minutes"),
    "run": ("run", "run every role of a run on this host"),
    "serve": ("serve", "let many tenants train and sample adapters over HTTP"),
    "check": ("check", "find out whether a run would start, before it does"),
    "align": ("align", "compare learner, SGLang and transformers, layer by layer"),
    "simulate": ("simulate", "predict a run in virtual time, with the real ledger"),
    "plan": (
        "plan.command",
        "size a run: GPUs, memory, layouts, publishes, splits; advice on a run",
    ),
    "render": ("render", "write files for Slurm, Kubernetes, compose or SkyPilot"),
    "scale": ("scale", "start or end generators of a run that is under way"),
    "top": ("top", "watch a run in this terminal"),
    "dashboard": ("dashboard", "the page of a run, running or ended"),
    "metrics": ("metrics", "figures of runs: newest values, or every step as CSV"),
    "show": ("show", "read the policy's answers"),
    "ledger": ("ledger", "where every prompt went, or the life of one"),
    "trace": ("trace", "write the time line of a run for Perfetto or Chrome"),
    "dead-letters": ("dead_letters", "groups not answered or scored: list, show, retry, drop"),
    "export": ("export", "write a checkpoint as a Hugging Face folder"),
    "replay": ("replay", "train on recorded batches alone"),
    "data": ("data_check", "check prompts before a run"),
    "reward": ("try_reward", "try a reward function without a run"),
    "env": ("env", "try an environment without a run, turn by turn"),
    "keys": ("keys", "keys for roles on other hosts: make, list, revoke"),
    "completion": ("completion", "print a script that completes commands in a shell"),
    "import-verl": ("import_verl", "write the settings of a run that verl's command describes"),
}


def main() -> int:
    """Run one subcommand."""
    return run_role(_called)  # a subcommand's imports may take a second


def make_parser(imported: Container[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser of some commands; of the others only the name and its line are known."""
    parser = argparse.ArgumentParser(
        prog="slipstream",
        description="Disaggregated asynchronous reinforcement learning for language models.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_version(parser)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in COMMANDS.items():
        formatter = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, help=text, formatter_class=formatter)
        if name in imported:
            body = importlib.import_module(f"slipstream.deploy.commands.{module}")
            command.description = body.__doc__
            command.epilog = body.EXAMPLES
            body.add_arguments(command)
            command.set_defaults(main=body.main, parser=command, make_parser=make_parser)
    return parser


def _called() -> int:
    """Parse and hand over to one subcommand; only that one is imported and gets its arguments."""
    called = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    parser = make_parser({called})
    if called and called not in COMMANDS:
        parser.error(f"no command {called!r}: {_meant(called, COMMANDS)}slipstream --help has all")
    arguments, left = parser.parse_known_args()
    if left:  # argparse gives up on settings that come after an option
        if "overrides" not in arguments or any(word.startswith("-") for word in left):
            known = [name for action in arguments.parser._actions for name in action.option_strings]
            unknown = next((word for word in left if word.startswith("-")), "")
            hint = _meant(unknown, known).rstrip()
            arguments.parser.error(
                f"unrecognized arguments: {' '.join(left)}{f': {hint}' if hint else ''}"
            )
        arguments.overrides += left
    take_config(parser, arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with naming_places(arguments):
        return int(arguments.main(arguments))


def _meant(word: str, known: Iterable[str]) -> str:
    """Return the nearest of some words as a question; empty if none is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]}? " if close else ""


if __name__ == "__main__":
    raise SystemExit(main())
