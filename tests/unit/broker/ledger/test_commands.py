"""The life of an item, one decision at a time. Random schedules are in tests/property."""

import msgspec
import pytest

from slipstream.broker.ledger.events import LeaseEnd
from slipstream.wire.errors import RefusedError
from slipstream.wire.messages.trajectory import VersionRun
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.begun_ledgers import V0, begun, delivered, in_flight, leased, started
from tests.support.ledger_driver import (
    LEASE_S,
    RESPONSE_TOKENS,
    generate,
    header,
    lease,
    make_ledger,
    make_ready,
    reward,
    submit,
    train_step,
)

# ---- the life cycle ----------------------------------------------------------


def test_a_group_goes_from_leased_to_trained_and_every_state_counts_it_once():
    ledger = begun(groups_per_step=1, total_steps=1)
    (group,) = lease(ledger)
    assert group.siblings == (0, 1)
    assert group.prompt.prompt == "train 0"
    assert in_flight(ledger) == {"leased": 1}
    generate(ledger, group)
    assert in_flight(ledger) == {"generated": 1}
    assert ledger.book.leases == {}
    reward(ledger, group.group_id, [0.0, 1.0])
    assert in_flight(ledger) == {"ready": 1}
    batch = delivered(ledger, V0)
    assert [g.rewards for g in batch] == [[0.0, 1.0]]
    assert in_flight(ledger) == {"delivered": 1}
    ledger.training.commit(PolicyVersion(1, 1), {})
    assert (in_flight(ledger), ledger.book.state.trained, ledger.book.state.issued) == ({}, 1, 1)
    assert ledger.book.state.staleness == {0: 2 * RESPONSE_TOKENS}
    assert ledger.book.finished
    assert ledger.training.deliver(ledger.book.version) is None


def test_work_needs_a_learner_and_weights_of_its_epoch():
    ledger = make_ledger()
    assert lease(ledger, adopted=V0) == []
    started(ledger)
    assert len(lease(ledger, adopted=V0, max_sequences=2)) == 1
    started(ledger)
    assert lease(ledger, adopted=V0) == []
    assert len(lease(ledger, adopted=PolicyVersion(2, 0), max_sequences=2)) == 1


def test_a_lease_takes_whole_groups_that_fit_into_the_free_lanes():
    ledger = begun(group_size=3)
    assert [g.group_id for g in lease(ledger, max_sequences=8)] == [0, 1]
    assert lease(ledger, max_sequences=2) == []


def test_generators_share_what_there_is_and_whoever_asks_again_gets_more():
    ledger = begun(groups_per_step=6, max_staleness_steps=0)
    assert len(lease(ledger, "generator-0", num_sharing=4)) == 2  # of 6
    assert len(lease(ledger, "generator-1", num_sharing=4)) == 1  # of 4
    assert len(lease(ledger, "generator-2", num_sharing=4)) == 1  # of 3
    assert [len(lease(ledger, "generator-3", num_sharing=4)) for _ in range(3)] == [1, 1, 0]


# ---- leases that end ---------------------------------------------------------


def test_a_lapsed_lease_is_granted_again_for_the_missing_siblings_only():
    ledger = begun(group_size=3)
    (group,) = lease(ledger, max_sequences=3)
    submit(ledger, header(group.group_id, 1, V0))
    assert ledger.expire(LEASE_S) == 0
    assert ledger.expire(LEASE_S + 0.1) == 1
    assert in_flight(ledger) == {"issued": 1}
    (again,) = lease(ledger, "generator-1", max_sequences=2)
    assert (again.group_id, again.siblings) == (group.group_id, (0, 2))
    assert again.lease_id != group.lease_id
    assert ledger.book.state.ended_leases == {"lapsed": 1}
    assert ledger.book.state.restarted_trajectories == 2


def test_a_heartbeat_keeps_a_lease_and_names_the_ones_that_are_lost():
    ledger = begun()
    first, second = lease(ledger, max_sequences=4)
    ids = (first.lease_id, second.lease_id, 99)
    assert ledger.heartbeat("generator-0", ids[:1] + ids[2:], now_s=5.0) == [99]
    assert ledger.heartbeat("generator-1", ids[:1], now_s=100.0) == [first.lease_id]
    assert ledger.expire(LEASE_S + 1.0) == 1
    assert list(ledger.book.leases) == [first.lease_id]


def test_handing_back_is_for_the_holder_only():
    ledger = begun()
    first, second = lease(ledger, max_sequences=4)
    ledger.release("generator-1", first.lease_id, "failed")
    assert len(ledger.book.leases) == 2
    ledger.release("generator-0", first.lease_id, "failed", "its world has ended")
    assert list(ledger.book.leases) == [second.lease_id]
    assert [one.reason for one in ledger.book.groups[first.group_id].failures] == [
        "its lease of generation failed: its world has ended"
    ]
    ledger.release_all("generator-0", "restarted")
    assert ledger.book.leases == {}
    assert ledger.book.state.ended_leases == {"failed": 1, "restarted": 1}


def test_unfinished_group_is_dropped_after_max_attempts_and_replaced():
    ledger = begun(groups_per_step=1, max_staleness_steps=0)
    for attempt in range(3):
        now = attempt * 100.0
        (group,) = lease(ledger, now_s=now)
        assert group.group_id == 0
        ledger.expire(now + 50.0)
    assert ledger.book.state.dropped == {"poison": 1}
    assert ledger.book.unaccounted() == 0
    assert [g.prompt.prompt for g in lease(ledger)] == ["train 1"]


def test_a_lapsed_group_waits_for_a_generator_at_least_as_new_as_its_first():
    ledger = begun(max_staleness_steps=2)
    make_ready(ledger, lease(ledger, max_sequences=4))
    train_step(ledger)
    (group,) = lease(ledger, max_sequences=2)
    ledger.release("generator-0", group.lease_id, "failed")
    behind = lease(ledger, adopted=V0, max_sequences=2)
    assert [g.group_id for g in behind] == [group.group_id + 1]
    (again,) = lease(ledger, max_sequences=2)
    assert again.group_id == group.group_id


# ---- what generators send ----------------------------------------------------


def test_the_answer_of_a_lapsed_lease_is_taken_once_and_completes_the_group():
    ledger, group = leased()
    ledger.expire(LEASE_S + 1.0)
    (again,) = lease(ledger, "generator-1", max_sequences=2)
    assert submit(ledger, header(group.group_id, 0, V0))
    assert submit(ledger, header(group.group_id, 1, V0))
    assert ledger.book.leases == {}
    assert not submit(ledger, header(again.group_id, 0, V0))
    assert set(ledger.book.groups[group.group_id].headers) == {0, 1}
    assert in_flight(ledger) == {"generated": 1}


def test_a_trajectory_of_a_group_that_ended_or_outside_its_group_is_refused():
    ledger, group = leased()
    with pytest.raises(RefusedError, match="group 7 has ended"):
        submit(ledger, header(7, 0, V0))
    with pytest.raises(RefusedError, match="sibling 2 of a group of 2"):
        submit(ledger, header(group.group_id, 2, V0))


def test_tokens_older_than_the_admission_or_newer_than_the_learner_are_refused():
    ledger = begun()
    make_ready(ledger, lease(ledger, max_sequences=4))
    train_step(ledger)
    (group,) = lease(ledger, max_sequences=2)
    with pytest.raises(RefusedError, match=r"token chosen by v1\.0.*admitted at v1\.1"):
        submit(ledger, header(group.group_id, 0, V0, PolicyVersion(1, 1)))
    with pytest.raises(RefusedError, match=r"token of v1\.2, the learner is at v1\.1"):
        submit(ledger, header(group.group_id, 0, PolicyVersion(1, 1), PolicyVersion(1, 2)))


# ---- limits ------------------------------------------------------------------


def test_drop_mode_lets_go_of_what_is_past_its_deadline_and_takes_other_prompts():
    ledger = begun(total_steps=9, max_staleness_steps=1, reserves=False, max_in_flight=6)
    granted = lease(ledger)
    assert len(granted) == 6, "nothing is reserved"
    make_ready(ledger, granted[:4])
    train_step(ledger)
    assert ledger.book.state.dropped == {}
    train_step(ledger)
    assert ledger.book.state.dropped == {"stale": 2}
    lost = ledger.heartbeat("generator-0", [g.lease_id for g in granted[4:]], now_s=0.0)
    assert len(lost) == 2, "their generator learns of it"
    assert [g.prompt.prompt for g in lease(ledger)] == [f"train {i}" for i in range(6, 12)]
    assert ledger.book.unaccounted() == 0


def test_past_the_high_water_no_more_groups_are_started_than_one_step_needs():
    ledger = begun(max_staleness_steps=3, total_steps=9, high_water_bytes=100)
    (group,) = lease(ledger, max_sequences=2)
    submit(ledger, header(group.group_id, 0, V0), num_bytes=101)
    assert len(lease(ledger)) == 1


def test_attempts_that_were_handed_back_are_not_called_poison():
    ledger = begun()
    for _ in range(3):
        (group,) = lease(ledger, max_sequences=2)
        ledger.release("generator-0", group.lease_id, "failed")
    assert ledger.book.state.dropped == {"lease_exhausted": 1}


def test_leaving_or_losing_the_grant_costs_no_attempt():
    ledger = begun(max_attempts=1)
    lease(ledger, max_sequences=4)
    ledger.release_all("generator-0", "lost", keep=[0])
    ledger.release("generator-0", 0, "stranded")
    assert [g.group_id for g in lease(ledger, max_sequences=4)] == [1, 0]
    ledger.release_all("generator-0", "left")
    assert ledger.book.state.dropped == {}
    assert [g.group_id for g in lease(ledger, max_sequences=4)] == [1, 0]


@pytest.mark.parametrize("ends", [["stranded"] * 20, ["failed", *["stranded"] * 10]])
def test_a_group_that_is_stranded_again_and_again_ends(ends: list[LeaseEnd]):
    """A trajectory that kills its environment server had its prompt begun anew for ever."""
    ledger = begun(max_attempts=2)
    for reason in ends:
        assert ledger.book.state.dropped == {}
        (group,) = lease(ledger, max_sequences=2)
        ledger.release("generator-0", group.lease_id, reason, "its server is lost")
    assert ledger.book.state.dropped == {"lease_exhausted": 1}
    letter = ledger.book.state.dead_letters[group.group_id]
    assert letter.failures[-1].reason == "its lease of generation stranded: its server is lost"


def test_each_token_counts_under_the_staleness_of_the_version_that_chose_it():
    ledger = begun(max_staleness_steps=1, groups_per_step=1)
    first, second = lease(ledger)
    make_ready(ledger, [first])
    train_step(ledger)
    newer = PolicyVersion(1, 1)
    runs = (VersionRun(2, V0), VersionRun(5, newer))
    mixed = msgspec.structs.replace(
        header(second.group_id, 0, V0, newer, lease_id=second.lease_id), version_runs=runs
    )
    submit(ledger, mixed)
    submit(ledger, header(second.group_id, 1, newer))
    reward(ledger, second.group_id, [0.0, 1.0])
    train_step(ledger)
    assert ledger.book.state.staleness == {0: 2 * RESPONSE_TOKENS + 5 + RESPONSE_TOKENS, 1: 3}
