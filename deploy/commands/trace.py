"""`slipstream trace`: the events of a run on a timeline for Perfetto and Chrome."""

import argparse
import json
from pathlib import Path

import msgspec

from slipstream.broker.history.columns import read_state
from slipstream.broker.ledger.events import decode_event
from slipstream.broker.report.summary import PUBLISHES
from slipstream.broker.store.event_log import read_trail
from slipstream.deploy.commands.options import add_run, chosen_run, writing
from slipstream.deploy.terminal.console import make_console
from slipstream.deploy.terminal.timeline import (
    TrailReader,
    history_marks,
    publish_spans,
    trace_events,
)
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.replace import replacing_file
from slipstream.wire.files.run_folder import PAGE_STATE, SUMMARY, TRAIL
from slipstream.wire.messages.weightbus import PublishRecord

TRACE = "trace.json"
EXAMPLES = """examples:
  slipstream trace runs/demo               writes runs/demo/trace.json
  slipstream trace --out /tmp/demo.json    of the newest run

Open the file at https://ui.perfetto.dev (nothing is sent anywhere) or in chrome://tracing.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_run(parser)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file to write; default: trace.json of the run"
    )
    parser.add_argument(  # the default takes about 50 MB; viewers become slow beyond it
        "--max-spans", type=int, default=200_000, metavar="N", help="draw the newest N (200000)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Write the trace of a run and summarize it.

    Raises:
        ConfigError: the run keeps no trail.
    """
    max_spans, console = arguments.max_spans, make_console()
    if max_spans < 1:
        raise ConfigError(f"--max-spans must be at least 1, got {max_spans}")
    folder = chosen_run(arguments.folder)
    if not (folder / TRAIL).is_dir():
        raise ConfigError(f"{folder} holds no {TRAIL}/: no run, or broker.max_trail_bytes = 0")
    reader = TrailReader(max_spans=max_spans)
    for _, at_s, data in read_trail(folder / TRAIL):
        reader.add(at_s, decode_event(data))
    reader.close()
    stored = read_state(folder / PAGE_STATE)
    summary = _Summary()
    try:
        summary = msgspec.convert(json.loads((folder / SUMMARY).read_bytes()), _Summary)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # damaged JSON, or other fields
        why = f"{folder / SUMMARY} cannot be read: {error}"
        console.print(f"no publishes: {why}", style="yellow", soft_wrap=True)
    spans = [*reader.spans, *publish_spans(summary.newest)]
    if not spans:
        raise ConfigError(f"{folder / TRAIL} holds nothing that lasted: the run has just started")
    marks = [*reader.marks]
    if stored is not None:
        marks += history_marks(stored.history)
    path = arguments.out or folder / TRACE
    with writing(path, "--out"), replacing_file(path, durable=False) as file:
        head = json.dumps({"run": folder.name})
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {head}, "traceEvents": [\n'.encode())
        for number, event in enumerate(trace_events(spans, marks)):
            file.write(((",\n" if number else "") + json.dumps(event)).encode())
        file.write(b"\n]}\n")
    size = path.stat().st_size / 2**20
    console.print(
        f"{len(spans)} spans in {path} ({size:.1f} MiB): open it at https://ui.perfetto.dev or "
        "chrome://tracing",
        soft_wrap=True,
    )
    notes = []
    if reader.num_cut:
        limit = f"{max_spans} is the limit (--max-spans)"
        notes.append(f"{reader.num_cut} older spans were left out: {limit}")
    if (num_lost := summary.publishes - len(summary.newest)) > 0:
        notes.append(f"{num_lost} older publishes were left out: a run keeps the newest")
    for note in notes:
        console.print(note, style="yellow", soft_wrap=True)
    return 0


class _Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Fields read from summary.json."""

    newest: list[PublishRecord] = msgspec.field(name=PUBLISHES, default_factory=list)
    publishes: int = 0
