import math

import numpy as np
import pytest

from slipstream.deploy.preflight.align.compare import compare, difference, whole
from slipstream.wire.models.alignment import LOGPROBS, point, rows_of

OUTPUT = np.array([[3.0, 4.0], [0.0, 5.0]])


def test_outputs_differ_by_a_share_of_their_size():
    moved = OUTPUT + np.array([[0.05, 0.0], [0.0, 0.0]])
    expected = math.sqrt(0.05**2 / 4) / math.sqrt((9 + 16 + 25) / 4)
    assert difference("layer 0 mlp", moved, OUTPUT) == pytest.approx(expected)
    assert difference("layer 0 mlp", np.zeros((2, 2)), np.zeros((2, 2))) == 0.0


def test_experts_differ_by_the_share_of_tokens_whatever_their_order():
    one = np.array([[1, 2], [3, 4], [5, 6], [7, 8]])
    other = np.array([[2, 1], [3, 4], [5, 9], [7, 8]])
    assert difference("layer 3 experts", one, other) == 0.25


def test_logprobs_differ_by_the_largest_difference_in_nats():
    assert difference(LOGPROBS, np.array([[-1.0], [-2.0]]), np.array([[-1.5], [-2.1]])) == 0.5


@pytest.mark.parametrize("other", [OUTPUT[:1], np.array([[np.nan, 0.0], [0.0, 0.0]])])
def test_another_shape_or_what_is_no_number_is_infinitely_far(other: np.ndarray):
    assert difference("layer 0 mlp", other, OUTPUT) == math.inf


def test_the_first_point_apart_is_named_in_the_order_of_the_layers():
    names = [point(10, "mlp"), point(2, "mlp"), point(2, "attention"), LOGPROBS]
    one = dict.fromkeys(names, OUTPUT[:, :1])
    other = one | dict.fromkeys((names[0], names[1], LOGPROBS), 2 * OUTPUT[:, :1])
    result = compare(("a", one), ("b", other | {"layer 0 mlp": OUTPUT}), tolerance=1e-4)
    assert [found.point for found in result.points] == [names[2], names[1], names[0], LOGPROBS]
    assert result.alone == ("layer 0 mlp",), "what is not compared is named"
    assert result.first_apart is not None
    assert result.first_apart.point == "layer 2 mlp"
    same = compare(("a", one), ("b", one), tolerance=0.0)
    assert same.first_apart is None


def test_the_parts_of_ranks_are_put_together_by_their_tokens():
    name = point(0, "mlp")
    ranks = [
        {name: OUTPUT[1:], rows_of(name): np.array([1]), LOGPROBS: OUTPUT[:, :1]},
        {name: OUTPUT[:1], rows_of(name): np.array([0])},
    ]
    found = whole(ranks, 2)
    assert found.keys() == {name, LOGPROBS}
    assert np.array_equal(found[name], OUTPUT)
    assert whole(ranks[:1], 2).keys() == {LOGPROBS}, "a token of the layer is nobody's"
