"""`slipstream advise`: what a run's own figures say of one generator or one step of bound more.

It fits laws on the newest learner steps of a run under way, or of one that has ended, and plays it
in virtual time with the real ledger: as it is, which must come out as it was measured, then with
one change at a time (docs/scale.md). Everything but the measured seconds is predicted.
"""

import argparse

from rich.console import Console
from rich.table import Table

from slipstream.deploy.commands.options import add_json, add_run, chosen_run
from slipstream.deploy.predict.advise.expect import Advice, Expected, advise, span
from slipstream.deploy.predict.advise.record import record_of
from slipstream.deploy.terminal.console import make_console
from slipstream.wire.process.command_line import print_json

EXAMPLES = """examples:
  slipstream advise                        of the newest run
  slipstream advise runs/demo --json       for programs
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_run(parser)
    add_json(parser)


def main(arguments: argparse.Namespace) -> int:
    """Run the command."""
    record = record_of(chosen_run(arguments.folder))
    console = make_console()
    if arguments.json:
        return print_json(advise(record))
    with console.status("fitting") as status:
        told = advise(record, lambda change: status.update(f"simulating {change}"))
    print_advice(told, console)
    return 0


def print_advice(told: Advice, console: Console) -> None:
    """Print what is expected."""
    table = Table(title=f"{told.run}: predicted from its last {told.num_steps} steps, not measured")
    table.add_column("change")
    for name in ("s a step", "faster", "learner waits", "staleness, p95"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("setting")
    table.add_row(*_cells(told.now, is_now=True))
    for one in told.changes:
        table.add_row(*_cells(one, is_now=False))
    console.print(table)
    console.print(f"{told.sentence[0].upper()}{told.sentence[1:]}.", highlight=False)
    for text in told.cautions:
        console.print(f"Caution: {text}.", style="yellow", highlight=False)
    simulated = span(told.simulated_s, "{:.2f}")
    console.print(
        f"Measured {told.measured_s:.2f} s a step; the same run simulated {simulated} s. Laws:",
        highlight=False,
    )
    for law in told.laws:
        console.print(f"  {law}", highlight=False)


def _cells(one: Expected, *, is_now: bool) -> tuple[str, ...]:
    return (
        one.change,
        span(one.step_s, "{:,.2f}"),
        "" if is_now else span(one.gain, "{:+.0%}"),
        f"{one.learner_waits:.0%}",
        f"{one.mean_staleness:.2f}, {one.p95_staleness}",
        "" if is_now else one.setting or "(there is none)",
    )
