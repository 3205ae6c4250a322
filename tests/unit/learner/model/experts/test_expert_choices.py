"""Which experts a router gets to choose again, and what is recorded of its choice."""

from typing import Any, cast

import pytest
import torch

from slipstream.learner.model.context import HeadShares, TokenSplit
from slipstream.learner.model.experts.expert_choices import FREE, ExpertChoices, choices_of_rank

OWN = torch.tensor([[0, 1], [2, 3], [4, 5]])


def test_a_router_without_choices_keeps_its_own():
    assert torch.equal(ExpertChoices().decided(0, OWN), OWN)


def test_given_experts_take_the_place_of_own_ones_where_they_are_known():
    given = {1: torch.tensor([[7, 6], [FREE, FREE], [0, 1]], dtype=torch.int16)}
    chosen = ExpertChoices(given=given).decided(1, OWN)
    assert chosen.tolist() == [[7, 6], [2, 3], [0, 1]]
    assert chosen.dtype == torch.int64


def test_what_a_pass_records_another_repeats():
    record: dict[int, torch.Tensor] = {}
    ExpertChoices(record=record).decided(2, OWN)
    assert record.keys() == {2}
    assert record[2].dtype == torch.int16
    assert torch.equal(ExpertChoices(given=record).decided(2, OWN.flip(0)), OWN)


@pytest.mark.parametrize("rank", [0, 1])
def test_tokens_of_another_rank_are_not_given_and_padding_is_free(rank: int):
    experts = torch.arange(5 * 3 * 2, dtype=torch.int16).view(5, 3, 2)
    split = TokenSplit(5, 8, rank, HeadShares(2, 1), cast("Any", object()))
    found = choices_of_rank(experts, split)
    assert found.keys() == {0, 1, 2}
    padded = torch.cat([experts, torch.full((3, 3, 2), FREE, dtype=torch.int16)])
    for layer, given in found.items():
        assert torch.equal(given, padded[4 * rank : 4 * rank + 4, layer])
    for part in range(2):  # sequence parallelism divides them again
        found = choices_of_rank(experts, split, ranks=2, rank=part)
        first = 4 * rank + 2 * part
        assert torch.equal(found[0], padded[first : first + 2, 0])


def test_a_microbatch_without_a_token_is_padding_alone():
    found = choices_of_rank(torch.zeros(0, 2, 1, dtype=torch.int16), TokenSplit(0, 1))
    assert {layer: given.tolist() for layer, given in found.items()} == {0: [[FREE]], 1: [[FREE]]}
