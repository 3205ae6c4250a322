import sys

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from docs.generate.evidence import DEFINITION, proves
from slipstream.algos.corrections import _second_moment_limit
from slipstream.algos.packing import Packing
from slipstream.algos.reduce import Denominators, cumulated, group_divisors, reduced
from slipstream.algos.returns import _from_start


class FloatsInOrder(TorchDispatchMode):
    """Notes which function adds floats in order, and where."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    @override
    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> object:  # noqa: ANN001
        if func is torch.ops.aten.cumsum.default and args[0].dtype.is_floating_point:
            frame = sys._getframe(1)
            while not frame.f_globals["__name__"].startswith("slipstream."):
                frame = frame.f_back
            self.seen.append((frame.f_code.co_name, args[0].device.type))
        return func(*args, **(kwargs or {}))


def test_floats_of_a_gpu_are_added_in_order_on_the_host():
    with FakeTensorMode(), FloatsInOrder() as added:
        assert cumulated(torch.empty(7, device="cuda", dtype=torch.float64)).is_cuda
    assert added.seen == [("cumulated", "cpu")]


def test_nothing_else_adds_floats_in_order():
    values = torch.rand(7, dtype=torch.float64)
    packing = Packing.of(torch.ones(7, dtype=torch.bool), torch.tensor([0, 3, 7]))
    with FloatsInOrder() as added:
        _second_moment_limit(values, 0.04)
        _from_start(values, packing)
    assert [name for name, _ in added.seen] == ["cumulated"] * 3


def test_cumulated():
    assert cumulated(torch.tensor([1.0, 2.0, 4.0])).tolist() == [1.0, 3.0, 7.0]


LENGTHS, GROUPS, COPIES = (3, 1, 2, 4, 2), (0, 2, 0, 2, 1), (1, 1, 2, 1, 0)


def stated_group_mean(losses: np.ndarray) -> float:
    """The mean over prompts of the mean over all tokens of a prompt's answers (ScaleRL's loss).

    An answer that was drawn twice is written twice; of prompt 1 no answer was drawn.
    """
    answers = np.split(losses, np.cumsum(LENGTHS)[:-1])
    of_prompts = [
        np.concatenate([answers[i] for i in range(5) for _ in range(COPIES[i]) if GROUPS[i] == g])
        for g in (0, 2)
    ]
    return float(np.mean([tokens.mean() for tokens in of_prompts]))


@proves("reduce.name = group-mean-token-mean", against=DEFINITION, what="value, gradient")
@pytest.mark.parametrize("cuts", [[5], [2, 5], [1, 2, 3, 4, 5]])
def test_every_prompt_weighs_the_same_however_its_answers_are_spread(cuts: list[int]):
    losses = np.random.default_rng(0).normal(size=sum(LENGTHS))
    lengths, copies = torch.tensor(LENGTHS), torch.tensor(COPIES)
    whole = Denominators(
        num_tokens=1.0,
        num_sequences=1.0,
        group_mean=group_divisors(lengths * copies, torch.tensor(GROUPS), 3),
    )
    per_token = torch.from_numpy(losses).requires_grad_()
    total, ends = torch.zeros((), dtype=torch.float64), [0, *np.cumsum(LENGTHS)]
    for first, last in zip([0, *cuts], cuts, strict=False):
        rows = slice(ends[first], ends[last])
        packing = Packing.of(
            torch.ones(rows.stop - rows.start, dtype=torch.bool),
            torch.tensor(ends[first : last + 1]) - rows.start,
        )
        mine = whole.of(torch.arange(first, last))
        total = total + reduced(
            per_token[rows], packing, mine, "group-mean-token-mean", copies[first:last]
        )
    assert total.item() == pytest.approx(stated_group_mean(losses))
    total.backward()  # type: ignore[no-untyped-call]
    assert per_token.grad is not None
    unit = np.eye(len(losses))
    expected = [stated_group_mean(direction) for direction in unit]  # the loss is linear
    assert per_token.grad.tolist() == pytest.approx(expected)


def test_a_mean_over_groups_is_refused_without_their_divisors():
    packing = Packing.of(torch.ones(1, dtype=torch.bool), torch.tensor([0, 1]))
    counts = Denominators(num_tokens=1.0, num_sequences=1.0)
    with pytest.raises(ValueError, match="group-mean-token-mean needs Denominators"):
        reduced(torch.ones(1), packing, counts, "group-mean-token-mean")
