"""Attention with windows and sinks against a softmax over whole sequences, in float64."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from slipstream.learner.model.cuda_attention import AttentionBounds
from slipstream.learner.model.windowed_attention import windowed_attention

SCALE = 0.4
# First tokens of sequences: one alone, one of a window, one longer; then with keys whose queries
# another sequence has, and one without queries.
ALL = [0, 1, 4, 17], [0, 1, 4, 17]
SHARED = [0, 2, 2, 7], [0, 6, 9, 20]


def bounds_of(queries: list[int], keys: list[int]) -> AttentionBounds:
    most = (max(end - first for first, end in pairwise(ends)) for ends in (queries, keys))
    return AttentionBounds(
        torch.tensor(queries, dtype=torch.int32), torch.tensor(keys, dtype=torch.int32), *most
    )


def by_softmax(
    given: list[Tensor], queries: list[int], keys: list[int], window: int | None, has_sinks: bool
) -> Tensor:
    """Each query's softmax over the keys that it sees, and its sink, which has no value."""
    query, key, value, sinks = given
    key, value = (t.repeat_interleave(query.size(1) // key.size(1), 1) for t in (key, value))
    outputs = []
    for (first, end), (first_key, end_key) in zip(pairwise(queries), pairwise(keys), strict=True):
        for row in range(first, end):
            last = end_key - (end - row)  # its own key
            begin = first_key if window is None else max(first_key, last + 1 - window)
            scores = SCALE * torch.einsum("hd,khd->hk", query[row], key[begin : last + 1])
            if has_sinks:
                scores = torch.cat([scores, sinks[:, None]], -1)
            shares = scores.softmax(-1)[:, : last + 1 - begin]
            outputs.append(torch.einsum("hk,khd->hd", shares, value[begin : last + 1]))
    return torch.stack(outputs)


@pytest.mark.parametrize("has_sinks", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(("queries", "keys"), [ALL, SHARED])
def test_values_and_gradients_are_those_of_the_softmax(
    queries: list[int], keys: list[int], window: int | None, has_sinks: bool
):
    seeded = torch.Generator().manual_seed(3)
    shapes = [(queries[-1], 4, 6), (keys[-1], 2, 6), (keys[-1], 2, 6), (4,)]
    given = [
        torch.randn(shape, generator=seeded, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    ]
    asked = torch.randn(shapes[0], generator=seeded, dtype=torch.float64)
    sinks = given[3] if has_sinks else None
    output = windowed_attention(
        *given[:3], bounds_of(queries, keys), SCALE, window=window, sinks=sinks
    )
    expected = by_softmax(given, queries, keys, window, has_sinks)
    torch.testing.assert_close(output, expected)
    leaves = given if has_sinks else given[:3]
    found = torch.autograd.grad(output, leaves, asked)
    for gradient, true in zip(found, torch.autograd.grad(expected, leaves, asked), strict=True):
        torch.testing.assert_close(gradient, true)


def test_a_sink_of_great_weight_leaves_nothing_and_of_none_changes_nothing():
    query, key = torch.randn(5, 2, 4), torch.randn(5, 2, 4)
    bounds = bounds_of([0, 5], [0, 5])
    plain = windowed_attention(query, key, key, bounds, SCALE)
    for score, factor in ((1e4, 0.0), (-1e4, 1.0)):
        sinks = torch.full((2,), score)
        found = windowed_attention(query, key, key, bounds, SCALE, sinks=sinks)
        torch.testing.assert_close(found, factor * plain)
