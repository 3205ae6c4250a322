"""The bound, no waste and liveness, on hand-made cases and on random schedules."""

import random
from dataclasses import replace

import pytest

from broker.admission import Batch, LiveGroup, NotYet, StalenessBound, choose_batch


def ready(group_id: int, deadline: int) -> LiveGroup:
    return LiveGroup(group_id, deadline, ready=True)


def unfinished(group_id: int, deadline: int) -> LiveGroup:
    return LiveGroup(group_id, deadline, ready=False)


def test_bound_zero_admits_exactly_one_step_of_groups_and_waits_for_the_new_weights():
    bound = StalenessBound(max_staleness_steps=0, groups_per_step=4)
    assert bound.permits(learner_step=0, adopted_step=0, live=0) == 4
    assert bound.permits(learner_step=0, adopted_step=0, live=4) == 0
    assert bound.permits(learner_step=1, adopted_step=0, live=0) == 0
    assert bound.permits(learner_step=1, adopted_step=1, live=0) == 4


def test_younger_groups_go_first_only_while_the_straggler_has_a_later_step_left():
    bound = StalenessBound(max_staleness_steps=1, groups_per_step=2)
    straggler, young = unfinished(0, deadline=5), [ready(i, deadline=6) for i in (1, 2, 3)]
    assert choose_batch(bound, learner_step=4, live=[straggler, *young]) == Batch((1, 2))
    assert choose_batch(bound, learner_step=5, live=[straggler, *young]) == NotYet((0,))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("bound_steps", "groups", "publish_lag"), [(0, 4, 2), (1, 4, 2), (4, 8, 5)]
)
def test_no_schedule_breaks_the_bound_wastes_a_group_or_stops(
    seed: int, bound_steps: int, groups: int, publish_lag: int
):
    """Groups of very different length, 30% of them filtered, weights adopted late."""
    rng = random.Random(seed)
    bound = StalenessBound(bound_steps, groups)
    live: list[tuple[LiveGroup, int, bool]] = []  # group, finish time, is filtered
    adopted, published, step, issued, last_progress = 0, [], 0, 0, 0
    for now in range(100_000):
        adopted = max([adopted, *(version for at, version in published if at <= now)])
        for _ in range(bound.permits(learner_step=step, adopted_step=adopted, live=len(live))):
            length = 1 if rng.random() < 0.8 else rng.randrange(1, 60)
            group = unfinished(issued, bound.deadline(adopted))
            live.append((group, now + length, rng.random() < 0.3))
            issued += 1
        live = [item for item in live if not (item[2] and item[1] <= now)]
        seen = [replace(group, ready=finish <= now) for group, finish, _ in live]
        assert all(group.deadline >= step for group in seen), "a group outlived its deadline"
        match choose_batch(bound, learner_step=step, live=seen):
            case Batch(group_ids):
                live = [item for item in live if item[0].group_id not in group_ids]
                step, last_progress = step + 1, now
                published.append((now + publish_lag, step))
            case NotYet(waiting_for):
                assert waiting_for or len(live) < groups
                assert now - last_progress < 200, f"stuck at step {step}: {waiting_for}"
        if step == 100:
            return
    pytest.fail("100 steps took too long")


def test_a_generator_with_old_weights_may_start_less():
    bound = StalenessBound(max_staleness_steps=2, groups_per_step=4)
    assert bound.permits(learner_step=3, adopted_step=3, live=5) == 7
    assert bound.permits(learner_step=3, adopted_step=2, live=5) == 3
    assert bound.permits(learner_step=3, adopted_step=1, live=5) == 0
    assert bound.permits(learner_step=3, adopted_step=0, live=0) == 0


def test_the_nearest_deadline_goes_first_and_then_the_order_of_issue():
    bound = StalenessBound(max_staleness_steps=2, groups_per_step=2)
    live = [ready(3, deadline=6), ready(4, deadline=5), ready(1, deadline=6)]
    assert choose_batch(bound, learner_step=4, live=live) == Batch((4, 1))


def test_fewer_than_a_batch_names_all_that_are_not_ready():
    bound = StalenessBound(max_staleness_steps=1, groups_per_step=2)
    live = [ready(0, deadline=1), unfinished(1, deadline=1), unfinished(2, deadline=1)]
    assert choose_batch(bound, learner_step=0, live=live) == NotYet((1, 2))
    assert choose_batch(bound, learner_step=0, live=[]) == NotYet(())
