from pathlib import Path

import pytest
from msgspec.structs import replace

from slipstream.learner.batches.orders import (
    StepPlan,
    StopTraining,
    decode_order,
    encode_order,
    num_flops,
    plan_batch,
)
from slipstream.learner.config import LearnerSection
from slipstream.wire.messages.broker import BatchDelivered, BatchNotReady, RunComplete
from slipstream.wire.models.flops import SequenceCost
from slipstream.wire.settings.sections import RoutingReplay
from tests.support.delivered_groups import groups
from tests.support.learner_settings import learner_settings_of


def order(**settings: int) -> StepPlan:
    batch = BatchDelivered(step=5, groups=tuple(groups()))
    learner = LearnerSection(**settings)
    of_run = replace(learner_settings_of(Path(), ""), learner=learner)
    return plan_batch(batch, of_run, cost=SequenceCost())


def test_orders_of_rank_0_arrive_unchanged():
    waiting = BatchNotReady(waiting_for=(1,), reason="", last_step=9)
    for sent in (order(ranks=2), waiting, RunComplete(), StopTraining()):
        assert decode_order(encode_order(sent)) == sent


def test_replicas_want_payloads_that_no_other_wants_and_all_of_them_together():
    planned = order(ranks=2, minibatches=2)
    shares = [planned.keys(replica) for replica in range(2)]
    assert sorted(key for share in shares for key in share) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [len(share) for share in shares] == [2, 2]
    headers = planned.headers
    for replica, share in enumerate(shares):
        wanted = [headers[i] for i in planned.wanted(replica)]
        assert share == tuple((header.group_id, header.sibling) for header in wanted)


def test_ranks_that_share_a_replica_are_not_replicas():
    assert len(order(ranks=2, tensor_parallel=2).plans[0].microbatches) == 1


@pytest.mark.parametrize(
    ("learner", "replay", "shares"),
    [
        (LearnerSection(), "off", True),
        (LearnerSection(tensor_parallel=2, ranks=2), "R2", True),
        (LearnerSection(context_parallel=2, ranks=2), "off", False),
        (LearnerSection(), "R3", False),
    ],
)
def test_prompts_are_shared_where_a_rank_has_whole_sequences_and_chooses_experts(
    learner: LearnerSection, replay: RoutingReplay, shares: bool
):
    settings = learner_settings_of(Path(), "")
    run = replace(settings.run, routing_replay=replay)
    assert replace(settings, run=run, learner=learner).shares_prompts == shares


def test_flops_of_a_microbatch_count_a_shared_prompt_once():
    planned, cost = order(), SequenceCost(linear=10.0, quadratic=1.0, output=4.0)
    headers = planned.headers
    assert [header.group_id for header in headers] == [0, 0, 1, 1]
    apart = sum(cost.flops_within(h.bounds, h.num_response_tokens) for h in headers)
    assert num_flops(headers, cost, shares_prompts=False) == apart
    saved = sum(
        6 * headers[i].num_prompt_tokens + headers[i].num_prompt_tokens ** 2 for i in (1, 3)
    )
    assert num_flops(headers, cost, shares_prompts=True) == pytest.approx(apart - saved)
    long = [replace(header, num_tokens=50 * header.num_tokens) for header in headers]
    assert num_flops(long, cost, shares_prompts=True) == num_flops(long, cost, shares_prompts=False)
