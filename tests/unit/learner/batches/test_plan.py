from itertools import chain

import pytest

from slipstream.learner.batches.plan import MinibatchPlan, plan_step
from slipstream.wire.errors import ConfigError


def loads(plan: MinibatchPlan, num_tokens: list[int]) -> list[int]:
    return [sum(num_tokens[i] for bins in share for i in bins) for share in plan.microbatches]


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("minibatches", [1, 2, 4])
@pytest.mark.parametrize("max_tokens", [1, 40, 100, 10_000])
def test_every_trajectory_is_trained_exactly_once_and_no_microbatch_is_too_long(
    replicas: int, minibatches: int, max_tokens: int
):
    num_tokens = [17 * i % 61 + 1 for i in range(19)]
    plans = plan_step(num_tokens, replicas=replicas, minibatches=minibatches, max_tokens=max_tokens)
    assert len(plans) == minibatches
    microbatches = [m for plan in plans for share in plan.microbatches for m in share]
    assert sorted(chain.from_iterable(microbatches)) == list(range(19))
    for indices in microbatches:
        assert len(indices) == 1 or sum(num_tokens[i] for i in indices) <= max_tokens


def test_minibatches_follow_the_order_of_delivery():
    first, second = plan_step([5] * 7, replicas=1, minibatches=2, max_tokens=100)
    assert first.microbatches == (((0, 1, 2),),)
    assert second.microbatches == (((3, 4, 5, 6),),)


def test_replicas_get_about_the_same_number_of_tokens():
    num_tokens = [100, 90, 50, 40, 30, 20, 10, 5]
    (plan,) = plan_step(num_tokens, replicas=2, minibatches=1, max_tokens=1_000)
    one, other = loads(plan, num_tokens)
    assert abs(one - other) <= 5


def test_every_replica_has_something_to_train():
    (plan,) = plan_step([1_000, 1, 1], replicas=3, minibatches=1, max_tokens=10)
    assert sorted(plan.microbatches) == [((0,),), ((1,),), ((2,),)]


def test_short_sequences_fill_what_long_ones_leave():
    (plan,) = plan_step([60, 50, 40, 30, 20], replicas=1, minibatches=1, max_tokens=100)
    assert plan.microbatches == (((0, 2), (1, 3, 4)),)


def test_a_sequence_longer_than_a_microbatch_is_not_split():
    (plan,) = plan_step([500, 10], replicas=1, minibatches=1, max_tokens=100)
    assert plan.microbatches == (((0,), (1,)),)


@pytest.mark.parametrize(
    ("count", "replicas", "expected"), [(8, 2, 4), (7, 2, 3), (5, 2, 2), (3, 2, 1), (3, 1, 3)]
)
def test_a_batch_too_small_for_all_minibatches_has_fewer_and_no_replica_goes_without(
    count: int, replicas: int, expected: int
):
    plans = plan_step([9] * count, replicas=replicas, minibatches=4, max_tokens=10)
    assert len(plans) == expected
    assert all(microbatches for plan in plans for microbatches in plan.microbatches)
    everything = [i for plan in plans for share in plan.microbatches for m in share for i in m]
    assert sorted(everything) == list(range(count))


def test_a_batch_smaller_than_the_number_of_replicas_is_refused():
    with pytest.raises(ConfigError, match=r"2 trajectories .* 3 data-parallel .* run\.min_groups"):
        plan_step([9, 9], replicas=3, minibatches=1, max_tokens=10)
