import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from slipstream.algos.corrections import _second_moment_limit
from slipstream.algos.packing import Packing
from slipstream.algos.reduce import cumulated
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
