"""One book over leases of generation and of scoring."""

from collections import Counter

import pytest

from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.lease_book import LeaseBook
from slipstream.broker.ledger.scoring_queue import ScoringQueue
from slipstream.wire.messages.broker import GroupsLeased, LeasedGroup, ScoringItem, ScoringLeased
from slipstream.wire.messages.trajectory import Score
from tests.support.ledger_driver import LEASE_S, header, lease, make_ledger

WORKER, GENERATOR = "worker@1", "generator-0@1"


class Parts:
    """A book with one group leased to a generator."""

    def __init__(self) -> None:
        self.ledger: Ledger = make_ledger()
        self.ledger.training.take_over(0)
        self.scoring = ScoringQueue(lease_s=LEASE_S)
        self.returned = Counter[str]()
        self.book = LeaseBook(self.ledger, self.scoring, on_return=self._return)
        self.group: LeasedGroup = lease(self.ledger, GENERATOR, max_sequences=2)[0]

    def _return(self) -> None:
        self.returned["returned"] += 1

    def submit(self, sibling: int) -> None:
        version = self.ledger.book.version
        sent = header(self.group.group_id, sibling, version, lease_id=self.group.lease_id)
        self.book.submit(GENERATOR, sent, 10)

    def lease_scoring(self, holder: str = WORKER, *, whole: bool = False) -> dict[int, int]:
        leased = self.book.lease_scoring(holder, 8, now_s=0.0, whole_groups=whole)
        return {sibling: lease_id for lease_id, (_, sibling) in leased.items()}

    def score(self, sibling: int, lease_id: int, reward: float | None) -> Score:
        unavailable = "" if reward is not None else "it broke"
        return Score(
            group_id=self.group.group_id,
            sibling=sibling,
            lease_id=lease_id,
            reward=reward,
            unavailable=unavailable,
        )

    @property
    def failures(self) -> list[str]:
        group = self.ledger.book.groups[self.group.group_id]
        return [failure.reason for failure in group.failures]


@pytest.fixture
def parts() -> Parts:
    return Parts()


def test_after_a_restart_everything_without_a_reward_is_queued(parts: Parts):
    parts.submit(0)
    queue = ScoringQueue(lease_s=LEASE_S)
    LeaseBook(parts.ledger, queue).restarted(0.0)
    assert queue.num_waiting == 1


def test_a_heartbeat_extends_leases_of_both_kinds_and_names_what_is_lost(parts: Parts):
    parts.submit(0)
    (scoring_lease,) = parts.lease_scoring(GENERATOR).values()
    held = (parts.group.lease_id, scoring_lease, 77)
    assert parts.book.extend(GENERATOR, held, now_s=LEASE_S - 1.0) == (77,)
    assert parts.book.expire(LEASE_S + 1.0) == 0
    assert parts.scoring.num_leased == 1


def test_silence_ends_leases_of_both_kinds_and_costs_an_attempt_to_score(parts: Parts):
    parts.submit(0)
    parts.lease_scoring()
    assert parts.book.expire(LEASE_S + 1.0) == 1
    assert parts.scoring.num_leased == 0
    assert "the reward worker fell silent" in parts.failures
    assert parts.returned["returned"]


def test_seconds_in_which_the_broker_was_blocked_expire_nothing(parts: Parts):
    parts.submit(0)
    parts.lease_scoring()
    parts.book.postpone(5.0)
    assert parts.book.expire(LEASE_S + 4.0) == 0
    assert parts.scoring.num_leased == 1


def test_a_client_that_left_holds_nothing(parts: Parts):
    parts.submit(0)
    parts.lease_scoring(GENERATOR)
    parts.book.release_all(GENERATOR, "left")
    assert not parts.ledger.book.leases
    assert (parts.scoring.num_leased, parts.scoring.num_waiting) == (0, 1)


def test_a_new_incarnation_takes_back_what_the_old_one_held(parts: Parts):
    parts.submit(0)
    parts.lease_scoring(GENERATOR)
    parts.book.restart("generator-0@2", ())
    assert not parts.ledger.book.leases
    assert parts.failures[-1] == "the reward worker died"


def test_a_client_that_reconnects_keeps_the_generation_that_it_names(parts: Parts):
    parts.submit(0)
    parts.lease_scoring(GENERATOR)
    parts.book.restart(GENERATOR, (parts.group.lease_id,))
    assert list(parts.ledger.book.leases) == [parts.group.lease_id]
    assert parts.scoring.num_leased == 0  # what it has scored it sends again
    assert parts.failures == []


def test_an_answer_that_could_not_be_sent_grants_nothing(parts: Parts):
    parts.submit(0)
    ((sibling, lease_id),) = parts.lease_scoring().items()
    item = ScoringItem(group_id=parts.group.group_id, sibling=sibling, lease_id=lease_id)
    parts.book.undelivered(ScoringLeased(items=(item,), finished=False))
    assert (parts.scoring.num_leased, parts.scoring.num_waiting) == (0, 1)
    parts.book.undelivered(GroupsLeased(groups=(parts.group,)))
    assert not parts.ledger.book.leases


def test_a_reward_ends_the_wait_and_a_failure_prolongs_it(parts: Parts):
    parts.submit(0)
    parts.submit(1)
    leases = parts.lease_scoring()
    good, bad = parts.score(0, leases[0], 1.0), parts.score(1, leases[1], None)
    assert parts.book.accepts(WORKER, good)
    assert parts.book.accepts(WORKER, bad)
    assert not parts.book.accepts(WORKER, good)  # its lease has ended
    group = parts.book.score(good, WORKER, now_s=0.0)
    assert group is not None
    parts.book.score(bad, WORKER, now_s=0.0)
    assert set(group.scores) == {0}
    assert (parts.scoring.num_waiting, parts.scoring.num_leased) == (1, 0)
    assert parts.book.score(parts.score(7, 0, 1.0), WORKER, now_s=0.0) is None


def test_handed_back_trajectory_costs_no_attempt(parts: Parts):
    parts.submit(0)
    (lease_id,) = parts.lease_scoring().values()
    assert not parts.book.release(WORKER, lease_id)
    assert parts.book.release(WORKER, lease_id), "no lease of scoring any more"
    assert parts.scoring.num_waiting == 1
    assert parts.failures == []


def test_whole_groups_wait_until_all_is_generated(parts: Parts):
    parts.submit(0)
    assert parts.lease_scoring(whole=True) == {}
    parts.submit(1)
    assert set(parts.lease_scoring(whole=True)) == {0, 1}
