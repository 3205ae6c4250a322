import torch

from slipstream.learner.model.experts.routing_rules import chosen_experts, scores_of


def test_softmax_and_sigmoid_scores_are_computed_in_float32():
    logits = torch.tensor([[0.0, 2.0, -1.0]], dtype=torch.bfloat16)
    assert scores_of(logits, "softmax").dtype == torch.float32
    torch.testing.assert_close(scores_of(logits, "softmax").sum(-1), torch.ones(1))
    torch.testing.assert_close(scores_of(logits, "sigmoid"), logits.float().sigmoid())


def test_a_bias_changes_the_choice():
    scores = torch.tensor([[0.9, 0.8, 0.1, 0.2]])
    assert chosen_experts(scores, count=2).tolist() == [[0, 1]]
    bias = torch.tensor([0.0, 0.0, 1.0, 0.0])
    assert chosen_experts(scores, count=2, bias=bias).sort().values.tolist() == [[0, 2]]


def test_groups_are_ranked_by_their_best_expert_or_by_their_two_best():
    # In groups of three the second has the best expert, the first the two best.
    scores = torch.tensor([[0.6, 0.6, 0.0, 0.9, 0.0, 0.0, 0.5, 0.1, 0.1]])

    def chosen(group_score: str, taken: int = 1) -> list[int]:
        (row,) = chosen_experts(
            scores, count=2, groups=3, taken_groups=taken, group_score=group_score
        ).tolist()
        return sorted(row)

    assert 3 in chosen("best")
    assert chosen("two best") == [0, 1]
    assert chosen("best", taken=2) in ([0, 3], [1, 3])


def test_no_expert_of_another_group_is_chosen_though_all_scores_are_below_zero():
    scores = torch.full((1, 4), -5.0)
    bias = torch.tensor([0.0, 0.0, -1.0, -1.0])
    chosen = chosen_experts(scores, count=2, bias=bias, groups=2, taken_groups=1)
    assert chosen.sort().values.tolist() == [[0, 1]]
