"""Rotary embeddings; whole models against transformers: test_megatron_model.py.

TRITON_INTERPRET=1 has the kernel turn heads.
"""

import math

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.algos.kernels import replaced_calls
from slipstream.learner.model.rotary import Rotary, Rotation
from slipstream.wire.models.hf_config import HfConfig, RopeParameters

CPU = torch.device("cpu")
ROUNDED = 2**-7  # to bfloat16: half of it, but Triton's interpreter cuts off what it should round


@pytest.fixture(autouse=True)
def no_kernel_replaced():
    yield
    assert replaced_calls() == 0


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


def test_a_channel_turns_by_a_power_of_the_base():
    """RoFormer (arXiv 2104.09864), section 3.2.2: theta_i = base^(-2 i / d)."""
    expected = torch.tensor([1.0, 10.0, 100.0, 1000.0]).reciprocal()
    assert torch.allclose(rotary(theta=10_000.0, head=8).frequencies, expected)


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
    exact = rotation.turned(heads.bfloat16().float())
    assert turned.dtype == torch.bfloat16
    assert torch.allclose(turned.float(), exact, rtol=ROUNDED, atol=0)


def by_complex_numbers(heads: torch.Tensor, rotation: Rotation, first: int) -> torch.Tensor:
    """Turn in float64, each pair of channels as a complex number."""
    half = rotation.cos.size(-1)
    turning, still = heads[..., first : first + 2 * half], heads[..., 2 * half :]
    paired = turning.unflatten(-1, (half, 2) if rotation.in_pairs else (2, half))
    x, y = paired.unbind(-1 if rotation.in_pairs else -2)
    turned = torch.complex(x, y) * torch.complex(rotation.cos.double(), rotation.sin.double())
    parts = torch.stack([turned.real, turned.imag], -1 if rotation.in_pairs else -2)
    if first:
        return torch.cat([heads[..., :first], parts.flatten(-2)], -1)
    return torch.cat([parts.flatten(-2), still], -1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, ROUNDED)])
@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "channels", "turning", "first"),
    [(5, 3, 8, 8, 0), (1, 1, 2, 2, 0), (0, 2, 4, 4, 0), (3, 2, 10, 6, 0), (3, 17, 11, 6, 5)],
)
def test_values_and_gradients_are_those_of_float64(
    dtype: torch.dtype,
    tolerance: float,
    in_pairs: bool,
    tokens: int,
    heads: int,
    channels: int,
    turning: int,
    first: int,
):
    seeded = torch.Generator().manual_seed(tokens)
    mixed = torch.randn(tokens, heads, 2 * channels + 3, generator=seeded).to(dtype)
    given = mixed[..., 1 : channels + 1].detach().requires_grad_()  # as of queries among keys
    gradient = torch.randn(tokens, heads, channels, generator=seeded).to(dtype)
    angles = torch.rand(tokens, 1, turning // 2, generator=seeded) * 9
    rotation = Rotation(angles.cos() * 1.3, angles.sin() * 1.3, in_pairs)
    exact = given.detach().double().requires_grad_()
    expected = by_complex_numbers(exact, rotation, first)
    expected.backward(gradient.double())
    turned = rotation.turned(given, first)
    # The gradient's strides are another order of dimensions.
    turned.backward(gradient.permute(2, 1, 0).contiguous().permute(2, 1, 0))
    assert turned.is_contiguous()
    for value, truth in [(turned, expected), (given.grad, exact.grad)]:
        assert value.dtype == dtype
        assert ((value - truth).abs() / truth.abs().clamp(min=1)).lt(tolerance).all()


def test_angles_alone_are_kept_for_the_backward_pass():
    rotation = rotary().at(torch.arange(3))
    kept: list[int] = []
    with saved_tensors_hooks(lambda saved: kept.append(saved.data_ptr()), lambda saved: saved):
        rotation.turned(torch.ones(3, 2, 8, requires_grad=True))
    assert kept == [rotation.cos.data_ptr(), rotation.sin.data_ptr()]


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
