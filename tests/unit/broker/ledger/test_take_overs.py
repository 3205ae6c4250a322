"""A learner at the ledger: batches, commits, take-overs, epochs and steps back."""

import pytest

from slipstream.broker.ledger.admission import NotYet
from slipstream.wire.errors import RefusedError
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.begun_ledgers import V0, begun, delivered, in_flight, leased, trained_steps
from tests.support.ledger_driver import (
    header,
    lease,
    make_ledger,
    make_ready,
    make_rules,
    reward,
    stored,
    submit,
    train_step,
)

# ---- the learner -------------------------------------------------------------


def test_a_batch_asked_for_ahead_is_answered_though_the_commit_came_meanwhile():
    ledger = begun()
    make_ready(ledger, lease(ledger, max_sequences=8))
    ledger.training.deliver(V0)
    ledger.training.commit(V0.next(), {})
    batch = ledger.training.deliver(V0, step=1)
    assert batch == ledger.training.deliver(V0.next(), step=1)
    with pytest.raises(RefusedError, match=r"the learner is at v1\.0"):
        ledger.training.deliver(V0, step=0)
    with pytest.raises(RefusedError, match=r"the learner is at v1\.0"):
        ledger.training.deliver(V0, step=2)


def test_no_batch_names_the_groups_that_have_to_get_ready():
    ledger = begun()
    granted = lease(ledger, max_sequences=4)
    make_ready(ledger, granted[:1])
    not_yet = ledger.training.deliver(V0)
    assert not_yet == NotYet(missing=1)
    assert ledger.training.waiting_for(not_yet) == (1,)


def test_repeated_commit_counts_once():
    ledger = begun()
    trained_steps(ledger, 1)
    ledger.training.commit(PolicyVersion(1, 1), {})
    assert (ledger.book.step, ledger.book.state.trained) == (1, 2)


def test_a_commit_of_what_was_never_delivered_is_refused():
    ledger = begun()
    make_ready(ledger, lease(ledger))
    with pytest.raises(RefusedError, match="commit of step 0, which was never delivered"):
        ledger.training.commit(PolicyVersion(1, 1), {})
    assert ledger.book.step == 0


def test_each_take_over_grants_the_next_epoch_and_a_learner_at_another_step_is_refused():
    ledger = make_ledger()
    assert ledger.training.take_over(0) == PolicyVersion(1, 0)
    assert ledger.training.take_over(0) == PolicyVersion(2, 0)
    with pytest.raises(RefusedError, match="holds step 4, this run is at step 0"):
        ledger.training.take_over(4)


def test_a_batch_that_three_learners_have_not_finished_becomes_dead_letters():
    ledger = begun()
    make_ready(ledger, lease(ledger, max_sequences=4))
    batch = ledger.training.deliver(ledger.book.version)
    assert isinstance(batch, list)
    ids = [one.group_id for one in batch]
    for end in range(3):
        again = ledger.training.deliver(ledger.book.version)
        assert isinstance(again, list)
        assert [one.group_id for one in again] == ids, "as it was"
        ledger = make_ledger(ledger.book.rules, state=stored(ledger.book.state))  # it ends, too
        ledger.training.take_over(0, learner=f"learner@{end}")
    letters = stored(ledger.book.state).dead_letters
    assert {one.group_id for one in batch} == set(letters)
    assert {one.reason for one in letters.values()} == {"unfinished"}
    reasons = [failure.reason for failure in letters[batch[0].group_id].failures]
    assert reasons == ["it ended while it trained step 0"] * 3
    assert letters[batch[0].group_id].failures[1].by == "learner"
    assert ledger.book.state.cut_off == {}
    make_ready(ledger, lease(ledger, max_sequences=4))
    again = ledger.training.deliver(ledger.book.version)
    assert isinstance(again, list)
    assert not {one.group_id for one in again} & set(letters)
    train_step(ledger)


def test_a_learner_that_had_no_batch_or_finished_it_or_left_in_order_counts_for_none():
    ledger = begun(total_steps=9)
    make_ready(ledger, lease(ledger, max_sequences=8))
    ledger.training.deliver(ledger.book.version)
    ledger.training.leave(is_stopped=True)
    ledger.training.take_over(0)  # the one before left in order, and this one asks for nothing
    ledger.training.take_over(0)
    assert ledger.book.state.cut_off == {}
    ledger.training.deliver(ledger.book.version)
    ledger.training.take_over(0)
    assert ledger.book.state.cut_off == {0: 1}
    train_step(ledger)
    ledger.training.take_over(1)
    assert ledger.book.state.cut_off == {}


def test_a_take_over_that_arrives_twice_is_granted_once():
    ledger = make_ledger(make_rules(total_steps=9))
    version = ledger.training.take_over(0, learner="learner@a1")
    trained_steps(ledger, 2)
    assert ledger.training.take_over(0, learner="learner@a1") == version
    assert ledger.book.step == 2
    assert ledger.training.take_over(0, learner="learner@b2") == PolicyVersion(2, 0)


def test_a_learner_of_an_older_epoch_is_refused_everywhere():
    ledger = begun()
    make_ready(ledger, lease(ledger))
    ledger.training.deliver(V0)
    ledger.training.take_over(0)
    with pytest.raises(RefusedError, match=r"the learner is at v1\.0, the run at v2\.0"):
        ledger.training.deliver(V0)
    with pytest.raises(RefusedError, match=r"the learner is at v1\.0, the run at v2\.0"):
        ledger.training.commit(PolicyVersion(1, 1), {})


def test_work_of_an_older_epoch_is_accepted_while_its_weights_are_ancestors():
    ledger, group = leased()
    assert ledger.training.take_over(0) == PolicyVersion(2, 0)
    assert submit(ledger, header(group.group_id, 0, V0))
    assert submit(ledger, header(group.group_id, 1, V0, PolicyVersion(2, 0)))


def test_what_abandoned_weights_sampled_is_dropped_refused_and_replaced():
    ledger = begun(total_steps=9)
    make_ready(ledger, lease(ledger, max_sequences=6))  # the third group waits
    train_step(ledger)
    late = lease(ledger)
    submit(ledger, header(late[0].group_id, 0, ledger.book.version))
    assert len(late) == 3
    version = ledger.training.take_over(0)
    assert ledger.book.state.dropped == {"orphaned": 3}
    assert (ledger.book.state.trained, ledger.book.free_step) == (0, 1)
    with pytest.raises(RefusedError, match="has ended"):
        submit(ledger, header(late[1].group_id, 0, PolicyVersion(1, 1)))
    assert [g.group_id for g in train_step(ledger)] == [0, 1]
    assert 2 in ledger.book.groups, "what ancestors sampled stays"
    assert ledger.book.version == version.next()
    assert len(lease(ledger)) == 3
    assert ledger.book.unaccounted() == 0


def test_a_sibling_with_a_token_of_abandoned_weights_is_answered_again():
    ledger = begun(total_steps=9, max_staleness_steps=2)
    first, second, straggler = lease(ledger, max_sequences=6)
    make_ready(ledger, [first, second])
    train_step(ledger)
    ledger.training.take_over(0)
    mixed = header(straggler.group_id, 0, V0, PolicyVersion(1, 1), lease_id=straggler.lease_id)
    with pytest.raises(RefusedError, match=r"v1\.1, which v2\.0 does not descend from"):
        submit(ledger, mixed)
    assert ledger.book.state.ended_leases == {"orphaned": 1}
    (again, *_) = lease(ledger, "generator-1")
    assert (again.group_id, again.siblings) == (straggler.group_id, (0, 1))
    assert ledger.book.groups[straggler.group_id].attempts == 0


# ---- going back --------------------------------------------------------------


def test_recorded_batches_are_delivered_again_as_they_were():
    ledger = begun(total_steps=9)
    batches = trained_steps(ledger, 4)
    before = dict(ledger.book.state.staleness)
    _, released = ledger.drain()
    assert released == [], "no checkpoint holds these steps"
    ledger.training.take_over(1, "step-1")
    assert (ledger.book.state.trained, ledger.book.in_flight()["delivered"]) == (2, 6)
    assert trained_steps(ledger, 3) == batches[1:]
    assert ledger.book.state.staleness == before
    assert ledger.book.state.redelivered_steps == 3
    assert (ledger.book.step, ledger.book.unaccounted()) == (4, 0)


def test_a_checkpoint_seals_its_steps_and_lets_their_payloads_go():
    ledger = begun(total_steps=9)
    trained_steps(ledger, 3)
    ledger.drain()
    ledger.training.seal(ledger.book.version, 2, oldest_kept=1)
    ledger.training.seal(ledger.book.version, 2, oldest_kept=1)
    events, released = ledger.drain()
    assert [type(event).__name__ for event in events] == ["Sealed"]
    assert sorted(released) == [(group, sibling) for group in range(4) for sibling in (0, 1)]
    assert (ledger.book.state.sealed, ledger.book.state.trained) == (4, 6)
    with pytest.raises(RefusedError, match="knows its batches from step 1 on"):
        ledger.training.take_over(0)
    ledger.training.take_over(1)
    assert (ledger.book.state.sealed, ledger.book.state.trained) == (2, 2)
    assert ledger.book.state.requeued == 2, "the payloads of step 1 are gone"
    assert list(ledger.book.state.batches) == [2]
    requeued = lease(ledger, max_sequences=4)
    assert [group.prompt.prompt for group in requeued] == ["train 2", "train 3"]


def test_past_the_replay_budget_the_oldest_steps_are_generated_again():
    ledger = begun(total_steps=6, replay_budget_bytes=100)
    for _ in range(3):
        for group in lease(ledger):
            for sibling in group.siblings:
                one = header(group.group_id, sibling, ledger.book.version)
                submit(ledger, one, num_bytes=20)
            reward(ledger, group.group_id, [0.0, 1.0])
        train_step(ledger)
    assert (list(ledger.book.state.replay), ledger.book.state.replay_bytes) == ([2], 80)
    ledger.training.take_over(0)
    state = ledger.book.state
    assert (state.requeued, list(state.batches), ledger.book.free_step) == (4, [2], 0)
    while not ledger.book.finished:
        trained_steps(ledger, 1)
    assert (ledger.book.state.trained, ledger.book.unaccounted()) == (12, 0)
    assert ledger.book.state.dropped == {"orphaned": 2}, "sampled by step 2, which was abandoned"
    assert set(ledger.book.state.staleness) <= {0, 1}


def test_the_next_batch_may_be_bound_while_this_one_trains():
    ledger = begun(total_steps=9)
    make_ready(ledger, lease(ledger))
    now, following = delivered(ledger, V0), delivered(ledger, V0, 1)
    assert [g.group_id for g in [*now, *following]] == [0, 1, 2, 3]
    with pytest.raises(RefusedError, match="batch of step 2 asked for by a learner at"):
        ledger.training.deliver(V0, 2)
    assert lease(ledger) == [], "nothing sampled by v1.0 may be trained at step 2"
    version = ledger.training.take_over(0)
    assert [g.group_id for g in train_step(ledger)] == [0, 1]
    assert [g.group_id for g in train_step(ledger)] == [2, 3]
    assert ledger.book.version == PolicyVersion(version.epoch, 2)


def test_a_rejected_batch_drops_what_is_named_and_the_others_wait_again():
    ledger = begun(total_steps=9)
    make_ready(ledger, lease(ledger, max_sequences=4))
    ledger.training.deliver(V0)
    ledger.training.reject_batch(V0, 0, "invalid", [1])
    ledger.training.reject_batch(V0, 0, "invalid", [1])
    assert ledger.book.state.dropped == {"invalid": 1}
    assert in_flight(ledger) == {"ready": 1}
    make_ready(ledger, lease(ledger, max_sequences=2))
    assert [g.group_id for g in train_step(ledger)] == [0, 2]
    assert ledger.book.unaccounted() == 0


def test_a_reject_leaves_the_batch_after_it_where_it_is():
    ledger = begun(total_steps=3)
    make_ready(ledger, lease(ledger))
    ledger.training.deliver(V0)
    ledger.training.deliver(V0, 1)
    ledger.training.reject_batch(V0, 0, "nonfinite", [0, 1])
    assert (ledger.book.state.dropped, ledger.book.free_step) == ({"nonfinite": 2}, 0)
    make_ready(ledger, lease(ledger, max_sequences=4))
    assert [g.group_id for g in train_step(ledger)] == [4, 5]
    assert [g.group_id for g in train_step(ledger)] == [2, 3]
