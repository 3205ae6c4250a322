import math
from pathlib import Path

import pytest
import torch

from slipstream.learner.model.adapters.low_rank import drawn, refuse_no_numbers
from slipstream.wire.errors import ConfigError


def test_a_is_drawn_from_the_seed_and_the_name_as_peft_draws_it():
    first = drawn(4, 64, seed=1, name="model.layers.0.self_attn.q_proj.weight")
    assert first.equal(drawn(4, 64, seed=1, name="model.layers.0.self_attn.q_proj.weight"))
    others = [
        drawn(4, 64, seed=2, name="model.layers.0.self_attn.q_proj.weight"),
        drawn(4, 64, seed=1, name="model.layers.1.self_attn.q_proj.weight"),
    ]
    assert not any(first.equal(other) for other in others)
    linear = torch.nn.Linear(64, 4, bias=False)
    torch.nn.init.kaiming_uniform_(linear.weight, a=math.sqrt(5))  # as in peft
    for weight in (first, linear.weight.detach()):
        assert 0.11 < float(weight.abs().max()) <= 1 / 8
        assert 0.5 < float(weight.std() * math.sqrt(3) * 8) < 1.5


def test_an_adapter_begins_with_finite_floats():
    for tensor, message in [
        (torch.tensor([0.0, float("nan")]), "tensor a must hold finite numbers"),
        (torch.tensor([0.0, float("inf")]), "tensor a must hold finite numbers"),
        (torch.tensor([0, 1]), r"tensor a must be of torch.float64, .*, got torch.int64"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), "got torch.float8_e4m3fn"),
    ]:
        refuse_no_numbers("a", torch.zeros(2, dtype=torch.bfloat16), Path("folder"))
        with pytest.raises(ConfigError, match=message):
            refuse_no_numbers("a", tensor, Path("folder"))
