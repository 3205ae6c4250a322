"""Where a run's state is, and how old: its folder, its page, its broker."""

import json
from pathlib import Path

from msgspec.structs import replace

from slipstream.broker.config import BrokerSection
from slipstream.broker.history.columns import StoredState
from slipstream.deploy.launch.observer import StatusWatcher
from slipstream.deploy.terminal.figures import age
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import PAGE_ADDRESS, SETTINGS
from slipstream.wire.messages.status import RunStatus
from slipstream.wire.settings.load import load_table, section
from slipstream.wire.settings.sections import RunSection, run_section
from slipstream.wire.settings.tenants import FOLDER, is_pool

_OLD_S = 3.0  # an older answer is marked as such
_GONE_S = 30.0  # age at which the view gives advice
_NO_OUTCOME = "unknown: no broker answers, and nobody wrote how it ended (it was killed)"


def run_of_folder(folder: Path) -> RunSection:
    """Return [run] of a run folder at its present place, for any caller."""
    if not (folder / SETTINGS).is_file():
        raise ConfigError(f"{folder} is not a run folder: no {SETTINGS} in it")
    table = load_table(folder / SETTINGS)
    if is_pool(table):
        names = ", ".join(str(folder / FOLDER / name) for name in sorted(table["tenants"]))
        raise ConfigError(f"{folder} is a pool; its runs are those of its tenants: name {names}")
    here = folder.absolute()
    return run_section(
        {**table, "run": {**table.get("run", {}), "dir": str(here.parent), "name": here.name}}
    )


def broker_of_folder(folder: Path) -> BrokerSection:
    """Return [broker] of a run folder."""
    return section(load_table(folder / SETTINGS), "broker", BrokerSection)


def dashboard_address(run: RunSection) -> str:
    """Return the address of a run's live page."""
    path = run.folder / PAGE_ADDRESS
    return path.read_text().strip() if path.exists() else "(off)"


def page_line(run: RunSection, *, is_terminal: bool) -> str:
    """Return a line with the page's address; only a terminal shows its token."""
    place = run.folder / PAGE_ADDRESS
    if is_terminal or not place.exists():
        return f"dashboard {dashboard_address(run)}"
    return f"dashboard: its address is in {place}"


def trouble_of(error: str, age_s: float, outcome: str) -> str:
    """Return the reason why the shown state is out of date; empty if it is not.

    ``error`` is that of the newest request to the broker, ``age_s`` the age of its newest answer.
    """
    if not error and age_s < _OLD_S:
        return ""
    if error and outcome not in {"", "running"}:
        return f"the run has ended: {outcome}"
    why = f" ({error})" if error else ""
    late = (
        f"the broker has not answered for {age(age_s)} and is asked every second; these figures "
        f"are old{why}"
    )
    if age_s < _GONE_S:
        return late
    return (
        f"{late}. Every role waits for it, for run.outage_s: `slipstream run` restarts it, "
        "one started by hand needs start-broker; see logs/broker.log, and Broker gone in "
        "docs/operations.md"
    )


def outcome_of(run: RunSection) -> str:
    """Return a run's outcome by its summary; empty if it is not known."""
    try:
        return str(json.loads(run.summary_file.read_bytes()).get("outcome", ""))
    except (OSError, ValueError):
        return ""


def saved_status(run: RunSection, stored: StoredState | None) -> RunStatus | None:
    """Return the newest state that the broker of a run wrote, with the run's outcome.

    Without an outcome in the summary the run did not end cleanly: the outcome says so.
    """
    if stored is None:
        return None
    outcome = outcome_of(run)
    if outcome in {"", "running"}:
        outcome = _NO_OUTCOME
    return replace(stored.status, outcome=outcome)


def trouble_with(watcher: StatusWatcher, run: RunSection) -> str:
    """Return the reason why the newest answer is out of date; empty if it is not."""
    return trouble_of(watcher.error, watcher.age_s, outcome_of(run) if watcher.error else "")
