"""`slipstream top`: a run in a terminal, live; or once and whole, of an ended run its last."""

import argparse
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from slipstream.broker.history.columns import read_state
from slipstream.broker.report.summary import summary_of
from slipstream.deploy.commands.options import add_json, add_run, chosen_run
from slipstream.deploy.launch.observer import StatusWatcher
from slipstream.deploy.terminal.console import make_console
from slipstream.deploy.terminal.observe import (
    dashboard_address,
    page_line,
    run_of_folder,
    saved_status,
    trouble_with,
)
from slipstream.deploy.terminal.recent import Recent, newest_status, recent_of
from slipstream.deploy.terminal.screen import ALL, draw
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import PAGE_STATE
from slipstream.wire.messages.status import RunStatus
from slipstream.wire.process.command_line import print_json
from slipstream.wire.settings.sections import RunSection

_EVERY_S = 1.0
EXAMPLES = """examples:
  slipstream top                           the newest run; q quits
  slipstream top --once                    its screen once, with every line
  slipstream top runs/demo --json          its figures and advisories once, for programs

It works over ssh on a terminal of 80x24 and shows more on a larger one. The advice at the top is
explained in docs/operations.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_run(parser)
    parser.add_argument("--once", action="store_true", help="print every line once, and exit")
    add_json(parser, "print the figures once, for programs")


def main(arguments: argparse.Namespace) -> int:
    """Show a run until q is pressed, or print once its newest figures, with advisories.

    Raises:
        ConfigError: it is no run folder, or there is no terminal to draw on.
        PeerLostError: --json, no broker answers, and none has saved its state.
    """
    folder = chosen_run(arguments.folder)
    run = run_of_folder(folder)
    stored = read_state(folder / PAGE_STATE)
    recent = recent_of(folder, stored)
    if arguments.json:
        status = newest_status(run, stored, recent)
        return print_json(summary_of(status) | {"advisories": recent.advisories()})
    console = make_console()
    if arguments.once:
        page = page_line(run, is_terminal=console.is_terminal)
        status = newest_status(run, stored, recent)
        console.print(draw(status, recent, console, height=ALL, footer=page))
        return 0
    if not console.is_terminal:
        raise ConfigError(
            "slipstream top draws on a terminal, and this is not one: use --once or --json"
        )
    watcher = StatusWatcher(every_s=_EVERY_S)
    watcher.start(run)
    live = Live(console=console, screen=True, auto_refresh=False)
    keyboard = sys.stdin.fileno() if sys.stdin.isatty() else None
    written = saved_status(run, stored)
    try:
        with ends_in_order(), keys_of(keyboard) as keys, live:
            while True:
                if watcher.newest is not None:
                    recent.add(watcher.newest)
                elif written is not None:  # the file replaces a missing answer
                    recent.evaluate(written)
                live.update(_drawing(run, watcher, recent, console, written), refresh=True)
                if "q" in keys.pressed(_EVERY_S).lower():
                    return 0
    finally:
        watcher.close()


def _drawing(
    run: RunSection,
    watcher: StatusWatcher,
    recent: Recent,
    console: Console,
    written: RunStatus | None,
) -> Group:
    footer = f"q quits  {dashboard_address(run)}"
    status, trouble = watcher.newest or written, trouble_with(watcher, run)
    if status is None:
        what = trouble or "waiting for the broker to answer"
        return Group(Text(f"{run.name}: {what}"), Text(footer, style="dim"))
    return draw(status, recent, console, height=console.height, trouble=trouble, footer=footer)


class TypedKeys:
    """Keys typed, read without waiting for the end of a line."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def pressed(self, timeout_s: float) -> str:
        """Return the key pressed within ``timeout_s``, as soon as there is one."""
        if self._descriptor is None:
            time.sleep(timeout_s)
            return ""
        ready, _, _ = select.select([self._descriptor], [], [], timeout_s)
        if not ready:
            return ""
        typed = os.read(self._descriptor, 64)
        if not typed:
            self._descriptor = None  # closed: no more input
        return typed.decode(errors="replace")


@contextmanager
def keys_of(descriptor: int | None) -> Iterator[TypedKeys]:
    """Read single keys of a terminal, unseen; it is as before afterwards."""
    if descriptor is None:
        yield TypedKeys(None)
        return
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield TypedKeys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextmanager
def ends_in_order() -> Iterator[None]:
    """Have Ctrl-C end the block, and signals end the process with the terminal as it was."""

    def leave(signum: int, _frame: object) -> None:
        raise SystemExit(128 + signum)

    before = {s: signal.signal(s, leave) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
