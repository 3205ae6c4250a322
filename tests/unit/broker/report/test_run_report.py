from typing_extensions import override

from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.scoring_queue import ScoringQueue
from slipstream.broker.report.run_records import RunRecords
from slipstream.broker.report.run_report import RunReport
from slipstream.broker.report.telemetry import Telemetry
from slipstream.wire.messages.broker import DeadLetters
from slipstream.wire.settings.sections import RunSection
from tests.support.ledger_driver import (
    lease,
    make_ledger,
    make_ready,
    train_step,
    with_a_dead_letter,
)


def report_of(ledger: Ledger) -> RunReport:
    telemetry = Telemetry(RunSection(name="a"))
    return RunReport(ledger.book, ScoringQueue(lease_s=10.0), telemetry, RunRecords(), run_name="a")


def test_the_time_of_issue_is_kept_while_a_group_is_held_and_no_longer():
    ledger = make_ledger()
    report = report_of(ledger)
    for _ in range(3):
        groups = lease(ledger)
        report.events(ledger.drain()[0])
        held = {item.group_id: item.age_s for item in report.account(100).oldest}
        assert held.keys() == set(ledger.book.groups)
        assert all(age_s is not None for age_s in held.values())
        make_ready(ledger, groups)
        train_step(ledger)
        report.events(ledger.drain()[0])
        assert report._issued_at.keys() == set(ledger.book.groups), "it grows with the run"


class Kept(RunRecords):
    """Keeps what there is about dead letters."""

    def __init__(self) -> None:
        self.letters: list[DeadLetters] = []

    @override
    def dead_letters(self, letters: DeadLetters) -> None:
        self.letters.append(letters)


def test_dead_letters_are_recorded_when_they_change():
    ledger, group_id = with_a_dead_letter()
    report, kept = report_of(ledger), Kept()
    report.records = kept
    report.events(ledger.drain()[0])
    (first,) = kept.letters
    assert [letter.group_id for letter in first.letters] == [group_id]
    report.events(())
    report.close()
    assert kept.letters == [first]
