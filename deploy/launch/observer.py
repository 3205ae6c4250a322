"""Observers of a run: one question to its broker, or its state once a second."""

import asyncio
import math
import threading
import time
from contextlib import closing
from typing import TypeVar

from slipstream.broker.client import BrokerClient
from slipstream.wire.errors import PeerLostError, SlipstreamError
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
from slipstream.wire.settings.sections import RunSection

_TIMEOUT_S = 30.0
_STOP_CHECK_S = 0.1
_NEWEST_STEPS = 100  # maximum number of steps between two requests, one second apart
A = TypeVar("A", bound=Answer)


def ask_broker(run: RunSection, request: Request, kind: type[A], *, role: Role = "observer") -> A:
    """Ask the broker of a run once; PeerLostError if none answers."""

    async def ask() -> A:
        with closing(await _connect(run, role)) as client:
            return (await client.ask(request, kind))[0]

    return asyncio.run(ask())


async def _connect(run: RunSection, role: Role) -> BrokerClient:
    if not run.broker and not run.socket("broker").exists():
        raise PeerLostError(f"no broker runs for {run.folder}; see {run.summary_file}")
    client, _ = await BrokerClient.connect(
        run.broker_endpoint,
        role=role,
        name=role,
        timeout_s=_TIMEOUT_S,
        outage_s=_TIMEOUT_S,
        key_file=run.key_file,
    )
    return client


def fetch_account(run: RunSection, num_items: int) -> LedgerView:
    """Ask the broker of a run for the account of all items; PeerLostError if none answers."""
    return ask_broker(run, GetLedger(num_items=num_items), LedgerAnswer).view


def status_now(run: RunSection) -> RunStatus:
    """Ask the broker of a run once, from a thread without an event loop."""
    return ask_broker(run, GetStatus(), StatusAnswer).status


class StatusWatcher:
    """Polls the broker of a run on its own thread; keeps the newest answer.

    The first answer holds all learner steps, later ones the newest.
    """

    def __init__(self, *, every_s: float = 1.0) -> None:
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._answer: tuple[RunStatus | None, float] = (None, time.monotonic())
        self.asked_s = -math.inf  # monotonic time when the newest answer was requested
        self.error = ""  # error of the newest attempt; empty while the broker answers

    @property
    def newest(self) -> RunStatus | None:
        """Newest answer; None before the first."""
        return self._answer[0]

    @property
    def age_s(self) -> float:
        """Age of the newest answer; before the first one, time since the start."""
        return time.monotonic() - self._answer[1]

    def start(self, run: RunSection) -> None:
        """Start asking the broker of a run."""
        self._answer = (None, time.monotonic())
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._loop(run)), name="status", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop asking: cancel an open question; a first hello has a deadline."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=_TIMEOUT_S)

    async def _loop(self, run: RunSection) -> None:
        """Use one connection until it breaks, then make another."""
        while not self._stop.is_set():
            try:
                with closing(await _connect(run, "observer")) as client:
                    while await self._ask(client):
                        await asyncio.to_thread(self._stop.wait, self._every_s)
            except SlipstreamError as error:
                self.error = str(error)
            await asyncio.to_thread(self._stop.wait, self._every_s)

    async def _ask(self, client: BrokerClient) -> bool:
        """Ask once; return False if this was stopped meanwhile."""
        asked_s = time.monotonic()
        count = _NEWEST_STEPS if self.newest is not None else -1
        question = asyncio.ensure_future(client.ask(GetStatus(newest_steps=count), StatusAnswer))
        while not question.done() and not self._stop.is_set():
            await asyncio.wait({question}, timeout=_STOP_CHECK_S)
        if not question.done():
            question.cancel()
            return False
        self._answer = (question.result()[0].status, time.monotonic())
        self.asked_s, self.error = asked_s, ""
        return not self._stop.is_set()
