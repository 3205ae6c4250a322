"""Tokens follow their probabilities, and seed and position alone decide them."""

import pytest
import torch

from slipstream.generators.sglang.seeded_sampling import (
    choose,
    sampling_from_probs,
    sampling_from_truncated_probs,
    uniform,
)


def seeds(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 2**63 - 1, (count,), generator=generator, dtype=torch.int64)


def test_numbers_are_uniform_over_seeds_and_over_positions():
    over_seeds = uniform(seeds(20_000), torch.full((20_000,), 7))
    over_positions = uniform(torch.full((20_000,), 12345), torch.arange(20_000))
    for numbers in (over_seeds, over_positions):
        counts = torch.histc(numbers.float(), bins=20, min=0, max=1)
        chi_square = ((counts - 1000) ** 2 / 1000).sum()
        assert chi_square < 43.8  # 19 degrees of freedom, 0.1%
        neighbors = torch.corrcoef(torch.stack((numbers[:-1], numbers[1:])))[0, 1]
        assert abs(neighbors) < 0.03


def test_frequencies_are_the_probabilities():
    probs = torch.softmax(torch.randn(30, generator=torch.Generator().manual_seed(2)), dim=0)
    count = 30_000
    tokens = choose(probs.expand(count, -1), seeds(count), torch.zeros(count))
    expected = probs.double() * count
    chi_square = ((torch.bincount(tokens, minlength=30) - expected) ** 2 / expected).sum()
    assert chi_square < 58.3  # 29 degrees of freedom, 0.1%


def test_row_depends_only_on_its_own_seed_and_position():
    probs = torch.softmax(torch.randn(8, 50, generator=torch.Generator().manual_seed(3)), dim=1)
    rows, positions = seeds(8), torch.arange(8)
    together = choose(probs, rows, positions)
    alone = [choose(probs[i : i + 1], rows[i : i + 1], positions[i : i + 1]) for i in range(8)]
    assert together.tolist() == [int(token) for token in alone]


def test_impossible_tokens_are_never_chosen_and_weights_need_not_sum_to_one():
    probs = torch.zeros(5_000, 9)
    probs[:, 2], probs[:, 7] = 0.02, 0.06
    tokens = choose(probs, seeds(5_000), torch.arange(5_000))
    assert set(tokens.tolist()) == {2, 7}
    assert 0.22 < (tokens == 2).float().mean() < 0.28


def truncated(probs: torch.Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> torch.Tensor:
    rows = len(probs)
    return sampling_from_truncated_probs(
        probs,
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        min_p > 0,
        seeds(rows),
        torch.arange(rows),
        max_top_k=None,
    )


def test_truncation_keeps_the_likeliest_tokens_in_their_proportions():
    probs = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]).expand(6_000, -1)
    by_count = torch.bincount(truncated(probs, 2, 1.0), minlength=5) / 6_000
    assert by_count[[0, 2, 4]].sum() == 0
    assert abs(by_count[1] - 0.4 / 0.7) < 0.03
    assert set(truncated(probs, 1 << 30, 0.6).tolist()) == {1, 3}
    assert set(truncated(probs, 1 << 30, 1.0, 0.3).tolist()) == {1, 3, 4}
    assert set(truncated(probs, 1, 1.0).tolist()) == {1}


def test_kept_tokens_come_with_the_chosen_one_and_their_probabilities_descending():
    probs = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]).expand(200, -1)
    alone = truncated(probs, 3, 0.8)
    chosen, weights, token_ids, weight = sampling_from_truncated_probs(
        probs,
        torch.full((200,), 3),
        torch.full((200,), 0.8),
        torch.zeros(200),
        False,
        seeds(200),
        torch.arange(200),
        return_filtered_probs=True,
    )
    assert torch.equal(chosen, alone)
    assert chosen.dtype == token_ids.dtype == torch.int32
    assert token_ids[0].tolist() == [1, 3, 4, 0, 2]
    assert weights[0].tolist() == pytest.approx([0.4, 0.3, 0.15, 0, 0])
    assert torch.equal(weight, probs.gather(1, chosen.long().unsqueeze(1)).squeeze(1))


def test_a_row_that_truncates_nothing_is_decided_as_without_truncation():
    probs = torch.softmax(torch.randn(50, 90, generator=torch.Generator().manual_seed(3)), dim=1)
    assert torch.equal(
        truncated(probs, 1 << 30, 1.0), sampling_from_probs(probs, seeds(50), torch.arange(50))
    )


def test_a_top_p_of_one_leaves_nothing_out_where_rounding_makes_the_sum_more_than_one():
    probs = torch.tensor([0.7, 0.5, 0.3]).expand(3_000, -1)
    assert set(truncated(probs, 1 << 30, 1.0).tolist()) == {0, 1, 2}


def test_without_a_seed_or_a_position_tokens_are_drawn_by_chance():
    probs = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    assert sampling_from_probs(probs).tolist() == [1, 2]
    assert sampling_from_probs(probs, sampling_seed=seeds(2)).tolist() == [1, 2]
    assert sampling_from_probs(probs, positions=torch.arange(2)).tolist() == [1, 2]


def test_a_number_of_exactly_zero_chooses_no_impossible_token():
    zero = torch.zeros(1, dtype=torch.int64)
    assert uniform(zero, zero).item() == 0.0
    assert choose(torch.tensor([[0.0, 0.0, 0.4, 0.6]]), zero, zero).tolist() == [2]


def test_a_row_without_numbers_gives_a_token_of_the_vocabulary():
    nan = torch.full((3, 5), torch.nan)
    tokens = choose(nan, seeds(3), torch.arange(3))
    assert tokens.tolist() == [4, 4, 4]
