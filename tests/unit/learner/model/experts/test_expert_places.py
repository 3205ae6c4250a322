"""Tokens sorted by expert, their way there and back."""

import torch

from slipstream.learner.model.experts.expert_places import Places

EXPERTS = torch.tensor([[3, 0], [0, 1], [3, 1]])  # of three tokens; nobody chose expert 2


def test_tokens_lie_by_expert_and_an_experts_in_their_order():
    places = Places.of(EXPERTS, 4)
    assert places.tokens.tolist() == [0, 1, 1, 2, 0, 2]
    assert places.ends.tolist() == [2, 4, 4, 6]
    assert places.ends.dtype == torch.int32
    assert places.rows.tolist() == [[4, 0], [1, 2], [5, 3]]
    weights = torch.tensor([[0.3, 0.0], [10.0, 10.1], [20.3, 20.1]])
    assert places.chosen(weights).tolist() == weights.flatten()[[1, 2, 3, 5, 0, 4]].tolist()


def test_gathers_there_and_back_are_the_gradients_of_each_other():
    places = Places.of(EXPERTS, 4)
    tokens = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(places.taken, (tokens,))
    assert torch.autograd.gradcheck(places.summed, (rows,))
    assert places.summed(places.taken(tokens)).allclose(2 * tokens)


def test_a_sum_of_narrow_rows_is_rounded_once():
    places = Places.of(torch.arange(3).view(1, 3), 3)
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert places.summed(rows).tolist() == [[258.0]], "256 + 1 is 256 in bfloat16"


def test_no_token_has_no_place():
    places = Places.of(EXPERTS[:0], 4)
    assert places.ends.tolist() == [0, 0, 0, 0]
    assert places.summed(places.taken(torch.empty(0, 5))).shape == (0, 5)
