"""Rounds of evaluation: what they take, when they end, and what restarts do to them."""

import pytest

from slipstream.broker.ledger.admission import NotYet
from slipstream.broker.ledger.view import describe_wait
from tests.support.begun_ledgers import V0, begun, evaluated_ledger, score, trained_steps
from tests.support.ledger_driver import (
    LEASE_S,
    eval_plan,
    generate,
    header,
    lease,
    make_ready,
    reward,
    submit,
    train_step,
)

# ---- evaluation --------------------------------------------------------------


def test_an_evaluation_takes_no_permit_and_goes_before_new_prompts():
    ledger = evaluated_ledger(num_problems=2)
    granted = lease(ledger)
    assert [(g.item, g.prompt.prompt, g.siblings) for g in granted] == [
        ("eval", "held out 0", (0,)),
        ("eval", "held out 1", (0,)),
        ("train", "train 0", (0, 1)),
    ]
    assert ledger.issuing.permits(V0) == 0
    assert (ledger.book.state.issued, ledger.book.unaccounted()) == (1, 0)


def test_the_last_answer_closes_the_round_and_a_dropped_problem_is_not_a_wrong_answer():
    ledger = evaluated_ledger(num_problems=3)
    first, second, third, _ = lease(ledger)
    for group in (first, second):
        generate(ledger, group)
    reward(ledger, first.group_id, [1.0])
    reward(ledger, second.group_id, [0.0])
    assert ledger.book.state.eval_points == []
    for attempt in range(3):
        lease_id = third.lease_id if attempt == 0 else lease(ledger, max_sequences=1)[0].lease_id
        ledger.release("generator-0", lease_id, "failed")
    (point,) = ledger.book.state.eval_points
    overall = point.overall
    assert (point.step, point.mean, overall.num_answers, overall.num_dropped) == (0, 0.5, 2, 1)
    assert point.versions == (V0,)
    assert ledger.book.state.dropped == {}
    assert ledger.book.state.eval_rounds == {}


def test_a_round_waits_for_a_generator_with_the_weights_of_its_step():
    ledger = evaluated_ledger(num_problems=1)
    problem, group = lease(ledger)
    make_ready(ledger, [problem, group])
    train_step(ledger)
    assert not ledger.book.finished
    assert lease(ledger, adopted=V0) == []
    (last,) = lease(ledger)
    assert (last.item, ledger.book.groups[last.group_id].eval_step) == ("eval", 1)
    assert isinstance(ledger.training.deliver(ledger.book.version), NotYet)
    make_ready(ledger, [last])
    assert ledger.book.finished
    assert [point.step for point in ledger.book.state.eval_points] == [0, 1]


def test_every_sample_of_a_problem_counts_and_belongs_to_one_item():
    ledger = evaluated_ledger(num_problems=1, samples=4, temperature=1.0)
    problem, _ = lease(ledger)
    assert (problem.item, problem.siblings) == ("eval", (0, 1, 2, 3))
    generate(ledger, problem)
    reward(ledger, problem.group_id, [1.0, 0.0, 0.0])
    assert ledger.book.state.eval_points == []
    score(ledger, problem.group_id, 3, reward=1.0)
    metrics = ledger.book.state.eval_points[0].overall.metrics
    assert (metrics["mean@4"], metrics["pass@1"], metrics["pass@4"]) == (0.5, 0.5, 1.0)
    assert metrics["pass@2"] == pytest.approx(1 - 1 / 6)


def test_a_round_that_needs_many_lanes_waits_for_them_and_is_not_starved():
    ledger = begun(group_size=2, total_steps=9, plan=eval_plan(1, samples=4, temperature=1.0))
    assert lease(ledger, max_sequences=3) == [], "training took the lanes that the round needs"
    (problem,) = lease(ledger, max_sequences=4)
    assert (problem.item, len(problem.siblings)) == ("eval", 4)
    ledger.release("generator-0", problem.lease_id, "failed")
    assert lease(ledger, max_sequences=2) == []
    assert lease(ledger, max_sequences=4)[0].item == "eval"


def test_leases_that_lapse_together_may_end_the_run_between_them():
    ledger = evaluated_ledger(num_problems=2, total_steps=9, target=0.0)
    first, second, _ = lease(ledger)
    generate(ledger, first)
    for _ in range(2):  # the second problem is at its last attempt
        lease_id = next(
            i for i, one in ledger.book.leases.items() if one.group_id == second.group_id
        )
        ledger.release("generator-0", lease_id, "failed")
        lease(ledger)
    reward(ledger, first.group_id, [1.0])
    assert len(ledger.book.leases) == 2
    assert ledger.expire(1_000.0) == 2
    assert "eval.target" in ledger.book.state.stop_reason
    assert (ledger.book.leases, ledger.book.groups, ledger.book.unaccounted()) == ({}, {}, 0)


def test_drops_in_a_row_are_counted_until_a_group_can_be_trained():
    ledger = begun(groups_per_step=1, total_steps=9)
    for _ in range(3):
        (group,) = lease(ledger, max_sequences=2)
        generate(ledger, group)
        reward(ledger, group.group_id, [1.0, 1.0])
    assert ledger.book.state.drops_in_a_row == 3
    said = "; the last 3 groups were all dropped (zero_variance: 3)"
    assert describe_wait(ledger.book, ()).endswith(said)
    make_ready(ledger, lease(ledger, max_sequences=2))
    assert ledger.book.state.drops_in_a_row == 0


# ---- events ------------------------------------------------------------------


def test_a_problem_answered_by_abandoned_weights_is_answered_anew():
    ledger = begun(total_steps=9, groups_per_step=1, plan=eval_plan(1, every_steps=1, samples=2))
    trained_steps(ledger, 1)
    problem = next(group for group in lease(ledger) if group.item == "eval")
    train_step(ledger)
    submit(ledger, header(problem.group_id, 0, ledger.book.version))
    ledger.training.take_over(1)
    (again,) = [group for group in lease(ledger) if group.item == "eval"]
    assert (again.group_id, again.siblings) == (problem.group_id, (0, 1))


def test_a_take_over_does_not_open_an_open_round_again():
    ledger = evaluated_ledger(num_problems=2)
    lease(ledger)
    ledger.training.take_over(0)
    ledger.release_all("generator-0", "restarted")
    evals = [group for group in lease(ledger) if group.item == "eval"]
    make_ready(ledger, evals)
    assert len(evals) == 2
    assert ledger.book.state.eval_points[0].overall.num_answers == 2


# ---- memory ------------------------------------------------------------------


def test_held_out_answers_that_wait_for_rewards_are_bounded_and_the_round_still_ends():
    ledger = begun(
        total_steps=1,
        groups_per_step=1,
        max_staleness_steps=0,
        max_in_flight=3,
        plan=eval_plan(40, samples=2),
    )  # an evaluation at step 0: 40 problems of 2 answers
    answered: list[int] = []

    def answer_all() -> None:
        while (groups := lease(ledger, max_sequences=2)) and groups[0].item == "eval":
            generate(ledger, groups[0])
            answered.append(groups[0].group_id)

    answer_all()
    assert len(answered) == 3  # max_in_flight groups of group_size answers
    for _ in range(40):
        reward(ledger, answered.pop(0), [0.0, 1.0])
        answer_all()
    assert [point.step for point in ledger.book.state.eval_points] == [0]


def test_a_generator_with_many_lanes_is_given_no_more_held_out_problems_than_fit():
    ledger = begun(groups_per_step=1, max_staleness_steps=0, max_in_flight=3, plan=eval_plan(40))
    groups = [one for one in lease(ledger, max_sequences=80) if one.item == "eval"]
    assert len(groups) == 3 * ledger.book.rules.group_size
    ledger.expire(LEASE_S + 1.0)
    again = [one for one in lease(ledger, max_sequences=80, now_s=20.0) if one.item == "eval"]
    assert sorted(one.group_id for one in again) == sorted(one.group_id for one in groups)
    ledger = begun(
        groups_per_step=1,
        max_staleness_steps=0,
        max_in_flight=8,
        high_water_bytes=100,
        plan=eval_plan(4),
    )
    (first,) = [one for one in lease(ledger, max_sequences=1) if one.item == "eval"]
    submit(ledger, header(first.group_id, 0, ledger.book.version, lease_id=first.lease_id), 200)
    assert [one for one in lease(ledger, max_sequences=80) if one.item == "eval"] == []
    reward(ledger, first.group_id, [1.0])
    ledger.book.state.untrained_bytes += 200  # others have filled it
    assert len([one for one in lease(ledger, max_sequences=80) if one.item == "eval"]) == 1
