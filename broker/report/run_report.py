"""The state of a run for viewers and for its files."""

import logging
import time
from collections.abc import Iterable, Mapping

from slipstream.broker.ledger.book import Book
from slipstream.broker.ledger.events import (
    Dropped,
    EvalRoundClosed,
    Issued,
    LedgerEvent,
    TakenOver,
    Trained,
)
from slipstream.broker.ledger.scoring_queue import ScoringQueue
from slipstream.broker.ledger.view import account_of
from slipstream.broker.report.run_records import RunRecords
from slipstream.broker.report.telemetry import Telemetry
from slipstream.wire.messages.broker import DeadLetters, Hello
from slipstream.wire.messages.dead_letters import DeadLetter
from slipstream.wire.messages.ledger_view import LedgerView
from slipstream.wire.messages.status import RunStatus

_log = logging.getLogger(__name__)

_ITEMS_ON_FILE = 20
_LETTERS_EVERY_S = 5.0  # at most, between learner steps


class RunReport:
    """Joins the ledger, the roles' reports and the run folder."""

    def __init__(
        self,
        book: Book,
        scoring: ScoringQueue,
        telemetry: Telemetry,
        records: RunRecords,
        *,
        run_name: str,
        store_name: str = "",
        generation: int = 0,
    ) -> None:
        self._book = book
        self._scoring = scoring
        self.telemetry = telemetry
        self.records = records
        self.run_name = run_name
        self._store_name = store_name
        self._generation = generation
        self._issued_at: dict[int, float] = {}  # unix time, of groups that this process issued
        self._alarm = ""
        self._write_letters_s = 0.0  # not sooner
        self._letters: tuple[tuple[int, ...], int] = ((), 0)  # groups, and how many were forgotten

    def status(self) -> RunStatus:
        """Return the state of the run."""
        return self.telemetry.status(self._book, self._scoring)

    def dead_letters(self) -> list[DeadLetter]:
        """Return the groups that could not be answered or scored."""
        return list(self._book.state.dead_letters.values())

    def account(self, num_items: int) -> LedgerView:
        """Return the account of all items, with the ``num_items`` oldest listed."""
        return account_of(
            self._book,
            self._scoring,
            run_name=self.run_name,
            store=self._store_name,
            generation=self._generation,
            issued_at=self._issued_at,
            num_items=num_items,
            now=time.time(),
        )

    def hello(self, hello: Hello) -> None:
        """Record a connection and its packages."""
        self.telemetry.hello(hello)
        if hello.packages:
            self.records.packages(self.telemetry.versions)

    def events(self, events: Iterable[LedgerEvent]) -> None:
        """Record events of items."""
        for event in events:
            match event:
                case Issued(group_id=group_id):
                    self._issued_at[group_id] = time.time()
                case Dropped(group_id=group_id):
                    self._issued_at.pop(group_id, None)
                case Trained(version=version):
                    trained = self._book.state.history.get(version.step - 1)
                    for group_id, _ in trained.groups if trained is not None else ():
                        self._issued_at.pop(group_id, None)
                case EvalRoundClosed() | TakenOver():
                    groups = self._book.groups
                    self._issued_at = {i: at for i, at in self._issued_at.items() if i in groups}
                    self.records.evaluations(self._book.state.eval_points)
                case _:
                    pass
        if time.monotonic() >= self._write_letters_s:
            self._record_letters()

    def _record_letters(self) -> None:
        """Record the dead letters where they have changed; there may be megabytes of them."""
        state = self._book.state
        letters = tuple(state.dead_letters), state.letters_forgotten
        if letters == self._letters:
            return
        self._letters = letters
        self._write_letters_s = time.monotonic() + _LETTERS_EVERY_S
        found = tuple(sorted(self.dead_letters(), key=lambda letter: letter.group_id))
        self.records.dead_letters(
            DeadLetters(letters=found, total=len(found), forgotten=state.letters_forgotten)
        )

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a trained step."""
        point = self.telemetry.step(step, dict(metrics))
        status = self.status()
        alarm = status.survivorship.alarm
        if alarm and not self._alarm:  # once for as long as the meter is past its threshold
            _log.warning("%s", alarm)
        self._alarm = alarm
        self._record_letters()
        self.records.step(point, status, self.account(_ITEMS_ON_FILE))

    def went_back(self, step: int) -> None:
        """Forget steps that a take-over undid."""
        self.telemetry.went_back(step)
        self.records.went_back(step)

    def close(self) -> None:
        """Record the run's outcome."""
        self._record_letters()
        self.telemetry.outcome = "finished" if self._book.finished else "stopped"
        self.records.close(self.status(), self.account(_ITEMS_ON_FILE))
