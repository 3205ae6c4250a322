"""The engine's view of our tensors: fused projections, padded vocabulary, its own digest."""

import hashlib

import pytest
import torch
from torch import Tensor

from slipstream.weightbus.relay.engine_checksums import differing, expected_checksums

GENERATOR = torch.Generator().manual_seed(1)


def weights(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def test_a_plain_tensor_keeps_its_name():
    norm = weights(6)
    assert expected_checksums({"model.norm.weight": norm}) == {"model.norm.weight": digest(norm)}


def test_projections_are_fused_in_the_order_of_the_engine_whatever_ours_is():
    q, k, v = weights(4, 3), weights(2, 3), weights(2, 3)
    gate, up = weights(32, 3), weights(32, 3)
    prefix = "model.layers.0"
    found = expected_checksums(
        {
            f"{prefix}.self_attn.v_proj.weight": v,
            f"{prefix}.self_attn.q_proj.weight": q,
            f"{prefix}.mlp.up_proj.weight": up,
            f"{prefix}.self_attn.k_proj.weight": k,
            f"{prefix}.mlp.gate_proj.weight": gate,
        }
    )
    assert found == {
        f"{prefix}.self_attn.qkv_proj.weight": digest(torch.cat([q, k, v])),
        f"{prefix}.mlp.gate_up_proj.weight": digest(torch.cat([gate, up])),
    }


def test_biases_and_layers_are_fused_apart():
    names = [f"model.layers.{i}.self_attn.{p}_proj.bias" for i in range(2) for p in "qkv"]
    found = expected_checksums({name: weights(2) for name in names})
    assert sorted(found) == [f"model.layers.{i}.self_attn.qkv_proj.bias" for i in range(2)]
    assert len(set(found.values())) == 2


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize(("rows", "padded"), [(19, 64), (64, 64), (65, 128)])
def test_the_vocabulary_is_padded_with_zeros_to_a_multiple_of_64(name: str, rows: int, padded: int):
    table = weights(rows, 3)
    whole = torch.cat([table, torch.zeros(padded - rows, 3)])
    assert expected_checksums({name: table}) == {name: digest(whole)}


@pytest.mark.parametrize(("inner", "padded"), [(5, 32), (32, 32), (33, 64)])
def test_the_inner_size_is_padded_with_zeros_to_a_multiple_of_32(inner: int, padded: int):
    gate, up, down = weights(inner, 3), weights(inner, 3), weights(4, inner)
    mlp = "model.layers.0.mlp"
    found = expected_checksums(
        {
            f"{mlp}.gate_proj.weight": gate,
            f"{mlp}.up_proj.weight": up,
            f"{mlp}.down_proj.weight": down,
        }
    )
    rows, columns = torch.zeros(padded - inner, 3), torch.zeros(4, padded - inner)
    assert found == {
        f"{mlp}.gate_up_proj.weight": digest(torch.cat([gate, rows, up, rows])),
        f"{mlp}.down_proj.weight": digest(torch.cat([down, columns], dim=1)),
    }


def test_memory_layout_does_not_matter_but_every_bit_does():
    table = weights(3, 5)
    turned = table.t().contiguous().t()
    assert expected_checksums({"a": turned}) == expected_checksums({"a": table})
    changed = table.clone()
    changed[2, 4] += 1e-6
    assert expected_checksums({"a": changed}) != expected_checksums({"a": table})


def test_differences_are_named_in_both_directions():
    assert differing({"a": "1", "b": "2"}, {"a": "1", "b": "2"}) == []
    assert differing({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == ["a", "b", "c"]


def test_a_tied_output_layer_may_be_listed_twice_but_only_if_it_is_equal():
    expected = {"model.embed_tokens.weight": "1"}
    assert differing(expected, expected | {"lm_head.weight": "1"}) == []
    assert differing(expected, expected | {"lm_head.weight": "2"}) == ["lm_head.weight"]
    assert differing(expected | {"lm_head.weight": "1"}, expected) == ["lm_head.weight"]
