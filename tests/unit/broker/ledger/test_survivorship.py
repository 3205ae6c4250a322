"""The meter that shows whether long answers are trained as often as short ones."""

import pytest

from slipstream.broker.ledger.survivorship import bucket_of, survivorship_of, upper_tokens
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.ledger_driver import header, lease, make_ledger, make_rules, reward, submit


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 64, 1000, 32_768])
def test_a_length_is_within_a_fifth_of_the_end_of_its_bucket(tokens: int):
    assert tokens <= upper_tokens(bucket_of(tokens)) + 1 <= tokens * 1.2 + 2


def test_without_drops_for_age_no_quarter_is_short_of_any():
    lengths = {"trained": {bucket_of(n): 100 for n in (8, 16, 32, 64)}, "zero_variance": {3: 100}}
    meter = survivorship_of(lengths, {}, drops=True)
    assert [q.dropped_for_age for q in meter.quartiles] == [0, 0, 0, 0]
    assert meter.alarm == ""
    assert meter.trained_mean == pytest.approx(30, rel=0.2)


def test_a_run_without_answers_has_no_mean_length():
    meter = survivorship_of({}, {}, drops=True)
    assert (meter.generated_mean, meter.trained_mean, meter.cancelled) == (0.0, 0.0, 0)


def test_dropping_the_long_ones_raises_an_alarm_that_names_the_setting():
    lengths = {
        "trained": {bucket_of(n): 100 for n in (8, 16, 32)},
        "stale": {bucket_of(64): 60, bucket_of(8): 2},
    }
    meter = survivorship_of(lengths, {"stale": 40, "run_ended": 7}, drops=True)
    assert [q.dropped_share for q in meter.quartiles][:3] == pytest.approx([2 / 102, 0, 0])
    assert meter.quartiles[-1].dropped_share == 1.0
    assert (meter.quartiles[-1].trajectories, meter.cancelled) == (100, 47)
    assert "run.staleness_mode" in meter.alarm


def test_the_ledger_counts_what_was_cancelled_with_what_was_finished():
    rules = make_rules(total_steps=9, max_staleness_steps=0, reserves=False, max_in_flight=6)
    ledger = make_ledger(rules)
    ledger.training.take_over(0)
    first, second, third, *_ = lease(ledger)
    for group in (first, second):
        for sibling in group.siblings:
            submit(ledger, header(group.group_id, sibling, PolicyVersion(1, 0)))
        reward(ledger, group.group_id, [0.0, 1.0])
    submit(ledger, header(third.group_id, 0, PolicyVersion(1, 0), PolicyVersion(1, 0)))
    ledger.training.deliver(ledger.book.version)
    ledger.training.commit(ledger.book.version.next(), {})
    four, eight = bucket_of(4), bucket_of(8)
    assert ledger.book.state.lengths == {"trained": {four: 4}, "stale": {eight: 1}}
    assert ledger.book.state.cancelled == {"stale": 1 + 3 * 2}
