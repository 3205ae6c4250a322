"""A learner step moves no more bytes than stated, in each of its parts: a pass more fails here.

Counted of a real step of a small model in bfloat16, with the kernels that a GPU has. Products with
float32 results, RMSNorm and attention are counted from the shapes of what they take and give, for a
CPU computes each of them by several operators; all else is counted from what runs.
"""

import json
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.moved_bytes import MovedBytes
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration
_BARS = {
    # Bytes per token of what products read and write, in this model of wide weights.
    "products": 32_000.0,
    # Passes over [C, V] float32, C tokens before chosen ones, forward and backward; products write
    # two of them.
    "logits": 4.6,
    # Passes over [C, H] float32 beside the logits: statistics, the hidden states' gradient.
    "rows": 8.2,
    # Passes over [T, I] bfloat16 in each layer, between the products.
    "mlp": 8.1,
    # Passes over [T, H] bfloat16 in each layer; 9.25 are those of attention, from shapes.
    "attention": 21.5,
    # Bytes per element of queries and keys in each layer: 8, and the angles of these few heads.
    "rotary": 12.4,
    # Passes over [T, H] bfloat16 for each norm: 5 of RMSNorm, from shapes, and the sum of a
    # residual's gradients.
    "norms": 7.6,
    # Passes over [T, H] bfloat16: an embedding's rows, and their gradients.
    "embedding": 4.1,
    # Passes over [T, H] bfloat16: residuals, the last hidden states in float32, those before chosen
    # tokens and their gradient, the loss.
    "other": 50.0,
    # Bytes per parameter in each microbatch: 8 by the products, and the other gradients' sums.
    "accumulation": 8.3,
    # Bytes per parameter: zeros and norm of gradients (8), AdamW that clips them (32), weights in
    # bfloat16 (6).
    "update": 46.1,
}
_SLACK = 0.1  # share that a bar may be above what is counted


class Row(NamedTuple):
    """What an operator or a kernel moves in its group."""

    group: str
    name: str
    units: float  # bytes in the unit of the group's bar
    per_token: float  # bytes


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """Return what a step moves, the most first."""
    work = tmp_path_factory.mktemp("work")
    command = [sys.executable, "-m", "tests.support.ranks.step_bytes", work]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    return [Row(*row) for row in json.loads((work / "0.json").read_text())]


def test_every_part_of_a_step_has_a_bar(rows: list[Row]):
    assert {row.group for row in rows} == set(_BARS)


@pytest.mark.parametrize(("group", "bar"), _BARS.items())
def test_a_step_moves_no_more_bytes_than_stated(rows: list[Row], group: str, bar: float):
    of_group = [row for row in rows if row.group == group]
    assert bar * (1 - _SLACK) < sum(row.units for row in of_group) <= bar, of_group


def test_operators_move_the_memory_of_what_they_take_and_give():
    x, y = torch.ones(4, 8), torch.ones(4, 1)
    cases = [
        (lambda: x + x, 128 + 128),  # x is read once
        (lambda: x + y.expand(4, 8), 128 + 16 + 128),
        (lambda: x.mul_(2), 128 + 128),
        (lambda: x.copy_(y.expand(4, 8)), 16 + 128),
        (lambda: x[:, :2].t().bfloat16(), 32 + 16),
        (lambda: x.index_select(0, torch.tensor([1])), 32 + 8 + 32),
        (lambda: torch.mm(x, x.t(), out=torch.empty(4, 4)), 2 * 128 + 64),
        (lambda: (torch.empty(8), x.view(-1)[3:], x.detach()), 0),
    ]
    for number, (change, expected) in enumerate(cases):
        with MovedBytes(is_logits=lambda _: False) as counter:
            change()
        assert counter.by_group().total() == expected, number


def test_a_backward_pass_is_of_the_group_of_its_forward_pass():
    class Layer:
        @staticmethod
        def inner(x: Tensor) -> Tensor:
            return x.exp()

        @staticmethod
        def outer(x: Tensor) -> Tensor:
            return Layer.inner(x.sin())

    counter = MovedBytes(is_logits=lambda _: False)
    counter.grouped(Layer, "inner", "mlp")
    counter.grouped(Layer, "outer", "norms")
    with counter:
        Layer.outer(torch.ones(8, requires_grad=True)).backward(torch.ones(8))
    assert counter.moved["mlp", "exp"] == 2 * 32
    assert counter.moved["mlp", "mul"] == 3 * 32, "the gradient of exp"
    assert counter.moved["norms", "cos"] == 2 * 32
