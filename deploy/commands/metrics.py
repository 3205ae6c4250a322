"""`slipstream metrics`: figures of runs, in a table or as CSV; of a running run those so far."""

import argparse
import csv
import fnmatch
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from slipstream.broker.dashboard.comparison import cell
from slipstream.broker.history.compare.curves import AXES
from slipstream.broker.history.compare.run_table import Columns
from slipstream.broker.history.compare.runs import ComparedRun, named
from slipstream.deploy.commands.options import add_json, chosen_run
from slipstream.deploy.terminal.console import make_console
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.command_line import print_json

EXAMPLES = """examples:
  slipstream metrics                                  the newest figures of the newest run
  slipstream metrics runs/a runs/b --name 'reward/*'  of two runs beside each other
  slipstream metrics runs/a --csv > a.csv             every learner step, every figure
  slipstream metrics runs/a runs/b --csv --name eval/mean@1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument(
        "runs", type=Path, nargs="*", metavar="RUN", help="run folders, default the newest run"
    )
    parser.add_argument(
        "--name",
        action="append",
        metavar="PATTERN",
        help="figures of this name, or of names like 'reward/*'; may be given again",
    )
    parser.add_argument(
        "--csv", action="store_true", help="a line for each run and learner step, to the output"
    )
    add_json(parser, "the newest figures of each run, for programs")


def main(arguments: argparse.Namespace) -> int:
    """Run the command."""
    runs = named(arguments.runs or [chosen_run(None)])
    for run in runs:
        run.table.refresh()
    names = chosen_names(runs, arguments.name or ["*"])
    if arguments.csv:
        csv.writer(sys.stdout).writerows(csv_rows(runs, names))
        return 0
    found = {run.name: newest_figures(run, names) for run in runs}
    if arguments.json:
        return print_json(found)
    table = Table("figure", *(run.name for run in runs))
    for name in ("step", *names):
        values = (found[run.name].get(name) for run in runs)
        table.add_row(Text(name), *("-" if value is None else f"{value:g}" for value in values))
    make_console().print(table)
    return 0


def chosen_names(runs: Sequence[ComparedRun], patterns: Sequence[str]) -> list[str]:
    """Return the names of figures that any pattern fits, in order.

    Raises:
        ConfigError: a pattern fits none.
    """
    known = sorted({name for run in runs for name in run.table.names})
    for pattern in patterns:
        if pattern != "*" and not fnmatch.filter(known, pattern):
            runs_named = ", ".join(run.name for run in runs)
            raise ConfigError(f"no figure of {runs_named} is named {pattern!r} (--name)")
    return [
        name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]


def newest_figures(run: ComparedRun, names: Sequence[str]) -> dict[str, float]:
    """Return the newest value of each figure, and the newest learner step as ``step``."""
    found: dict[str, float] = {}
    for name in names:
        curve = run.table.curve(name)
        if curve is not None and len(curve.value):
            found[name] = float(curve.value[-1])
            found["step"] = max(found.get("step", 0.0), float(curve.step[-1]))
    return found


def csv_rows(runs: Sequence[ComparedRun], names: Sequence[str]) -> list[list[str]]:
    """Return a heading, then a row for each run and each of its steps and evaluations."""
    rows = [["run", *AXES, *names]]
    for run in runs:
        both: list[list[str]] = []
        for columns in (run.table.rounds, run.table.steps):
            present = [name for name in names if name in columns.names]
            if present:
                both += _rows(run.name, columns, names)
        rows += sorted(both, key=lambda row: float(row[1] or 0))  # an evaluation before its step
    return rows


def _rows(run: str, columns: Columns, names: Sequence[str]) -> list[list[str]]:
    values = [columns[name].tolist() for name in (*AXES, *names)]
    return [[run, *map(cell, row)] for row in zip(*values, strict=True)]
