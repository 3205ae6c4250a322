"""A group that outlives publishes; with engines: integration/test_weight_bus.py."""

from types import SimpleNamespace

import pytest
import torch

from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.relay.transports.base import RelayState
from slipstream.weightbus.relay.transports.collective import Collective
from slipstream.wire.errors import PublishError


async def test_the_memory_of_each_learner_is_pinned_though_the_group_stays(
    caplog: pytest.LogCaptureFixture,
):
    pinned: list[str] = []

    def refuse() -> None:
        raise PublishError("the weights' memory cannot be pinned: CUDA error 2")

    transport = Collective(WeightBusSection(), RelayState())
    member = SimpleNamespace(name="generator-0")
    group = SimpleNamespace(device=torch.device("cuda", 0))
    transport._group, transport._members = group, [member]  # type: ignore[assignment, list-item]
    for pin in (lambda: pinned.append("first"), lambda: pinned.append("next"), refuse):
        await transport.prepare(SimpleNamespace(pin=pin), [member])  # type: ignore[arg-type, list-item]
    assert transport._group is group
    assert pinned == ["first", "next"]
    assert "cannot be pinned: CUDA error 2; copies to the GPU are slow" in caplog.text
