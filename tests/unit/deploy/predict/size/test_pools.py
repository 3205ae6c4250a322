"""Splits of GPUs between learner and generators."""

import itertools

import pytest

from slipstream.deploy.predict.laws.engine_law import EngineLaw
from slipstream.deploy.predict.laws.figure import Figure
from slipstream.deploy.predict.laws.learner_law import LearnerLaw, PublishLaw
from slipstream.deploy.predict.laws.publish_cost import Cost, Setup, cost_of
from slipstream.deploy.predict.simulate.lengths import Fixed
from slipstream.deploy.predict.simulate.scenario import Scenario
from slipstream.deploy.predict.simulate.world import simulate
from slipstream.deploy.predict.size.engines import EngineSize
from slipstream.deploy.predict.size.pools import (
    Demand,
    PoolRates,
    Split,
    best_splits,
    closed_form,
    outcome,
)
from slipstream.deploy.predict.size.proposals import Proposal
from tests.support.planned import config_of

ENGINE = EngineSize(ranks=1, groups=1, nodes=1, memory=(), cached_tokens=1e6)
DEMAND = Demand(
    groups=32,
    group_size=8,
    prompt_tokens=100,
    response_tokens=1000,
    longest_response=4000,
    max_sequences=64,
)
FREE: Cost = cost_of(Setup(version_bytes=0))


CONSTANT = EngineLaw(base_s=0.01, prefill_s=1e-6)  # whatever is under way


def learner(gpus: int, step_s: float) -> Proposal:
    settings = config_of("Qwen3-30B-A3B", learner={"ranks": gpus}).learner
    return Proposal(settings, (), 0.0, (Figure("compute", step_s, "s", "given"),))


def split(gpus: int = 8, step_s: float = 40, engines: int = 8, bound: int = 2) -> Split:
    return Split(learner=learner(gpus, step_s), engines=engines, engine=ENGINE, bound=bound)


def rates(**changed: float) -> PoolRates:
    given = {"learner_s": 40, "generate_s": 30, "longest_s": 35, "mean_s": 10, "receive_s": 1}
    return PoolRates(**{**given, "sequences": 32, **changed})


def test_with_a_bound_the_slower_pool_is_the_step():
    assert outcome(split(), rates(), 32).step_s == 40
    assert outcome(split(), rates(), 32).limit == "learner"
    assert outcome(split(), rates(generate_s=50), 32).limit == "generators"


def test_the_longest_answer_has_as_many_steps_as_the_bound():
    long = rates(longest_s=99)
    by_bound = [outcome(split(bound=bound), long, 32) for bound in (1, 2, 3)]
    assert [one.step_s for one in by_bound] == pytest.approx([140 / 2, 140 / 3, 40])
    assert [one.limit for one in by_bound] == ["longest", "longest", "learner"]


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_the_closed_form_is_what_the_ledger_does_in_virtual_time(bound: int):
    """Engines with room for everything, answers of one length: the longest answer decides."""
    learner_s, answer_s = 3.0, 20.0
    scenario = Scenario(
        steps=60,
        groups_per_step=4,
        group_size=2,
        max_staleness_steps=bound,
        engines=4,
        max_sequences=1000,
        engine=EngineLaw(base_s=0.01),
        learner=LearnerLaw(step_s=learner_s),
        publish=PublishLaw(recomputes=False),
        lengths=Fixed(round(answer_s / 0.01)),
    )
    long = rates(learner_s=learner_s, generate_s=0.1, longest_s=answer_s, receive_s=0.0)
    predicted = outcome(split(bound=bound), long, 4)
    assert simulate(scenario).mean_step_s(20) == pytest.approx(predicted.step_s, rel=0.05)


def test_without_a_bound_one_follows_the_other():
    one = outcome(split(bound=0), rates(), 32)
    assert (one.step_s, one.limit, one.in_flight) == (40 + 35 + 1, "all in turn", 32)


def test_groups_in_flight_suffice_and_keep_the_rule():
    # 30 of 40 seconds of a step are generated: G and three quarters of G.
    assert outcome(split(), rates(), 32).in_flight == 32 + 24
    for bound, generate in itertools.product(range(4), (1.0, 30.0, 300.0)):
        one = outcome(split(bound=bound), rates(generate_s=generate), 32)
        assert 32 <= one.in_flight <= (bound + 1) * 32


def test_rates_of_the_closed_form_by_hand():
    law = closed_form(DEMAND, lambda _size: CONSTANT, lambda _split: FREE)
    found = law(split(engines=8, bound=0))
    # 256 answers on 8 engines: 32 each at a time, 1,000 steps of 10 ms, and prompts of 4 groups.
    assert found.sequences == 32
    assert found.generate_s == pytest.approx(1000 * 0.01 + 400 / 1e6)
    assert (found.longest_s, found.mean_s, found.learner_s) == (40, 10, 40)
    # With a bound more are under way, up to what an engine takes.
    assert law(split(engines=8, bound=1)).sequences == 64
    assert law(split(engines=8, bound=3)).sequences == 64


def test_the_smallest_bound_that_is_as_fast_is_taken():
    seconds = {0: 90.0, 1: 40.0, 2: 39.9, 3: 39.8}
    splits = [split(bound=bound) for bound in seconds]
    (best,) = best_splits(
        splits,
        lambda one: rates(learner_s=seconds[one.bound], generate_s=1, longest_s=1, receive_s=0),
        32,
    )
    assert best.split.bound == 1


def test_splits_are_in_the_order_of_steps_per_hour():
    splits = [split(gpus=gpus, step_s=320 / gpus, engines=16 - gpus) for gpus in (2, 4, 8)]
    found = best_splits(
        splits,
        lambda one: rates(learner_s=one.learner.step_s, generate_s=480 / one.engines, longest_s=1),
        32,
    )
    assert [one.split.learner.gpus for one in found] == [8, 4, 2]
    assert [one.limit for one in found] == ["generators", "learner", "learner"]
    assert found[0].steps_per_hour == 60


def test_of_splits_that_wait_for_the_longest_answer_the_one_with_most_to_spare_is_first():
    splits = [split(gpus=gpus, engines=16 - gpus) for gpus in (2, 4, 8)]
    found = best_splits(
        splits,
        lambda one: rates(
            learner_s=160 / one.learner.gpus, generate_s=480 / one.engines, longest_s=5000
        ),
        32,
    )
    assert [one.split.learner.gpus for one in found] == [4, 8, 2]
