import torch

from slipstream.learner.model.experts.expert_choices import FREE, ExpertChoices
from slipstream.learner.model.experts.routing_rules import chosen_experts, scores_of, weights_of


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


def stated_replay(logits: torch.Tensor, engine: torch.Tensor) -> torch.Tensor:
    """g_i = I_i exp(s_i) / sum_j I_j exp(s_j), with I of the engine and s of the learner.

    Rollout routing replay (Ma et al., arXiv 2510.11370), token by token.
    """
    rows = []
    for row, chosen in zip(logits, engine.tolist(), strict=True):
        powers = [float(i in chosen) * s.exp() for i, s in enumerate(row)]
        rows.append(torch.stack(powers) / sum(powers))
    return torch.stack(rows)


def test_replayed_experts_have_the_learners_weights_and_its_gradient():
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    given = torch.tensor([[4, 1], [0, 5], [FREE, FREE], [3, 2]], dtype=torch.int16)
    own = chosen_experts(scores_of(logits, "softmax"), count=2)
    engine = torch.where(given == FREE, own, given.long())
    assert not torch.equal(engine.sort().values, own.sort().values)
    mix = torch.linspace(-1.0, 2.0, 24).view(4, 6)

    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    scores = scores_of(ours, "softmax")
    chosen = ExpertChoices(given={1: given}).decided(1, own)
    weights = weights_of(scores, chosen, is_share=True, factor=1.0)
    everywhere = torch.zeros_like(scores).scatter(-1, chosen, weights)
    expected = stated_replay(theirs, engine)
    torch.testing.assert_close(everywhere, expected)
    (everywhere * mix).sum().backward()
    (expected * mix).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert (
        weights_of(scores, chosen, is_share=False, factor=2.0) == 2 * scores.gather(1, chosen)
    ).all()
