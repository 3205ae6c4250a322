"""A ledger that is restored or replayed, and what it remembers."""

import pytest

from slipstream.broker.ledger.effects import apply
from slipstream.broker.ledger.events import decode_event, encode_event
from slipstream.wire.errors import RefusedError
from slipstream.wire.messages.trajectory import Score
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.begun_ledgers import V0, begun, evaluated_ledger, started, trained_steps
from tests.support.ledger_driver import (
    LEASE_S,
    generate,
    header,
    lease,
    make_ledger,
    make_ready,
    make_rules,
    reward,
    state_of,
    stored,
    submit,
    train_step,
)

# ---- checkpoints -------------------------------------------------------------


def test_a_restored_run_asks_what_was_in_flight_again_and_skips_no_prompt():
    ledger = begun(groups_per_step=2, total_steps=4)
    trained_steps(ledger, 1)
    make_ready(ledger, lease(ledger)[:1])
    ledger.training.deliver(ledger.book.version)
    snapshot = stored(ledger.training.snapshot(ledger.book.version))
    waiting = list(snapshot.groups)
    assert waiting == [2, 3, 4, 5]

    restored = make_ledger(ledger.book.rules, stored(snapshot))
    assert restored.book.unaccounted() == 0
    assert restored.training.take_over(1) == PolicyVersion(2, 1)
    again = lease(restored)
    assert [g.group_id for g in again] == waiting
    assert [g.prompt.prompt for g in again] == [f"train {i}" for i in waiting]
    while not restored.book.finished:
        make_ready(restored, [*again, *lease(restored)])
        again = []
        train_step(restored)
    book = restored.book
    assert (book.step, book.state.issued, book.state.trained) == (4, 8, 8)
    assert set(restored.book.state.staleness) <= {0, 1}

    rebuilt = make_ledger(ledger.book.rules, stored(snapshot))
    for event in restored.drain()[0]:
        apply(rebuilt.book, decode_event(encode_event(event)))
    assert state_of(rebuilt) == state_of(restored)


def test_a_restored_run_with_a_smaller_bound_still_keeps_it():
    ledger = begun(max_staleness_steps=3, groups_per_step=1)
    lease(ledger)
    snapshot = stored(ledger.training.snapshot(V0))
    assert len(snapshot.groups) == 3
    restored = make_ledger(make_rules(max_staleness_steps=0, groups_per_step=1), snapshot)
    restored.training.take_over(0)
    assert len(lease(restored)) == 1


def test_a_restored_run_evaluates_again_what_was_not_complete_and_keeps_the_curve():
    ledger = evaluated_ledger(num_problems=1, total_steps=2, every_steps=1)
    trained_steps(ledger, 1)
    assert (
        [p.step for p in ledger.book.state.eval_points],
        list(ledger.book.state.eval_rounds),
    ) == ([0], [1])
    restored = make_ledger(ledger.book.rules, stored(ledger.training.snapshot(ledger.book.version)))
    restored.training.take_over(1)
    trained_steps(restored, 1)
    make_ready(restored, lease(restored))
    assert [p.step for p in restored.book.state.eval_points] == [0, 1, 2]
    assert restored.book.finished


# ---- events ------------------------------------------------------------------


def test_replaying_the_stored_events_rebuilds_an_equal_state():
    ledger = evaluated_ledger(num_problems=2, total_steps=3)
    problem, _, group = lease(ledger)
    make_ready(ledger, [problem, group])
    train_step(ledger)
    started(ledger)
    granted = lease(ledger)
    submit(ledger, header(granted[-1].group_id, 1, ledger.book.version))
    ledger.score(Score(group_id=granted[-1].group_id, sibling=1, lease_id=0, unavailable="slow"))
    ledger.expire(1_000.0)
    lease(ledger, "generator-1")
    events, _ = ledger.drain()

    rebuilt = make_ledger(ledger.book.rules)
    for event in events:
        read = decode_event(encode_event(event))
        assert read == event
        apply(rebuilt.book, read)
    assert state_of(rebuilt) == state_of(ledger)


def test_nothing_is_leased_and_nothing_has_ended_while_a_resumed_run_awaits_its_learner():
    ledger = begun(total_steps=1)
    trained_steps(ledger, 1)
    assert ledger.book.finished
    state = stored(ledger.book.state)
    state.awaits_learner = True
    resumed = make_ledger(ledger.book.rules, state)
    assert not resumed.book.finished
    assert lease(resumed) == []
    resumed.training.take_over(0)
    trained_steps(resumed, 1)
    assert resumed.book.finished
    assert not resumed.book.over
    resumed.training.leave()
    assert resumed.book.over


# ---- memory ------------------------------------------------------------------


def test_what_waits_for_rewards_is_counted_the_same_by_a_broker_that_takes_over():
    ledger = evaluated_ledger(num_problems=3)
    first, second = lease(ledger, max_sequences=2)
    generate(ledger, first)
    generate(ledger, second)
    reward(ledger, first.group_id, [1.0])
    assert ledger.book.index.eval_unscored == 1
    assert make_ledger(ledger.book.rules, state_of(ledger)).book.index.eval_unscored == 1
    ledger.book.restart(ledger.book.groups[second.group_id])
    assert ledger.book.index.eval_unscored == 0


def test_run_without_checkpoints_keeps_max_history_steps_and_names_the_first():
    ledger = begun(total_steps=9, groups_per_step=1, max_staleness_steps=0, max_history=4)
    for _ in range(7):
        make_ready(ledger, lease(ledger, max_sequences=2))
        train_step(ledger)
    assert sorted(ledger.book.state.history) == [3, 4, 5, 6]
    with pytest.raises(RefusedError, match="knows its batches from step 3 on"):
        ledger.training.take_over(0)
    assert ledger.training.take_over(3).step == 3


def test_time_in_which_the_broker_was_blocked_counts_in_no_lease():
    ledger = begun()
    first, second = lease(ledger, max_sequences=4, now_s=0.0)
    for tick in range(1, 8):  # late each time: every term was given anew, and nothing ever lapsed
        ledger.postpone(1.5)
        ledger.heartbeat("generator-0", [second.lease_id], now_s=tick * 2.0)
        assert ledger.expire(tick * 2.0) == 0
    ledger.heartbeat("generator-0", [second.lease_id], now_s=20.0)
    assert ledger.expire(LEASE_S + 7 * 1.5 - 0.1) == 0
    assert ledger.expire(LEASE_S + 7 * 1.5 + 0.1) == 1
    assert list(ledger.book.leases) == [second.lease_id]
    assert first.lease_id not in ledger.book.leases


def test_heartbeats_without_answers_do_not_keep_a_lease_for_ever():
    ledger = begun(max_lease_s=35.0)
    (first,) = lease(ledger, max_sequences=2, now_s=0.0)
    lost_at = {
        now: ledger.heartbeat("generator-0", [first.lease_id], now_s=now)
        for now in (8.0, 16.0, 24.0, 32.0, 40.0)
    }
    assert [now for now, lost in lost_at.items() if lost] == [40.0]
    assert ledger.expire(41.0) == 0
    assert ledger.expire(32.0 + LEASE_S + 0.1) == 1
    (again,) = lease(ledger, "generator-1", max_sequences=2, now_s=43.0)
    assert again.group_id == first.group_id
    assert ledger.heartbeat("generator-1", [again.lease_id], now_s=50.0) == []


def test_what_a_revoked_key_delivered_is_not_trained_after_a_step_back_either():
    ledger = begun(groups_per_step=2, max_staleness_steps=0)
    (stolen,) = lease(ledger, "thief/g@1", max_sequences=2)
    (honest,) = lease(ledger, "g@1", max_sequences=2)
    make_ready(ledger, [stolen, honest])
    train_step(ledger)
    assert ledger.discard_answers_of("thief") == (0, 0)
    ledger.training.take_over(0)  # its batch is recorded, and would be delivered again
    assert ledger.discard_answers_of("thief") == (0, 1)
    assert ledger.discard_answers_of("thief", takes_over=True) == (1, 0)
    assert ledger.book.state.dropped == {"revoked": 1}
    assert honest.group_id in ledger.book.groups
    assert ledger.book.unaccounted() == 0


def test_after_a_restart_of_the_broker_every_lease_has_one_full_term_again():
    before = begun()
    granted = lease(before, now_s=0.0)
    assert len(granted) > 1
    ledger = make_ledger(before.book.rules, state_of(before))
    ledger.restarted(1_000.0)
    assert ledger.expire(1_000.0 + LEASE_S) == 0
    assert ledger.book.leases.keys() == {group.lease_id for group in granted}
    assert ledger.expire(1_000.0 + LEASE_S + 0.1) == len(granted)
    assert not ledger.book.leases


def test_renewed_leases_may_be_held_for_their_whole_time_again():
    ledger = begun(max_lease_s=3 * LEASE_S)
    granted = [group.lease_id for group in lease(ledger, now_s=0.0)]
    ledger.renew_leases(1_000.0)
    for late_s in (LEASE_S, 2 * LEASE_S, 3 * LEASE_S):
        assert ledger.heartbeat("generator-0", granted, now_s=1_000.0 + late_s) == []
    assert ledger.heartbeat("generator-0", granted, now_s=1_000.1 + 3 * LEASE_S) == granted


def test_history_is_forgotten_at_a_seal_that_holds_nothing_new():
    """As where an older checkpoint was removed: what no learner can go back to is not kept."""
    ledger = begun(groups_per_step=1)
    trained_steps(ledger, 3)
    ledger.training.seal(ledger.book.version, 3, oldest_kept=0)
    assert list(ledger.book.state.history) == [0, 1, 2]
    ledger.training.seal(ledger.book.version, 3, oldest_kept=2)
    assert list(ledger.book.state.history) == [2]
    ledger.drain()
    ledger.training.seal(ledger.book.version, 3, oldest_kept=2)
    assert ledger.drain() == ([], [])
