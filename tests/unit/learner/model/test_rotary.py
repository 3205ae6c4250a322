"""The angles of rotary embeddings; whole models against transformers: test_megatron_model.py."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.learner.model.rotary import Rotary
from slipstream.wire.models.hf_config import HfConfig, RopeParameters

CPU = torch.device("cpu")


def rotary(theta: float = 10_000.0, head: int = 8, **rope: object) -> Rotary:
    config = HfConfig(
        model_type="llama",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        head_dim=head,
        rope_theta=theta,
        rope_scaling=RopeParameters(**rope) if rope else None,  # type: ignore[arg-type]
    )
    return Rotary.of(config, CPU)


def test_only_the_difference_of_positions_counts():
    plain = rotary()
    query, key = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([0, 1, 5, 9, 40])

    def scores(shift: int) -> torch.Tensor:
        turned = plain.at(positions + shift)
        return torch.einsum("thd,shd->hts", turned.turned(query), turned.turned(key))

    assert torch.allclose(scores(0), scores(1000), atol=1e-3)
    assert not torch.allclose(scores(0), torch.einsum("thd,shd->hts", query, key), atol=1e-1)


def test_heads_keep_their_type_and_are_turned_in_float32():
    heads = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1))
    rotation = rotary().at(torch.tensor([0, 7, 9_000]))
    turned = rotation.turned(heads.bfloat16())
    assert turned.dtype == torch.bfloat16
    assert turned.equal(rotation.turned(heads.bfloat16().float()).bfloat16())


def test_llama3_keeps_fast_channels_slows_slow_ones_and_blends_between():
    plain = rotary(head=64)
    scaled = rotary(
        head=64,
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    ratio = scaled.frequencies / plain.frequencies
    turns = 8192 * plain.frequencies / (2 * math.pi)
    assert ratio[turns > 4].eq(1).all()
    assert torch.allclose(ratio[turns < 1], torch.tensor(1 / 8))
    between = ratio[(turns > 1) & (turns < 4)]
    assert len(between) > 0
    assert ((between > 1 / 8) & (between < 1)).all()
    assert scaled.scale == 1.0


def test_yarn_scales_queries_and_keys():
    for rope, scale in [({"factor": 4.0}, 0.1 * math.log(4) + 1), ({"factor": 1.0}, 1.0)]:
        scaled = rotary(rope_type="yarn", original_max_position_embeddings=64, **rope)
        assert scaled.scale == pytest.approx(scale)
        heads = torch.ones(1, 1, 8)
        assert torch.allclose(scaled.at(torch.tensor([0])).turned(heads), scale * heads)


def test_the_number_of_sequences_is_none_of_the_number_of_kernels():
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> object:  # noqa: ANN001
            self.calls += 1
            return func(*args, **(kwargs or {}))

    def calls(num_sequences: int) -> int:
        heads = torch.ones(4 * num_sequences, 2, 8)
        with Count() as count:
            rotary().at(torch.arange(4).repeat(num_sequences)).turned(heads)
        return count.calls

    assert calls(1) == calls(64)
