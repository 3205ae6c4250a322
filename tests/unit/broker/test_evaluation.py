import pytest

from broker.evaluation import EvalPlan, EvalRound
from wire.versions import PolicyVersion


@pytest.mark.parametrize(
    ("plan", "due"),
    [
        (EvalPlan(num_problems=5, total_steps=10), [0, 10]),
        (EvalPlan(num_problems=5, total_steps=10, every_steps=4), [0, 4, 8, 10]),
        (EvalPlan(num_problems=5, total_steps=10, before_train=False), [10]),
        (EvalPlan(num_problems=5, total_steps=10, every_steps=5, at_end=False), [0, 5]),
        (EvalPlan(num_problems=0, total_steps=10, every_steps=1), []),
    ],
)
def test_rounds_are_due_before_during_and_after_training(plan: EvalPlan, due: list[int]):
    assert [step for step in range(11) if plan.is_due(step)] == due


def test_a_round_is_complete_when_every_problem_was_answered_or_dropped():
    eval_round = EvalRound(step=3, num_problems=3, next_problem=1)
    assert eval_round.unissued == 2
    eval_round.rewards += [1.0, 0.0]
    assert not eval_round.complete
    eval_round.num_dropped = 1
    assert eval_round.complete


def test_dropped_problems_are_not_counted_as_wrong():
    eval_round = EvalRound(step=3, num_problems=3, rewards=[1.0, 0.0], num_dropped=1)
    eval_round.versions |= {PolicyVersion(1, 4), PolicyVersion(1, 3)}
    point = eval_round.point()
    assert (point.exact_match, point.num_answers, point.num_dropped) == (0.5, 2, 1)
    assert point.versions == (PolicyVersion(1, 3), PolicyVersion(1, 4))


def test_a_round_without_answers_has_a_score_of_zero_and_says_so():
    point = EvalRound(step=0, num_problems=2, num_dropped=2).point()
    assert (point.exact_match, point.num_answers) == (0.0, 0)
