"""`slipstream dashboard [RUN ...]`: the page of a run, or a comparison of several."""

import argparse
import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from slipstream.broker.config import BrokerSection
from slipstream.broker.dashboard.comparison import ComparisonPage
from slipstream.broker.dashboard.items import RecordedItems
from slipstream.broker.dashboard.recorder import FinishedRun
from slipstream.broker.dashboard.web import Dashboard
from slipstream.broker.history.columns import StoredState, read_state
from slipstream.broker.history.compare.runs import is_run, runs_in
from slipstream.deploy.commands.options import chosen_run
from slipstream.deploy.launch.observer import status_now
from slipstream.deploy.terminal.console import make_console
from slipstream.deploy.terminal.observe import (
    broker_of_folder,
    dashboard_address,
    outcome_of,
    run_of_folder,
)
from slipstream.wire.errors import ConfigError, PeerLostError
from slipstream.wire.files.run_folder import PAGE_ADDRESS, PAGE_STATE
from slipstream.wire.process.command_line import port
from slipstream.wire.process.stopping import stop_event
from slipstream.wire.settings.sections import RunSection

EXAMPLES = """examples:
  slipstream dashboard                         of the newest run
  slipstream dashboard runs/demo --port 8080   at a given port
  slipstream dashboard runs/a runs/b           both over each other
  slipstream dashboard runs/                   every run in a folder, as a list and over each other

The page is served on this host alone and needs the token in its address. From elsewhere:
  ssh -L 8080:127.0.0.1:8080 HOST
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument(
        "folders",
        type=Path,
        nargs="*",
        metavar="RUN",
        help="run folders, default the newest one; several, or a folder of runs, are compared",
    )
    parser.add_argument(
        "--port",
        type=port,
        default=0,
        metavar="PORT",
        help="port to serve at; 0: the system chooses one",
    )


def main(arguments: argparse.Namespace) -> int:
    """Print the address of the page; serve it until Ctrl-C if no broker does."""
    folders: list[Path] = arguments.folders
    if len(folders) > 1 or (folders and is_folder_of_runs(folders[0])):
        return compare(folders, port=arguments.port)
    return show_one(chosen_run(folders[0] if folders else None), port=arguments.port)


def is_folder_of_runs(folder: Path) -> bool:
    """Return whether a folder holds runs and is not a run."""
    return folder.is_dir() and not is_run(folder) and bool(runs_in(folder))


def compare(folders: Sequence[Path], *, port: int) -> int:
    """Serve the page of several runs until Ctrl-C.

    Raises:
        ConfigError: one of several is no run folder, or this port cannot be listened at.
    """
    parent = folders[0] if len(folders) == 1 else None
    page = ComparisonPage(folders, parent=parent, host="127.0.0.1", port=port)
    what = f"{page.num_runs} runs" + (f" in {parent}" if parent is not None else "")
    _serve(page, f"{what}, from their files")
    return 0


def show_one(folder: Path, *, port: int) -> int:
    """Print the address of a run's page; serve it until Ctrl-C if no broker does."""
    console = make_console()
    run = run_of_folder(folder)
    broker = broker_of_folder(folder)
    try:
        status_now(run)
    except PeerLostError:
        pass
    else:
        require_page(run, broker)
        console.print(f"the run is running: {dashboard_address(run)}", soft_wrap=True)
        return 0
    stored = read_state(folder / PAGE_STATE)
    if stored is None:
        raise ConfigError(
            f"no broker answers for {folder}, and {folder / PAGE_STATE} holds no figures: was "
            "broker.dashboard.enabled false, or was the run made by another version?"
        )
    outcome = outcome_of(run)
    source = FinishedRun(
        stored,
        high_water_bytes=broker.high_water_bytes,
        fsync=broker.redis.known_fsync,
        outcome=shown_outcome(stored, outcome),
    )
    dashboard = Dashboard(source, RecordedItems(folder), host="127.0.0.1", port=port)
    _serve(dashboard, described(stored, outcome))
    return 0


def _serve(page: Dashboard | ComparisonPage, about: str) -> None:
    console = make_console()

    async def serve() -> None:
        stop = stop_event()
        try:
            console.print(await page.start(), soft_wrap=True)
            console.print(f"{about}\nCtrl-C stops it", soft_wrap=True)
            await stop.wait()
        finally:
            await page.stop()

    asyncio.run(serve())


def require_page(run: RunSection, broker: BrokerSection) -> None:
    """Refuse a run whose broker answers and serves no page."""
    if not broker.dashboard.enabled:
        raise ConfigError(
            f"the run is running with broker.dashboard.enabled = false: {run.folder} has no page; "
            "watch it with slipstream top"
        )
    if not (run.folder / PAGE_ADDRESS).exists():
        raise ConfigError(
            f"the run is running, but {run.folder / PAGE_ADDRESS} is missing: the broker has just "
            "started, or runs on another host"
        )


def _end_of(stored: StoredState, outcome: str) -> str:
    """Return a run's outcome, by its summary or else by its page; empty if neither has it."""
    return next(
        (name for name in (outcome, stored.status.outcome) if name not in {"", "running"}), ""
    )


def shown_outcome(stored: StoredState, outcome: str) -> str:
    """Return the outcome that a page shows of a run whose broker does not answer."""
    return _end_of(stored, outcome) or f"last recorded at {_written_at(stored)}"


def described(stored: StoredState, outcome: str) -> str:
    """Describe the state shown and its age."""
    written = f"its figures were last recorded at {_written_at(stored)}"
    if end := _end_of(stored, outcome):
        return f"the run has ended ({end}); {written}"
    return f"the broker does not answer, and no end of the run is recorded; {written}"


def _written_at(stored: StoredState) -> str:
    return datetime.fromtimestamp(stored.at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
