"""The bound, no waste and liveness, on hand-made cases and on random schedules."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from slipstream.broker.ledger.admission import NotYet, StalenessBound, choose_batch


@dataclass
class Live:
    """A group of a simulated run."""

    deadline: int
    finish: int
    is_filtered: bool


def test_bound_zero_admits_exactly_one_step_of_groups_and_waits_for_the_new_weights():
    bound = StalenessBound(max_staleness_steps=0, groups_per_step=4)
    assert bound.permits(learner_step=0, adopted_step=0, live=0) == 4
    assert bound.permits(learner_step=0, adopted_step=0, live=4) == 0
    assert bound.permits(learner_step=1, adopted_step=0, live=0) == 0
    assert bound.permits(learner_step=1, adopted_step=1, live=0) == 4


def test_younger_groups_go_first_only_while_the_straggler_has_a_later_step_left():
    bound = StalenessBound(max_staleness_steps=1, groups_per_step=2)
    due = {5: 1, 6: 3}
    assert choose_batch(bound, learner_step=4, ready={6: 3}, due=due) == {6: 2}
    assert choose_batch(bound, learner_step=5, ready={6: 3}, due=due) == NotYet(0, overdue=5)
    assert choose_batch(bound, learner_step=5, ready={6: 3}, due=due, is_last=True) == {6: 2}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("bound_steps", "groups", "publish_lag"), [(0, 4, 2), (1, 4, 2), (4, 8, 5)]
)
def test_no_schedule_breaks_the_bound_wastes_a_group_or_stops(
    seed: int, bound_steps: int, groups: int, publish_lag: int
):
    """Groups of very different length, 30% of them filtered, weights adopted late."""
    rng = random.Random(seed)
    bound = StalenessBound(bound_steps, groups)
    booked = set(rng.sample(range(3, 90), 20)) if seed % 2 else set()
    live: list[Live] = []
    adopted, published, step, last_progress = 0, [], 0, 0
    for now in range(100_000):
        adopted = max([adopted, *(version for at, version in published if at <= now)])
        permits = bound.permits(
            learner_step=step, adopted_step=adopted, live=len(live), booked=booked
        )
        for _ in range(permits):
            length = 1 if rng.random() < 0.8 else rng.randrange(1, 60)
            live.append(Live(bound.deadline(adopted), now + length, rng.random() < 0.3))
        live = [one for one in live if not (one.is_filtered and one.finish <= now)]
        assert all(one.deadline >= step for one in live), "a group outlived its deadline"
        ready = [one for one in live if one.finish <= now]
        choice = choose_batch(
            bound,
            learner_step=step,
            ready=Counter(one.deadline for one in ready),
            due=Counter(one.deadline for one in live),
            booked=booked,
        )
        if isinstance(choice, NotYet):
            assert now - last_progress < 200, f"stuck at step {step}: {choice}"
        else:
            assert sum(choice.values()) == groups
            for deadline, count in choice.items():
                for one in [one for one in ready if one.deadline == deadline][:count]:
                    live.remove(one)
            step, last_progress = step + 1, now
            while step in booked:  # its batch is there: it takes no time
                step += 1
            published.append((now + publish_lag, step))
        if step >= 100:
            return
    pytest.fail("100 steps took too long")


def test_a_generator_with_old_weights_may_start_less():
    bound = StalenessBound(max_staleness_steps=2, groups_per_step=4)
    assert bound.permits(learner_step=3, adopted_step=3, live=5) == 7
    assert bound.permits(learner_step=3, adopted_step=2, live=5) == 3
    assert bound.permits(learner_step=3, adopted_step=1, live=5) == 0
    assert bound.permits(learner_step=3, adopted_step=0, live=0) == 0


def test_the_nearest_deadline_goes_first():
    bound = StalenessBound(max_staleness_steps=2, groups_per_step=2)
    counts = {6: 2, 5: 1}
    assert choose_batch(bound, learner_step=4, ready=counts, due=counts) == {5: 1, 6: 1}


def test_incomplete_batch_reports_how_many_groups_are_missing():
    bound = StalenessBound(max_staleness_steps=1, groups_per_step=2)
    assert choose_batch(bound, learner_step=0, ready={1: 1}, due={1: 3}) == NotYet(1)
    assert choose_batch(bound, learner_step=0, ready={}, due={}) == NotYet(2)


def test_a_step_that_has_its_batch_already_makes_no_room():
    bound = StalenessBound(max_staleness_steps=2, groups_per_step=4)
    assert bound.permits(learner_step=3, adopted_step=3, live=0, booked={4}) == 8
    assert bound.permits(learner_step=3, adopted_step=3, live=0, booked={4, 5, 6}) == 4
    due = {5: 6}
    assert choose_batch(bound, learner_step=3, ready=due, due=due) == {5: 4}
    stuck = choose_batch(bound, learner_step=3, ready={5: 4}, due={5: 9}, booked={4})
    assert stuck == NotYet(0, overdue=5)


def test_without_reservation_only_what_would_be_too_old_at_once_is_refused():
    bound = StalenessBound(max_staleness_steps=1, groups_per_step=2, reserves=False)
    assert bound.permits(learner_step=3, adopted_step=1, live=0) == 0
    assert bound.permits(learner_step=3, adopted_step=2, live=1_000) > 1_000
    assert choose_batch(bound, learner_step=3, ready={4: 2}, due={3: 9, 4: 2}) == {4: 2}
