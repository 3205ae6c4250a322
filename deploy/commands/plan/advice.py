"""Advice on a run: predicted effects of one generator or one step of bound more.

Laws are fitted on the newest learner steps of a run under way, or of one that has ended, and the
run is played in virtual time with the real ledger: unchanged, which must reproduce the measured
seconds, then with one change at a time (docs/scale.md). All but the measured seconds is predicted.
"""

import argparse

from rich.console import Console
from rich.table import Table

from slipstream.deploy.commands.options import RUNS, chosen_run
from slipstream.deploy.predict.advise.expect import Advice, Expected, advise, span
from slipstream.deploy.predict.advise.record import record_of
from slipstream.deploy.terminal.console import make_console
from slipstream.wire.process.command_line import print_json


def main(arguments: argparse.Namespace) -> int:
    """Print the advice."""
    record = record_of(chosen_run(None if arguments.advise == RUNS else arguments.advise))
    console = make_console()
    if arguments.json:
        return print_json(advise(record))
    with console.status("fitting") as status:
        advice = advise(record, lambda change: status.update(f"simulating {change}"))
    print_advice(advice, console)
    return 0


def print_advice(advice: Advice, console: Console) -> None:
    """Print the expected figures of the run and of each change."""
    table = Table(
        title=f"{advice.run}: predicted from its last {advice.num_steps} steps, not measured"
    )
    table.add_column("change")
    for name in ("s a step", "faster", "learner waits", "staleness, p95"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("setting")
    table.add_row(*_cells(advice.now, is_now=True))
    for expected in advice.changes:
        table.add_row(*_cells(expected, is_now=False))
    console.print(table)
    console.print(f"{advice.sentence[0].upper()}{advice.sentence[1:]}.", highlight=False)
    for text in advice.cautions:
        console.print(f"Caution: {text}.", style="yellow", highlight=False)
    simulated = span(advice.simulated_s, "{:.2f}")
    console.print(
        f"Measured {advice.measured_s:.2f} s a step; the same run simulated {simulated} s. Laws:",
        highlight=False,
    )
    for law in advice.laws:
        console.print(f"  {law}", highlight=False)


def _cells(expected: Expected, *, is_now: bool) -> tuple[str, ...]:
    return (
        expected.change,
        span(expected.step_s, "{:,.2f}"),
        "" if is_now else span(expected.gain, "{:+.0%}"),
        f"{expected.learner_waits:.0%}",
        f"{expected.mean_staleness:.2f}, {expected.p95_staleness}",
        "" if is_now else expected.setting or "(there is none)",
    )
