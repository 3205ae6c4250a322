"""The controller of staleness, as a pure function of what learner steps report."""

from itertools import pairwise

import pytest

from slipstream.broker.ledger.admission import NotYet, StalenessBound
from slipstream.broker.ledger.throttle import StalenessController, StalenessTarget, Throttle
from tests.support.ledger_driver import lease, make_ledger, make_ready, make_rules

BOUND = StalenessBound(6, 64)


def controller(**target: float) -> StalenessController:
    return StalenessController(StalenessTarget(**target), BOUND, max_in_flight=448)  # type: ignore[arg-type]


def observe(it: StalenessController, first: int, last: int, kl: float) -> list[int]:
    return [
        it.observe(step, {}, {"staleness/mismatch_kl": kl}).in_flight for step in range(first, last)
    ]


def test_it_begins_with_what_the_bound_and_the_setting_allow():
    assert controller(p95_lag=1).throttle == Throttle(
        6, 448, 0, controller(p95_lag=1).throttle.reason
    )
    few = StalenessController(StalenessTarget(p95_lag=1), BOUND, max_in_flight=100)
    assert (few.throttle.in_flight, few.throttle.bound) == (100, 6)  # nothing is lowered yet
    dropping = StalenessController(
        StalenessTarget(p95_lag=1), StalenessBound(6, 64, reserves=False), max_in_flight=900
    )
    assert (dropping.throttle.in_flight, dropping.throttle.bound) == (900, 6)


def test_after_a_learner_went_back_nothing_is_judged_until_its_old_batches_are_trained_again():
    it = controller(mismatch_kl=0.01)
    observe(it, 1, 12, kl=0.05)
    held = it.throttle
    it.went_back(4)
    assert set(observe(it, 5, 12, kl=0.5)) == {held.in_flight}
    assert observe(it, 12, 15, kl=0.5)[-1] < held.in_flight


def test_far_above_its_target_half_of_what_is_over_one_step_goes_and_then_it_waits():
    it = controller(mismatch_kl=0.01)
    assert observe(it, 1, 3, kl=0.05) == [448, 256]  # two steps are looked at
    assert "mismatch_kl 0.05 (target 0.01) is above its target: 448 -> 256" in it.throttle.reason
    assert observe(it, 3, 10, kl=0.05) == [256] * 7  # groups of before are trained still
    assert observe(it, 10, 12, kl=0.05) == [256, 160]


def test_a_little_above_it_goes_a_little_and_never_below_one_steps_groups():
    it = controller(mismatch_kl=0.01)
    assert observe(it, 1, 3, kl=0.0105) == [448, 444]
    for step in range(3, 400):
        it.observe(step, {}, {"staleness/mismatch_kl": 1.0})
    assert (it.throttle.in_flight, it.throttle.bound) == (64, 0)


def test_in_the_band_nothing_changes():
    it = controller(mismatch_kl=0.01)
    assert set(observe(it, 1, 100, kl=0.008)) == {448}
    it.binds = True
    assert set(observe(it, 100, 200, kl=0.008)) == {448}


def test_it_rises_only_where_it_was_what_kept_generators_from_more():
    it = controller(mismatch_kl=0.01)
    observe(it, 1, 60, kl=0.05)
    assert set(observe(it, 60, 90, kl=0.001)) == {64}
    for step in range(90, 500):
        it.binds = True
        it.observe(step, {}, {"staleness/mismatch_kl": 0.001})
    assert it.throttle.in_flight == 448


def test_a_raise_that_was_too_much_is_taken_back_and_not_tried_again_for_long():
    it = controller(mismatch_kl=0.01)
    tried = []
    for step in range(1, 600):  # whoever has more than two steps' groups is too stale
        it.binds = True
        before = it.throttle.in_flight
        it.observe(step, {}, {"staleness/mismatch_kl": 0.02 if before > 128 else 0.001})
        if before <= 128 < it.throttle.in_flight:
            tried.append(step)
    waits = [after - before for before, after in pairwise(tried)]
    assert it.throttle.in_flight in {128, 136}
    assert waits == sorted(waits)
    assert waits[-1] >= 128


def test_a_p95_counts_the_tokens_beyond_it():
    target = StalenessTarget(p95_lag=1)
    assert target.excess({0: 50, 1: 46, 2: 4}, {}) == pytest.approx(0.8)
    assert target.excess({2: 10, 5: 90}, {}) == pytest.approx(20)
    assert target.excess({}, {}) is None
    assert (
        StalenessTarget(mismatch_kl=0.1).excess({0: 1}, {}) is None
    )  # the step has no such figure


def test_a_throttle_allows_no_more_than_the_bound():
    for step in range(4):
        for adopted in range(step + 1):
            for live in range(0, 30, 3):
                for bound in range(8):
                    own = StalenessBound(3, 4).permits(
                        learner_step=step, adopted_step=adopted, live=live
                    )
                    lower = Throttle(bound, 4 * (bound + 1)).permits(
                        StalenessBound(3, 4),
                        learner_step=step,
                        adopted_step=adopted,
                        live=live,
                        booked={},
                    )
                    assert lower <= own


@pytest.mark.parametrize("live", range(12))
def test_no_more_groups_are_under_way_than_the_controller_says(live: int):
    left = Throttle(3, 9).permits(
        StalenessBound(3, 4), learner_step=3, adopted_step=3, live=live, booked={}
    )
    assert left == max(0, 9 - live)


def test_groups_of_a_lowered_bound_fall_due_earlier_and_the_learner_waits_for_them():
    rules = make_rules(
        max_staleness_steps=3,
        groups_per_step=2,
        total_steps=20,
        staleness_target=StalenessTarget(p95_lag=0),
    )
    ledger = make_ledger(rules)
    ledger.training.take_over(0)
    held = ledger.book.controller
    assert held is not None
    held.throttle = Throttle(0, 2)
    (first, second) = lease(ledger)
    assert lease(ledger) == []
    assert {ledger.book.groups[one.group_id].deadline(rules.bound) for one in (first, second)} == {
        0
    }
    held.throttle = Throttle(3, 5)
    assert len(lease(ledger)) == 3
    held.throttle = Throttle(3, 8)
    later = lease(ledger)
    assert len(later) == 3
    assert {ledger.book.groups[one.group_id].deadline(rules.bound) for one in later} == {3}
    assert ledger.book.index.lags(2) == ({2: 8}, {}), "by when they began, not when they fall due"
    make_ready(ledger, later[:3])
    waits = ledger.training.deliver(ledger.book.version)
    assert isinstance(waits, NotYet)
    assert set(ledger.training.waiting_for(waits)) >= {first.group_id, second.group_id}
    make_ready(ledger, [first, second])
    batch = ledger.training.deliver(ledger.book.version)
    assert isinstance(batch, list)
    assert {group.group_id for group in batch} == {first.group_id, second.group_id}
