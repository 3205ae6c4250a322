from itertools import combinations

import pytest

from slipstream.broker.ledger.evaluation import (
    EvalAnswer,
    EvalPlan,
    EvalRound,
    pass_at_k,
    rounds_without_gain,
)
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.status import EvalPoint
from slipstream.wire.settings.eval_metric import check_metric, metric_of, pass_counts
from slipstream.wire.settings.sections import EvalSection
from tests.support.ledger_driver import eval_plan


def answers(*rewards: float, tokens: int = 4, truncated: bool = False) -> list[EvalAnswer]:
    return [EvalAnswer(reward, tokens, truncated) for reward in rewards]


def test_rounds_are_due_before_during_and_after_training():
    for plan, due in [
        (eval_plan(5), [0, 10]),
        (eval_plan(5, every_steps=4), [0, 4, 8, 10]),
        (eval_plan(5, before_train=False), [10]),
        (eval_plan(5, every_steps=5, at_end=False), [0, 5]),
        (eval_plan(0, every_steps=1), []),
    ]:
        assert [step for step in range(11) if plan.is_due(step, last_step=10)] == due


def test_a_round_is_complete_when_every_problem_was_answered_or_dropped():
    eval_round = EvalRound(step=3, num_problems=3, next_problem=1)
    assert eval_round.unissued == 2
    eval_round.answers |= {0: answers(1.0), 1: answers(0.0)}
    assert not eval_round.complete
    eval_round.dropped.add(2)
    assert eval_round.complete


def test_a_round_without_answers_claims_no_figure():
    point = eval_plan(2).point(EvalRound(step=0, num_problems=2, dropped={0, 1}))
    assert (point.overall.metrics, point.overall.num_answers) == ({}, 0)
    assert metric_of(point, "mean") is None


def test_figures_are_kept_apart_by_data_source():
    plan = EvalPlan(
        sources=("sums", "sorts", "sums"), section=EvalSection(file="x", samples=2, temperature=1.0)
    )
    eval_round = EvalRound(
        step=1,
        num_problems=3,
        answers={
            0: answers(1.0, 0.0, tokens=2),
            1: answers(0.25, 0.25, tokens=8, truncated=True),
            2: answers(1.0, 1.0, tokens=2),
        },
    )
    point = plan.point(eval_round)
    assert point.by_source["sums"].metrics == {
        "mean@2": 0.75,
        "pass@1": 0.75,
        "pass@2": 1.0,
        "response_tokens": 2.0,
        "truncated": 0.0,
    }
    sorts = point.by_source["sorts"]
    assert (sorts.num_problems, sorts.num_answers) == (1, 2)
    found = (sorts.metrics["mean@2"], sorts.metrics["pass@2"], sorts.metrics["truncated"])
    assert found == (0.25, 0.0, 1.0)
    assert point.overall.metrics["mean@2"] == pytest.approx(3.5 / 6)
    assert metric_of(point, "pass@2") == pytest.approx(2 / 3)
    assert metric_of(point, "sorts:mean") == 0.25
    assert metric_of(point, "unknown:mean") is None


@pytest.mark.parametrize("right", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(right: int, k: int):
    rewards = [1.0] * right + [0.5] * (5 - right)
    draws = list(combinations(rewards, k))
    share = sum(1.0 in draw for draw in draws) / len(draws)
    assert pass_at_k(answers(*rewards), k, 1.0) == pytest.approx(share)


def test_an_answer_is_right_from_a_reward_on():
    of_half = pass_at_k(answers(0.5, 0.0), 1, correct_reward=0.5)
    assert (of_half, pass_at_k(answers(0.5, 0.0), 1, correct_reward=1.0)) == (0.5, 0.0)


def test_pass_counts_are_powers_of_two_and_the_number_itself():
    assert [pass_counts(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_a_metric_that_no_round_would_have_is_refused():
    for metric, message in [
        ("accuracy", r"eval.metric = 'accuracy': with eval.samples = 4 there are mean, pass@1"),
        ("pass@3", "pass@3"),
        ("letters:mean", "the data sources are sums"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check_metric(metric, samples=4, sources={"sums"})


def test_rounds_without_gain_are_counted_since_the_best():
    for scores, min_gain, barren in [
        ([0.1, 0.2, 0.3], 0.0, 0),
        ([0.3, 0.2, 0.3], 0.0, 2),
        ([0.3, 0.31, 0.32], 0.05, 2),
        ([0.1, 0.5, 0.2, 0.1], 0.0, 2),
        ([], 0.0, 0),
    ]:
        assert rounds_without_gain(list(enumerate(scores)), min_gain) == barren


def points(*means: float) -> list[EvalPoint]:
    plan = eval_plan(1)
    return [
        plan.point(EvalRound(step=10 * i, num_problems=1, answers={0: answers(mean)}))
        for i, mean in enumerate(means)
    ]


def test_the_run_ends_at_its_target_or_when_patience_is_over():
    assert eval_plan(1, target=0.8).verdict(points(0.2, 0.7)) == ""
    assert "mean is 0.800 at step 10" in eval_plan(1, target=0.8).verdict(points(0.2, 0.8))
    assert eval_plan(1, patience=2).verdict(points(0.5, 0.4)) == ""
    verdict = eval_plan(1, patience=2).verdict(points(0.5, 0.4, 0.5))
    assert "2 evaluations brought no gain over mean = 0.500 at step 0" in verdict
    assert eval_plan(1).verdict(points(0.5, 0.4, 0.1)) == ""
