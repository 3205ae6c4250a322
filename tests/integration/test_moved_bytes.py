"""A learner step moves no more bytes than stated, in each of its parts; a pass more fails here.

Counted of a real step of a small model in bfloat16, with kernels where a GPU has kernels. From
shapes and not from what runs: products with float32 results, RMSNorm and attention, of each what
one operator takes and gives (a CPU computes them by several), and gathers.
"""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch import Tensor

from tests.support.moved_bytes import LOGITS, MovedBytes
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration
_BARS = {  # the bound of each group, above it its unit
    # Factors and results of three products of each weight, four of the output layer's.
    "products": 0.94,
    # Passes over [T, V] float32, forward and backward; products write two of them.
    "logits": 31.6,
    # Passes over [T, H] float32 beside the logits: statistics, the hidden states' gradient.
    "rows": 12.0,
    # Passes over [T, I] bfloat16 in each layer, between the products.
    "mlp": 20.1,
    # Passes over [T, H] bfloat16 in each layer; 9.25 are those of attention, from shapes.
    "attention": 21.5,
    # Bytes per element of queries and keys in each layer, forward and backward.
    "rotary": 108.0,
    # Passes over [T, H] bfloat16 for each norm; 5 are RMSNorm's, from shapes, the others add up
    # the gradients of a residual.
    "norms": 7.6,
    # Passes over [V, H] bfloat16 in each microbatch: the gradient of a tied embedding.
    "embedding": 4.3,
    # Passes over [T, H] bfloat16: residuals, the last hidden states in float32, the loss.
    "other": 39.0,
    # Bytes per parameter in each microbatch, beside what products move.
    "accumulation": 10.0,
    # Bytes per parameter: the gradients' zeros, their norm and clipping, AdamW (28), bfloat16.
    "update": 58.1,
}
_SLACK = 0.1  # share that a bound may be above what is counted


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> Counter[str]:
    """Return what a step moves, by group, in the units of the bars."""
    folder = tmp_path_factory.mktemp("model")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.step_bytes", folder],
        env={**os.environ, "TRITON_INTERPRET": "1"},  # noqa: TID251 handed on
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    moved: Counter[str] = Counter()
    for row in json.loads(done.stdout):
        moved[row["group"]] += row["units"]
    return moved


@pytest.mark.parametrize(("group", "bound"), _BARS.items())
def test_a_step_moves_no_more_bytes_than_stated(units: Counter[str], group: str, bound: float):
    assert set(units) == set(_BARS)
    assert bound * (1 - _SLACK) < units[group] <= bound


def moved(change, *tensors: Tensor) -> int:  # noqa: ANN001 any function
    with MovedBytes(is_logits=lambda _: False) as counter:
        change(*tensors)
    return sum(counter.by_group().values())


def test_operators_move_the_memory_of_what_they_take_and_give():
    x, y = torch.ones(4, 8), torch.ones(4, 1)
    assert moved(lambda: x + x) == 256, "x once, and the sum"
    assert moved(lambda: x + y.expand(4, 8)) == 128 + 16 + 128
    assert moved(lambda: x.mul_(2)) == 256
    assert moved(lambda: x.copy_(y.expand(4, 8))) == 16 + 128
    assert moved(lambda: x.zero_()) == 128
    assert moved(lambda: x[:, :2].t().reshape(4, 2).bfloat16()) == 2 * 32 + 32 + 16
    assert moved(lambda: (torch.empty(8), x.view(-1)[3:], x.detach())) == 0
    assert moved(lambda: x.index_select(0, torch.tensor([1]))) == 2 * 32 + 8
    assert moved(lambda: torch.mm(x, x.t(), out=torch.empty(4, 4))) == 2 * 128 + 64


def test_a_backward_pass_is_of_the_group_of_its_forward_pass():
    class Chain:
        @staticmethod
        def inner(x: Tensor) -> Tensor:
            return x.exp()

        @staticmethod
        def outer(x: Tensor) -> Tensor:
            return Chain.inner(x.sin()) * 2

    counter = MovedBytes(is_logits=lambda _: False)
    counter.grouped(Chain, "inner", "mlp")
    counter.grouped(Chain, "outer", "norms")
    with counter:
        Chain.outer(torch.ones(8, requires_grad=True)).sum().backward()
    names = {group: {n for g, n in counter.moved if g == group} for group, _ in counter.moved}
    assert names["mlp"] == {"exp", "mul"}
    assert names["norms"] == {"sin", "cos", "mul"}
    assert counter.moved["mlp", "exp"] == 64
    assert counter.moved["mlp", "mul"] == 96


def test_logits_are_told_from_rows():
    class Head:
        @staticmethod
        def read(x: Tensor, weight: Tensor) -> Tensor:
            return (x @ weight).exp().sum(-1).log()

    counter = MovedBytes(is_logits=lambda tensor: tensor.shape == (4, 8))
    counter.grouped(Head, "read", LOGITS)
    x, weight = torch.ones(4, 4), torch.ones(4, 8)
    with counter:
        Head.read(x, weight)
    assert counter.by_group() == {"products": 64 + 128, LOGITS: 4 * 128 + 16, "rows": 32}
