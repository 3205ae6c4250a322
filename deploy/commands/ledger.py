"""`slipstream ledger`: where every prompt of a run went."""

import argparse
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import msgspec
from rich.table import Table
from rich.text import Text

from slipstream.broker.store.event_log import read_trail
from slipstream.broker.store.item_history import trace_item
from slipstream.deploy.commands.options import add_json, chosen_run
from slipstream.deploy.launch.observer import fetch_account
from slipstream.deploy.terminal.console import make_console
from slipstream.deploy.terminal.figures import nonzero
from slipstream.deploy.terminal.observe import run_of_folder
from slipstream.wire.errors import ConfigError, PeerLostError
from slipstream.wire.files.run_folder import ACCOUNT, TRAIL
from slipstream.wire.messages.ledger_view import LedgerView
from slipstream.wire.process.command_line import print_json
from slipstream.wire.unreadable import UNREADABLE

_PROMPT_CHARS = 200  # shown of a prompt in a title
EXAMPLES = """examples:
  slipstream ledger                        the newest run
  slipstream ledger runs/demo --items 30   and the 30 oldest items
  slipstream ledger trace 17 runs/demo     the life of the prompt at position 17
  slipstream ledger trace g203 --json      the life of group 203
  slipstream ledger trace "37+85="         of the newest item whose prompt holds this text
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[trace PROMPT] [RUN]",
        help="PROMPT is a position in the data (17), a group (g17) or a piece of the prompt; "
        "RUN is a run folder, default the newest one",
    )
    parser.add_argument(
        "--items", type=int, default=10, metavar="N", help="show the N oldest items (10)"
    )
    add_json(parser)


def main(arguments: argparse.Namespace) -> int:
    """Print the life of an item, or the account of a run: of now, or of its newest learner step."""
    words, as_json = arguments.words, arguments.json
    if words[:1] == ["trace"]:
        if len(words) not in {2, 3}:
            raise ConfigError("slipstream ledger trace PROMPT [RUN] takes one prompt")
        folder = chosen_run(words[2] if len(words) == 3 else None)
        return _print_trace(folder, words[1], as_json=as_json)
    if len(words) > 1:
        raise ConfigError(f"slipstream ledger takes one run folder, got {' '.join(words)}")
    folder, console = chosen_run(words[0] if words else None), make_console()
    try:
        view, age = fetch_account(run_of_folder(folder), arguments.items), ""
    except PeerLostError:
        path = folder / ACCOUNT
        try:
            view = msgspec.json.decode(path.read_bytes(), type=LedgerView)
        except OSError as error:
            raise ConfigError(
                f"no broker answers for {folder}, and {path} cannot be read: {error.strerror}"
            ) from error
        except UNREADABLE as error:
            raise ConfigError(f"{path} is not an account of this version: {error}") from error
        age = f"as of step {view.version.step}: no broker answers for {folder}"
        if view.finished:
            age = "the run has ended"
    if as_json:
        return print_json(view)
    if age:
        console.print(age, style="yellow", soft_wrap=True)
    for part in (*_account(view), *_work_in_flight(view)):
        console.print(part)
    return 0


def _account(view: LedgerView) -> Iterator[Table]:
    """Yield the equation of all items, and the details behind its figures."""
    dropped, in_flight = sum(view.dropped.values()), sum(view.in_flight.values())
    title = f"{view.run_name}: {view.version.label} of {view.last_step} steps"
    if view.stop_reason:
        title += f", ends because of {view.stop_reason}"
    table = Table(title=title, title_justify="left")
    for heading in ("", "issued", "= trained", "of it sealed", "+ dropped", "+ in flight"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("groups", *map(str, (view.issued, view.trained, view.sealed, dropped, in_flight)))
    flat = view.trajectories
    sealed = view.sealed * view.group_size
    figures = (flat["issued"], flat["trained"], sealed, flat["dropped"], flat["in_flight"])
    table.add_row("trajectories", *map(str, figures))
    if view.unaccounted:
        table.caption = f"{view.unaccounted} groups are UNACCOUNTED FOR"
        table.caption_style = "bold red"
    yield table
    grid = Table.grid(padding=(0, 3))
    of = f" of {view.prompts}" if view.prompts is not None else ""
    kept = ""
    if steps := view.replay_steps:
        kept = f" (steps {steps[0]} to {steps[-1]})" if len(steps) > 1 else f" (step {steps[0]})"
    open_by_state = {name: flat[name] for name in ("to_generate", "to_score", "scored")}
    rows = {
        "in flight": nonzero(view.in_flight) or "nothing",
        "dropped": nonzero(view.dropped) or "nothing",
        "trajectories": nonzero(open_by_state) or "none in flight",
        "prompts taken": f"{view.prompts_taken}{of}",
        "payloads": f"{_size(view.untrained_bytes)} untrained, {_size(view.replay_bytes)} trained "
        f"and not sealed{kept}",
        "after failures": f"{view.redelivered_steps} batches delivered again, "
        f"{view.requeued} groups generated again",
        "dead letters": f"{view.dead_letters}, {view.retried} issued again",
        "store": f"{view.store}; generation {view.broker_generation} of the broker",
    }
    for name, value in rows.items():
        grid.add_row(Text(name, style="dim"), Text(value))
    yield grid


def _work_in_flight(view: LedgerView) -> Iterator[Table]:
    """Yield each process with the work it holds, and the oldest items."""
    if view.holders:
        table = Table(title="work by process", title_justify="left")
        for heading in ("process", "work", "leases", "trajectories"):
            table.add_column(heading, justify="right" if heading[0] in "lt" else "left")
        for holder in view.holders:
            numbers = (str(holder.leases), str(holder.trajectories))
            table.add_row(holder.name, holder.work, *numbers)
        yield table
    if not view.oldest:
        return
    table = Table(title="oldest items in flight", title_justify="left")
    for heading in ("group", "prompt", "state", "age", "held by", "missing", "attempts", "due"):
        table.add_column(heading, overflow="ellipsis", no_wrap=True)
    for item in view.oldest:
        due = "" if item.deadline is None else f"step {item.deadline}"
        if item.bound_to is not None:
            due = f"in step {item.bound_to}"
        waits = f"{len(item.missing)} answers" if item.missing else f"{len(item.unscored)} rewards"
        prompt = f"{item.position}: {item.prompt}"
        table.add_row(
            f"g{item.group_id}",
            Text(prompt if item.item == "train" else f"evaluation {prompt}"),
            item.state,
            "-" if item.age_s is None else f"{item.age_s:.0f} s",
            item.holder or "-",
            waits if item.missing or item.unscored else "-",
            str(item.attempts),
            due,
        )
    yield table


def _print_trace(folder: Path, prompt: str, *, as_json: bool) -> int:
    if not (folder / TRAIL).is_dir():
        raise ConfigError(f"{folder} holds no {TRAIL}/: no run, or broker.max_trail_bytes = 0")
    trace = trace_item(read_trail(folder / TRAIL), prompt)
    if trace is None:
        raise ConfigError(
            f"no item {prompt!r} in {folder / TRAIL}: give a position in the data (17), a group "
            "(g17) or a piece of the prompt; events beyond broker.max_trail_bytes are removed"
        )
    if as_json:
        return print_json(trace)
    console = make_console()
    title = f"g{trace.group_id}, prompt {trace.position}: {trace.prompt[:_PROMPT_CHARS]}"
    table = Table("time", "after", "event", title=Text(title), title_justify="left")
    start = trace.life[0].at_s if trace.life else 0.0
    for moment in trace.life:
        clock = datetime.fromtimestamp(moment.at_s).astimezone().strftime("%H:%M:%S")
        table.add_row(clock, f"{moment.at_s - start:.2f} s", Text(moment.what))
    console.print(table)
    console.print(f"outcome: {trace.outcome}", soft_wrap=True)
    if trace.others:
        also = ", ".join(f"g{group_id}" for group_id in trace.others)
        console.print(f"the same prompt was also {also}", style="dim", soft_wrap=True)
    return 0


def _size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
