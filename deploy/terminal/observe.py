"""Reads the state of a running run from its broker."""

import asyncio
import json
import math
import threading
import time
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from slipstream.broker.client import BrokerClient
from slipstream.broker.config import BrokerSection
from slipstream.broker.history.columns import StoredState
from slipstream.deploy.terminal.figures import age
from slipstream.wire.errors import ConfigError, PeerLostError, SlipstreamError
from slipstream.wire.files.run_folder import PAGE_ADDRESS, SETTINGS
from slipstream.wire.messages.broker import (
    Answer,
    GetLedger,
    GetStatus,
    LedgerAnswer,
    Request,
    Role,
    StatusAnswer,
)
from slipstream.wire.messages.ledger_view import LedgerView
from slipstream.wire.messages.status import RunStatus
from slipstream.wire.settings.load import load_table, section
from slipstream.wire.settings.sections import RunSection, run_section

_TIMEOUT_S = 30.0
_STOP_CHECK_S = 0.1
_NEWEST_STEPS = 100  # that a request every second may have missed
_OLD_S = 3.0  # an older answer is marked as such
_GONE_S = 30.0  # then the view gives advice
_NO_OUTCOME = "unknown: no broker answers, and nobody wrote how it ended (it was killed)"
A = TypeVar("A", bound=Answer)


def run_of_folder(folder: Path) -> RunSection:
    """Return [run] of a run folder, wherever it lies by now and whoever calls."""
    if not (folder / SETTINGS).is_file():
        raise ConfigError(f"{folder} is not a run folder: no {SETTINGS} in it")
    table = load_table(folder / SETTINGS)
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
    """Return a line with the page's address; its token is for a terminal alone."""
    place = run.folder / PAGE_ADDRESS
    if is_terminal or not place.exists():
        return f"dashboard {dashboard_address(run)}"
    return f"dashboard: its address is in {place}"


def ask_broker(run: RunSection, request: Request, kind: type[A], *, role: Role = "observer") -> A:
    """Ask the broker of a run once; PeerLostError if none answers."""

    async def ask() -> A:
        client = await _connect(run, _TIMEOUT_S, role)
        try:
            answer, _ = await client.ask(request, kind)
        finally:
            client.close()
        return answer

    return asyncio.run(ask())


async def _connect(run: RunSection, timeout_s: float, role: Role) -> BrokerClient:
    if not run.broker and not run.socket("broker").exists():
        raise PeerLostError(f"no broker runs for {run.folder}; see {run.summary_file}")
    client, _ = await BrokerClient.connect(
        run.broker_endpoint,
        role=role,
        name=role,
        timeout_s=timeout_s,
        outage_s=timeout_s,
        key_file=run.key_file,
    )
    return client


def fetch_account(run: RunSection, num_items: int) -> LedgerView:
    """Ask the broker of a run for the account of all items; PeerLostError if none answers."""
    return ask_broker(run, GetLedger(num_items=num_items), LedgerAnswer).view


def status_now(run: RunSection) -> RunStatus:
    """Ask the broker of a run once, from a thread without an event loop."""
    return ask_broker(run, GetStatus(), StatusAnswer).status


def trouble_of(error: str, age_s: float, outcome: str) -> str:
    """Return the reason why the shown state is out of date; empty if it is not.

    ``error`` is of the newest request to the broker, ``age_s`` the age of its newest answer.
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

    Without an outcome in the summary nobody ended the run in order: the outcome says so.
    """
    if stored is None:
        return None
    outcome = outcome_of(run)
    if outcome in {"", "running"}:
        outcome = _NO_OUTCOME
    return replace(stored.status, outcome=outcome)


class StatusWatcher:
    """Polls the broker of a run on its own thread; keeps the newest answer.

    The first answer holds all learner steps, later ones the newest.
    """

    def __init__(self, run: RunSection, *, every_s: float = 1.0) -> None:
        self._run = run
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._loop()), name="status", daemon=True
        )
        self._started_s = time.monotonic()
        self._answer: tuple[RunStatus, float] | None = None
        self.asked_s = -math.inf  # monotonic time at which the newest answer was asked for
        self.error = ""  # of the newest attempt; empty while the broker answers

    @property
    def newest(self) -> RunStatus | None:
        """Newest answer; None before the first."""
        return self._answer[0] if self._answer else None

    @property
    def age_s(self) -> float:
        """Age of the newest answer, or the time that there has been none."""
        return time.monotonic() - (self._answer[1] if self._answer else self._started_s)

    @property
    def trouble(self) -> str:
        """Reason why the newest answer is out of date; empty if it is not."""
        return trouble_of(self.error, self.age_s, outcome_of(self._run) if self.error else "")

    def start(self) -> None:
        """Start asking."""
        self._thread.start()

    def close(self) -> None:
        """Ask no more; a question under way is given up, a first hello has a deadline."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_TIMEOUT_S)

    async def _loop(self) -> None:
        """Use one connection until it breaks, then make another."""
        while not self._stop.is_set():
            try:
                client = await _connect(self._run, _TIMEOUT_S, "observer")
                try:
                    while not self._stop.is_set():
                        count = _NEWEST_STEPS if self._answer is not None else -1
                        asked_s = time.monotonic()
                        question = client.ask(GetStatus(newest_steps=count), StatusAnswer)
                        asking = asyncio.ensure_future(question)
                        while not asking.done() and not self._stop.is_set():
                            await asyncio.wait({asking}, timeout=_STOP_CHECK_S)
                        if not asking.done():
                            asking.cancel()
                            return
                        self._answer = (asking.result()[0].status, time.monotonic())
                        self.asked_s = asked_s
                        self.error = ""
                        await asyncio.to_thread(self._stop.wait, self._every_s)
                finally:
                    client.close()
            except SlipstreamError as error:
                self.error = str(error)
            await asyncio.to_thread(self._stop.wait, self._every_s)
