from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.learner.batches.plan import MinibatchPlan, PromptCost, plan_step
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.flops import SequenceCost

LINEAR = SequenceCost()
ATTENTION = SequenceCost(linear=1.0, quadratic=1 / 50)  # as much as the rest at a length of 50


def planned(
    num_tokens: Sequence[int],
    *,
    cost: SequenceCost = LINEAR,
    **others: Any,  # noqa: ANN401 those of plan_step
) -> tuple[MinibatchPlan, ...]:
    """Plan trajectories whose work is estimated from their lengths."""
    return plan_step(num_tokens, [cost.flops(int(n)) for n in num_tokens], **others)


def loads(plan: MinibatchPlan, num_tokens: list[int]) -> list[int]:
    return [sum(num_tokens[i] for bins in share for i in bins) for share in plan.microbatches]


class Request(TypedDict):
    num_tokens: list[int]
    replicas: int
    minibatches: int
    max_tokens: int
    cost: SequenceCost
    coupled: bool
    multiple_of: int
    stages: int


@st.composite
def requests(draw: st.DrawFn) -> Request:
    replicas = draw(st.integers(1, 6))
    return Request(
        num_tokens=draw(st.lists(st.integers(1, 120), min_size=replicas, max_size=80)),
        replicas=replicas,
        minibatches=draw(st.integers(1, 3)),
        max_tokens=draw(st.sampled_from([1, 60, 100, 400, 10_000])),
        cost=draw(st.sampled_from([LINEAR, ATTENTION])),
        coupled=draw(st.booleans()),
        multiple_of=draw(st.integers(1, 4)),
        stages=draw(st.integers(1, 4)),
    )


@given(requests())
def test_every_trajectory_is_trained_once_by_a_microbatch_of_its_minibatch(request: Request):
    lengths, start = request["num_tokens"], 0
    for plan in planned(**request):
        end = start + len(plan.members)
        assert sorted(plan.members) == list(range(start, end))
        assert len(plan.microbatches) == request["replicas"]
        for share in plan.microbatches:
            assert any(share), "a replica without a trajectory"
            for one in share:
                assert len(one) <= 1 or sum(lengths[i] for i in one) <= request["max_tokens"]
        start = end
    assert start == len(lengths)


@given(requests())
def test_coupled_replicas_have_one_number_of_microbatches_and_others_no_empty_ones(
    request: Request,
):
    for plan in planned(**request):
        numbers = {len(share) for share in plan.microbatches}
        if request["coupled"]:
            (number,) = numbers
            assert number % request["multiple_of"] == 0
        else:
            assert all(one for share in plan.microbatches for one in share)


@given(requests())
def test_a_replica_has_empty_microbatches_only_where_each_trajectory_has_its_own(request: Request):
    for plan in planned(**request):
        for share in plan.microbatches:
            assert all(share) or max(map(len, share)) == 1


def test_a_microbatch_that_a_trade_emptied_is_filled_again():
    lengths = [58, 117, 1, 120, 1, 120, 120, 62, 1, 120, 85, 120, 120, 1, 1, 1, 22, 8, 1, 120, 104]
    lengths += [63, 120, 1, 1, 120, 120, 120, 1, 120, 1, 81, 1, 1, 1, 120, 120, 8, 120, 1, 1, 5, 1]
    lengths += [120, 108, 120, 120, 120, 93, 120, 120, 120, 12, 1, 1, 1, 51, 120]
    for plan in planned(
        lengths,
        replicas=4,
        minibatches=3,
        max_tokens=60,
        cost=SequenceCost(1.0, 1.0),
        coupled=True,
        multiple_of=2,
    ):
        for share in plan.microbatches:
            assert all(share) or max(map(len, share)) == 1


@given(requests())
def test_equal_arguments_give_equal_plans(request: Request):
    assert planned(**request) == planned(**request)


@given(requests())
def test_without_a_bound_on_tokens_no_replica_exceeds_the_mean_by_more_than_one_sequence(
    request: Request,
):
    request["max_tokens"] = sum(request["num_tokens"])
    work = [request["cost"].flops(length) for length in request["num_tokens"]]
    for plan in planned(**request):
        mine = [sum(work[i] for one in share for i in one) for share in plan.microbatches]
        mean = sum(mine) / len(mine)
        assert max(mine) <= (mean + max(work[i] for i in plan.members)) * (1 + 1e-9)


@given(requests())
def test_small_microbatches_are_at_both_ends(request: Request):
    work = [request["cost"].flops(length) for length in request["num_tokens"]]
    for plan in planned(**request):
        for share in plan.microbatches:
            sizes = [sum(work[i] for i in one) for one in share]
            largest = sizes.index(max(sizes))
            assert sizes[: largest + 1] == sorted(sizes[: largest + 1])
            assert sizes[largest:] == sorted(sizes[largest:], reverse=True)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("cost", [LINEAR, ATTENTION], ids=["tokens", "attention"])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("replicas", [2, 8, 16])
def test_flops_of_replicas_are_equal_to_a_hundredth(
    replicas: int, seed: int, cost: SequenceCost, coupled: bool
):
    drawn = np.random.default_rng(seed).lognormal(np.log(30), 0.8, 32 * replicas)
    lengths = np.clip(drawn, 1, 200).astype(int).tolist()
    (plan,) = planned(
        lengths, replicas=replicas, minibatches=1, max_tokens=256, cost=cost, coupled=coupled
    )
    work = [
        sum(cost.flops(lengths[i]) for one in share for i in one) for share in plan.microbatches
    ]
    assert max(work) <= 1.01 * max(sum(work) / replicas, cost.flops(max(lengths)))


def test_attention_makes_one_long_sequence_weigh_more_than_its_tokens():
    lengths = [100, *[25] * 4, *[50] * 2]
    (by_tokens,) = planned(lengths, replicas=3, minibatches=1, max_tokens=100)
    assert sorted(loads(by_tokens, lengths)) == [100, 100, 100]
    (by_flops,) = planned(
        lengths, replicas=2, minibatches=1, max_tokens=1_000, cost=SequenceCost(1.0, 1 / 50)
    )  # 300; 4 x 37.5 and 2 x 100
    assert sorted(loads(by_flops, lengths)) == [125, 175]


def test_one_sequence_heavier_than_the_mean_is_alone_and_the_others_share_the_rest():
    lengths = [100, *[10] * 9]
    (plan,) = planned(lengths, replicas=4, minibatches=1, max_tokens=100, cost=ATTENTION)
    assert sorted(loads(plan, lengths)) == [30, 30, 30, 100]


def test_coupled_replicas_train_microbatches_of_like_size_in_equal_places():
    lengths = [7 * i % 97 + 4 for i in range(240)]
    (plan,) = planned(
        lengths, replicas=4, minibatches=1, max_tokens=256, cost=ATTENTION, coupled=True
    )
    sizes = np.array(
        [[sum(ATTENTION.flops(lengths[i]) for i in one) for one in s] for s in plan.microbatches]
    )  # [replica, microbatch]
    assert sizes.max(0).sum() <= 1.03 * sizes.sum(1).mean()


def test_numbers_of_numpy_do_not_overflow():
    lengths = np.full(64, 30_000, np.int32)
    cost = SequenceCost(linear=6e10, quadratic=6e5)
    (plan,) = planned(lengths.tolist(), replicas=4, minibatches=1, max_tokens=32_768, cost=cost)
    assert planned(lengths, replicas=4, minibatches=1, max_tokens=32_768, cost=cost) == (plan,)


def test_minibatches_follow_the_order_of_delivery():
    first, second = planned([5] * 7, replicas=1, minibatches=2, max_tokens=100)
    assert first.microbatches == (((0, 1, 2),),)
    assert second.microbatches == (((3, 4, 5, 6),),)


def test_short_sequences_fill_what_long_ones_leave():
    (plan,) = planned([60, 50, 40, 30, 20], replicas=1, minibatches=1, max_tokens=100)
    assert plan.microbatches == (((0, 2), (1, 3, 4)),)


def test_a_batch_too_small_for_all_minibatches_has_fewer_and_no_replica_goes_without():
    for count, replicas, expected in [(8, 2, 4), (7, 2, 3), (5, 2, 2), (3, 2, 1), (3, 1, 3)]:
        plans = planned([9] * count, replicas=replicas, minibatches=4, max_tokens=10)
        assert len(plans) == expected
        assert all(microbatches for plan in plans for microbatches in plan.microbatches)
        everything = [i for plan in plans for share in plan.microbatches for m in share for i in m]
        assert sorted(everything) == list(range(count))


def test_a_batch_smaller_than_the_number_of_replicas_is_refused():
    with pytest.raises(ConfigError, match=r"2 trajectories .* 3 data-parallel .* run\.min_groups"):
        planned([9, 9], replicas=3, minibatches=1, max_tokens=10)


def test_work_that_is_given_decides_in_the_place_of_its_estimate():
    """As of trajectories of several branches, which attend to themselves alone."""
    work = [100.0, 1.0, 1.0, 1.0, 1.0, 96.0]
    (plan,) = plan_step([10] * 6, work, replicas=2, minibatches=1, max_tokens=100)
    shares = [sum(work[i] for one in share for i in one) for share in plan.microbatches]
    assert max(shares) == 100.0


# ---- siblings --------------------------------------------------------------------


def loads_of_microbatches(plan: MinibatchPlan, num_tokens: list[int]) -> list[int]:
    return [sum(num_tokens[i] for i in one) for share in plan.microbatches for one in share]


def groups_in(plan: MinibatchPlan, size: int) -> int:
    """Return the number of parts that groups of neighbors are in, over all microbatches."""
    return sum(len({i // size for i in one}) for share in plan.microbatches for one in share)


def test_siblings_stay_together_where_their_prompt_is_long():
    lengths = [40 + 7 * i % 5 for i in range(64)]
    named = {"replicas": 2, "minibatches": 2, "max_tokens": 500}
    saved = [PromptCost(i // 8, 35.0) for i in range(64)]
    for plan in plan_step(lengths, lengths, prompts=saved, **named):
        assert sorted(plan.members) == list(range(min(plan.members), max(plan.members) + 1))
        assert len(plan.members) == 32
        assert max(loads_of_microbatches(plan, lengths)) <= 500
        assert groups_in(plan, 8) == 4, "each group is whole"
    apart = plan_step(lengths, lengths, **named)
    assert groups_in(apart[0], 8) > 4


def test_siblings_are_apart_where_replicas_would_wait_for_those_that_are_together():
    lengths = [100] * 24
    plans = plan_step(
        lengths,
        lengths,
        replicas=8,
        minibatches=1,
        max_tokens=800,
        prompts=[PromptCost(i // 8, 20.0) for i in range(24)],
    )
    assert sorted(loads(plans[0], lengths)) == [300] * 8


def test_of_a_group_that_no_microbatch_takes_parts_stay_together():
    lengths, saved = [100] * 16, [PromptCost(0, 90.0)] * 16
    (plan,) = plan_step(lengths, lengths, replicas=1, minibatches=1, max_tokens=450, prompts=saved)
    assert loads_of_microbatches(plan, lengths) == [400] * 4


@given(requests(), st.integers(1, 9), st.floats(0.0, 1.0))
@example(  # a swap for siblings with more tokens and fewer FLOPs
    {
        "num_tokens": [
            *(1, 1, 1, 11, 46, 71, 1, 12, 1, 41, 1, 28),
            *(1, 6, 27, 113, 2, 6, 9, 10, 5, 19, 25),
        ],
        "replicas": 2,
        "minibatches": 1,
        "max_tokens": 60,
        "cost": SequenceCost(linear=1.0, quadratic=0.02, output=0.0),
        "coupled": False,
        "multiple_of": 1,
        "stages": 1,
    },
    2,
    1.0,
)
def test_with_prompts_each_trajectory_is_trained_once(request: Request, size: int, share: float):
    lengths, cost = request["num_tokens"], request["cost"]
    work = [cost.flops(length) for length in lengths]
    named = {key: value for key, value in request.items() if key not in {"num_tokens", "cost"}}
    least = [min(work[i // size * size : (i // size + 1) * size]) for i in range(len(work))]
    prompts = [PromptCost(i // size, share * saved) for i, saved in enumerate(least)]
    plans = plan_step(lengths, work, prompts=prompts, **named)
    assert [i for plan in plans for i in sorted(plan.members)] == list(range(len(lengths)))
    for plan, alone in zip(plans, plan_step(lengths, work, **named), strict=True):
        assert sorted(plan.members) == sorted(alone.members)
        for microbatch in (indices for share in plan.microbatches for indices in share):
            total = sum(lengths[i] for i in microbatch)
            assert total <= request["max_tokens"] or len(microbatch) == 1
        if request["coupled"]:
            assert len({len(share) for share in plan.microbatches}) == 1
