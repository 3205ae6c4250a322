"""`slipstream top`: a run in a terminal, live."""

import argparse
import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from slipstream.broker.config import BrokerSection
from slipstream.broker.dashboard.columns import StoredState, read_state
from slipstream.broker.report.summary import summary_of
from slipstream.deploy.commands.options import RUNS, add_json, add_run
from slipstream.deploy.terminal.console import make_console
from slipstream.deploy.terminal.observe import (
    StatusWatcher,
    dashboard_address,
    run_of_folder,
    status_now,
)
from slipstream.deploy.terminal.recent import Recent
from slipstream.deploy.terminal.screen import Screen, lines_of
from slipstream.deploy.terminal.view import age
from slipstream.wire.errors import ConfigError, PeerLostError
from slipstream.wire.files.run_folder import PAGE_STATE, newest_run
from slipstream.wire.messages.status import RunStatus
from slipstream.wire.process.command_line import print_json
from slipstream.wire.settings.load import load_table, section
from slipstream.wire.settings.sections import RunSection

_EVERY_S = 1.0
_OLD_S = 3.0  # an older answer is marked as such
_GONE_S = 30.0  # then the view says what to do
EXAMPLES = """examples:
  slipstream top                           the newest run; q ends it
  slipstream top runs/demo --json          its figures and advisories once, for programs

It works over ssh on a terminal of 80x24 and shows more on a larger one. Every sentence at the top
is explained in docs/operations.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_run(parser)
    add_json(parser, "print the figures once, for programs")


def main(arguments: argparse.Namespace) -> int:
    """Run the command."""
    return top(arguments.folder or newest_run(RUNS), as_json=arguments.json)


def top(folder: Path, *, as_json: bool) -> int:
    """Show a run until q is pressed, or print its state once.

    Args:
        folder: of the run.
        as_json: print the figures of now, or of the end of the run, with advisories, and return.

    Raises:
        ConfigError: it is no run folder, or there is no terminal to draw on.
        PeerLostError: as_json, no broker answers, and none wrote what it saw.
    """
    run = run_of_folder(folder)
    stored = read_state(folder / PAGE_STATE)
    recent = recent_of(folder, stored)
    if as_json:
        try:
            status = status_now(run)
            recent.add(status)
        except PeerLostError:
            if stored is None:
                raise
            outcome = outcome_of(run) or stored.status.outcome
            status = replace(stored.status, outcome=outcome)
            recent.look(status)
        return print_json(summary_of(status) | {"advisories": recent.advisories()})
    console = make_console()
    if not console.is_terminal:
        raise ConfigError("slipstream top draws on a terminal, and this is none: use --json")
    watcher = StatusWatcher(run, every_s=_EVERY_S)
    watcher.start()
    try:
        _show(run, watcher, recent, console, stored.status if stored else None)
    finally:
        watcher.close()
    return 0


def recent_of(folder: Path, stored: StoredState | None) -> Recent:
    """Return the history of a run as far as it is written, with the limits that it goes by."""
    broker = section(load_table(folder / "resolved.toml"), "broker", BrokerSection)
    return Recent(
        stored.history if stored else None,
        high_water_bytes=broker.high_water_bytes,
        fsync=broker.redis.known_fsync,
    )


def _show(
    run: RunSection,
    watcher: StatusWatcher,
    recent: Recent,
    console: Console,
    written: RunStatus | None,
) -> None:
    """Draw once a second until q, Ctrl-C or a signal; the file replaces a missing answer."""
    live = Live(console=console, screen=True, auto_refresh=False)
    with ends_in_order(), keys_of(_keyboard()) as keys, live:
        while True:
            status = watcher.newest or written
            if watcher.newest is not None:
                recent.add(watcher.newest)
            elif written is not None:
                recent.look(written)
            live.update(_drawing(run, watcher, recent, console, status), refresh=True)
            if "q" in keys.pressed(_EVERY_S).lower():
                return


def _drawing(
    run: RunSection,
    watcher: StatusWatcher,
    recent: Recent,
    console: Console,
    status: RunStatus | None,
) -> Group:
    width, height = console.size
    footer = f"q ends  {dashboard_address(run)}"
    trouble = trouble_of(watcher.error, watcher.age_s, outcome_of(run) if watcher.error else "")
    if status is None:
        what = trouble or "the broker is asked ..."
        return Group(Text(f"{run.name}: {what}"), Text(footer, style="dim"))
    lines = lines_of(
        status,
        recent.advisories(),
        Screen(width, height, plain=not console.encoding.lower().startswith("utf")),
        recent=recent,
        trouble=trouble,
        footer=footer,
        now_s=time.time(),
    )
    return Group(*lines)


def trouble_of(error: str, age_s: float, outcome: str) -> str:
    """Return why what is shown is not of now; empty if it is.

    Args:
        error: of the newest question to the broker.
        age_s: how old its newest answer is.
        outcome: of the run, as it is written down.
    """
    if not error and age_s < _OLD_S:
        return ""
    if error and outcome not in {"", "running"}:
        return f"the run has ended: {outcome}"
    why = f" ({error})" if error else ""
    said = (
        f"the broker has not answered for {age(age_s)} and is asked every second; what is shown "
        f"is old{why}"
    )
    if age_s < _GONE_S:
        return said
    return (
        f"{said}. Every role waits for it, for run.outage_s: `slipstream run` starts it again, "
        "one started by hand needs start-broker; see logs/broker.log, and Broker gone in "
        "docs/operations.md"
    )


def outcome_of(run: RunSection) -> str:
    """Return how a run ended by its summary; empty if that is not known."""
    try:
        return str(json.loads(run.summary_file.read_bytes()).get("outcome", ""))
    except (OSError, ValueError):
        return ""


class Keys:
    """What is typed, read without waiting for the end of a line."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def pressed(self, timeout_s: float) -> str:
        """Return what was typed within so many seconds, as soon as something is."""
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


def _keyboard() -> int | None:
    """Return the descriptor of the keyboard, if there is one."""
    return sys.stdin.fileno() if sys.stdin.isatty() else None


@contextmanager
def keys_of(descriptor: int | None) -> Iterator[Keys]:
    """Read single keys of a terminal, unseen; it is as before afterwards."""
    if descriptor is None:
        yield Keys(None)
        return
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield Keys(descriptor)
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
