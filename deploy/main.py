"""`slipstream`: run, check and look at runs."""

import argparse
import logging
from pathlib import Path

from wire.command_line import run_role

_EXAMPLES = """examples:
  slipstream quickstart                                  two-digit addition on this machine
  slipstream quickstart learner.lr=0                     the same without learning
  slipstream run --config run.toml generators.count=4    a run with every role on this host
  slipstream run --config run.toml --dry-run             check the settings, print the processes
  slipstream status runs/quickstart --json               figures of a run that goes on
"""


def main() -> int:
    """Parse and hand over to one subcommand."""
    parser = argparse.ArgumentParser(
        prog="slipstream",
        description="Disaggregated asynchronous reinforcement learning for language models.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run every role of a run on this host")
    run.add_argument("--config", type=Path, required=True, metavar="RUN.toml")
    run.add_argument("--dry-run", action="store_true", help="check, print the processes, exit")
    run.add_argument("overrides", nargs="*", metavar="section.key=value")
    quickstart = commands.add_parser("quickstart", help="teach a tiny policy to add, in minutes")
    quickstart.add_argument("--config", type=Path, default=Path("configs/quickstart.toml"))
    quickstart.add_argument("overrides", nargs="*", metavar="section.key=value")
    status = commands.add_parser("status", help="figures of a run that goes on")
    status.add_argument("folder", type=Path, metavar="runs/NAME")
    status.add_argument("--json", action="store_true", help="everything, for programs")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    from deploy import commands as bodies

    def body() -> int:
        match arguments.command:
            case "run":
                return bodies.run(arguments.config, arguments.overrides, arguments.dry_run)
            case "quickstart":
                return bodies.quickstart(arguments.config, arguments.overrides)
            case _:
                return bodies.status(arguments.folder, as_json=arguments.json)

    return run_role(body)


if __name__ == "__main__":
    raise SystemExit(main())
