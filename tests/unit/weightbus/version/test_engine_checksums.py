"""The engine's view of our tensors: fused projections, padded vocabulary, its own digest."""

from functools import partial
from typing import Literal

import pytest
import torch
import xxhash
from torch import Tensor
from torch.nn.functional import pad

from slipstream.weightbus.version.engine_checksums import (
    EngineLayout,
    differing,
    digest_of,
    engine_layout_of,
    expected_checksums,
    has_digest,
    hash_parts,
    joined_checksums,
)
from slipstream.weightbus.version.gpu_hash import HostTiles, tile_sums
from slipstream.weightbus.version.layout import plan_layout
from slipstream.weightbus.version.tensor_bits import bits_of
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.manifest import TensorSpec
from slipstream.wire.messages.weightbus import Join

GENERATOR = torch.Generator().manual_seed(1)


def weights(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def digest(tensor: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.contiguous().numpy().tobytes())


def gpu_hash(tensor: Tensor) -> str:
    return tile_sums([bits_of(tensor)], HostTiles()).hash()


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


def test_attention_is_split_over_the_ranks_of_one_group_only():
    q, k, v, o = weights(4, 3), weights(4, 3), weights(4, 3), weights(3, 4)
    down, embedding, table = weights(4, 128), weights(128, 3), weights(128, 3)
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    named = {
        f"{attention}.{name}_proj.weight": one
        for name, one in zip("qkvo", (q, k, v, o), strict=True)
    }
    norm = weights(3)
    named |= {"model.embed_tokens.weight": embedding, "lm_head.weight": table}
    named |= {"model.norm.weight": norm, f"{mlp}.down_proj.weight": down}
    found = expected_checksums(named, EngineLayout("cpu", 4, 2))
    assert len(found) == 4 * 6
    for rank in range(4):
        end, in_group = f" of rank {rank}" if rank else "", rank % 2
        rows = torch.cat([one.chunk(2)[in_group] for one in (q, k, v)])
        assert found[f"{attention}.qkv_proj.weight{end}"] == digest(rows)
        assert found[f"{attention}.o_proj.weight{end}"] == digest(o.chunk(2, dim=1)[in_group])
        assert found[f"model.norm.weight{end}"] == digest(norm)
        assert found[f"model.embed_tokens.weight{end}"] == digest(embedding.chunk(2)[in_group])
        assert found[f"{mlp}.down_proj.weight{end}"] == digest(down.chunk(4, dim=1)[rank])
        assert found[f"lm_head.weight{end}"] == digest(table.chunk(4)[rank])


EXPERTS, INNER = 4, 128  # no padding
MOE = "model.layers.3.mlp"


def mixture(inner: int = INNER) -> dict[str, Tensor]:
    """Return a layer's router, experts and shared expert."""
    named = {f"{MOE}.gate.weight": weights(EXPERTS, 3)}
    for prefix in (*(f"{MOE}.experts.{i}" for i in range(EXPERTS)), f"{MOE}.shared_experts"):
        named |= {f"{prefix}.{name}_proj.weight": weights(inner, 3) for name in ("gate", "up")}
        named[f"{prefix}.down_proj.weight"] = weights(3, inner)
    return named


def of_experts(named: dict[str, Tensor], name: str, dim: int, share: slice) -> list[Tensor]:
    """Return shares of a matrix of every expert."""
    matrices = (named[f"{MOE}.experts.{i}.{name}_proj.weight"] for i in range(EXPERTS))
    return [matrix[share] if dim == 0 else matrix[:, share] for matrix in matrices]


@pytest.mark.parametrize(("groups", "attention_groups"), [(1, 1), (2, 1), (4, 1), (4, 2), (2, 4)])
def test_a_rank_has_the_experts_of_its_group_in_their_order(groups: int, attention_groups: int):
    named = mixture()
    found = expected_checksums(named, EngineLayout("cpu", 4, attention_groups, groups))
    sharing, each = 4 // groups, EXPERTS // groups
    for rank in range(4):
        end = f" of rank {rank}" if rank else ""
        own, place = slice(rank // sharing * each, (rank // sharing + 1) * each), rank % sharing
        share = slice(place * INNER // sharing, (place + 1) * INNER // sharing)
        gates, ups, downs = (
            of_experts(named, name, dim, share)[own]
            for name, dim in (("gate", 0), ("up", 0), ("down", 1))
        )
        pairs = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
        assert found[f"{MOE}.experts.w13_weight{end}"] == digest(torch.cat(pairs))
        assert found[f"{MOE}.experts.w2_weight{end}"] == digest(torch.cat(downs))
        assert found[f"{MOE}.gate.weight{end}"] == digest(named[f"{MOE}.gate.weight"])
        shared = named[f"{MOE}.shared_experts.down_proj.weight"].chunk(4, dim=1)[rank]
        assert found[f"{MOE}.shared_experts.down_proj.weight{end}"] == digest(shared)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_experts_in_one_tensor_are_turned_and_split_each_by_itself(groups: int):
    """Gates and ups lie in turn here and there; a bias of outputs is the first rank's alone."""
    hidden, pairs, sharing, each = 3, 2 * INNER, 4 // groups, EXPERTS // groups
    gate_up, down = weights(EXPERTS, hidden, pairs), weights(EXPERTS, INNER, hidden)
    biases = weights(EXPERTS, pairs), weights(EXPERTS, hidden)
    names = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    named = {
        f"{MOE}.experts.{name}": one
        for name, one in zip(names, (gate_up, down, *biases), strict=True)
    }
    found = expected_checksums(named, EngineLayout("cpu", 4, 1, groups))
    for rank in range(4):
        end = f" of rank {rank}" if rank else ""
        own, place = slice(rank // sharing * each, (rank // sharing + 1) * each), rank % sharing
        rows = slice(place * pairs // sharing, (place + 1) * pairs // sharing)
        columns = slice(place * INNER // sharing, (place + 1) * INNER // sharing)
        for name, expected in (
            ("w13_weight", gate_up[own].mT[:, rows]),
            ("w2_weight", down[own].mT[:, :, columns]),
            ("w13_weight_bias", biases[0][own, rows]),
            ("w2_weight_bias", biases[1][own] if place == 0 else torch.zeros(each, hidden)),
        ):
            assert found[f"{MOE}.experts.{name}{end}"] == digest(expected.contiguous()), name


def test_a_cpu_pads_experts_for_all_ranks_though_fewer_share_them():
    named, layout = mixture(inner=40), EngineLayout("cpu", 4, 1, 2)
    found = expected_checksums(named, layout)
    downs = [pad(one, (0, 88))[:, 64:] for one in of_experts(named, "down", 1, slice(40))[2:]]
    assert found[f"{MOE}.experts.w2_weight of rank 3"] == digest(torch.cat(downs))


def test_a_members_engine_has_the_groups_that_it_joined_with():
    facts = {"name": "a", "incarnation": "1", "torch_version": "2.9"}
    join = partial(Join, **facts, device="cuda", num_ranks=8)
    assert engine_layout_of(join()) == EngineLayout("cuda", 8)
    found = engine_layout_of(join(attention_groups=4, expert_groups=2))
    assert found == EngineLayout("cuda", 8, 4, 2)
    with pytest.raises(ValueError, match="num_ranks must be a multiple of expert_groups, got 8 an"):
        join(expert_groups=3)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_experts_on_other_ranks_or_in_another_order_differ(device: Literal["cpu", "cuda"]):
    """An engine that computes other experts than its router chooses has the right tensors."""
    named, layout = mixture(), EngineLayout(device, 2, 1, 2)
    expected = expected_checksums(named, layout)

    def with_order(*order: int) -> dict[str, str]:
        moved = {
            name.replace(f"experts.{place}.", f"experts.{number}."): tensor
            for place, number in enumerate(order)
            for name, tensor in named.items()
            if f".experts.{place}." in name
        }
        return expected_checksums(named | moved, layout)

    both = [f"{MOE}.experts.{name}_weight" for name in ("w13", "w2")]
    second = [f"{name} of rank 1" for name in both]
    assert with_order(0, 1, 2, 3) == expected
    assert differing(expected, with_order(1, 0, 2, 3)) == both
    assert differing(expected, with_order(0, 1, 3, 2)) == second
    assert differing(expected, with_order(2, 3, 0, 1)) == sorted(both + second)
    split_by_rows = expected_checksums(named, EngineLayout(device, 2))
    assert differing(expected, split_by_rows) == sorted(both + second)


def test_the_inner_size_is_padded_for_every_rank_and_the_vocabulary_as_a_whole():
    gate, up, down = weights(40, 3), weights(40, 3), weights(4, 40)
    mlp, table = "model.layers.0.mlp", weights(64 * 3, 3)
    names = ("gate_proj", "up_proj", "down_proj")
    named = {f"{mlp}.{name}.weight": one for name, one in zip(names, (gate, up, down), strict=True)}
    found = expected_checksums({**named, "lm_head.weight": table}, EngineLayout("cpu", 2))
    (gates, ups), downs = ([pad(one, (0, 0, 0, 24)) for one in (gate, up)], pad(down, (0, 24)))
    for rank, end in ((0, ""), (1, " of rank 1")):
        both = torch.cat([gates.chunk(2)[rank], ups.chunk(2)[rank]])
        assert found[f"{mlp}.gate_up_proj.weight{end}"] == digest(both)
        assert found[f"{mlp}.down_proj.weight{end}"] == digest(downs.chunk(2, dim=1)[rank])
        assert found[f"lm_head.weight{end}"] == digest(table.chunk(2)[rank])


def test_on_a_gpu_only_the_vocabulary_is_padded_and_another_function_is_used():
    down, table = weights(4, 40), weights(70, 3)
    named = {"model.layers.0.mlp.down_proj.weight": down, "lm_head.weight": table}
    assert expected_checksums(named, EngineLayout("cuda", 1)) == {
        "model.layers.0.mlp.down_proj.weight": gpu_hash(down),
        "lm_head.weight": gpu_hash(pad(table, (0, 0, 0, 58))),
    }


def test_scales_of_blocks_are_fused_and_split_as_their_matrices():
    layer, experts = "model.layers.0.", "model.layers.0.mlp.experts."
    parts = {part: weights(2, 3) for part in "qkv"}
    down = {number: weights(2, 4) for number in range(2)}
    tensors = {
        **{f"{layer}self_attn.{part}_proj.weight": weights(2 * 128, 3 * 128) for part in "qkv"},
        **{f"{layer}self_attn.{p}_proj.weight_scale_inv": scales for p, scales in parts.items()},
        **{f"{experts}{n}.down_proj.weight_scale_inv": scales for n, scales in down.items()},
    }
    found = expected_checksums(tensors, EngineLayout("cpu", 2))
    for rank in range(2):
        of_rank = f" of rank {rank}" * rank
        fused = torch.cat([parts[part][rank : rank + 1] for part in "qkv"])
        assert found[f"{layer}self_attn.qkv_proj.weight_scale_inv{of_rank}"] == digest(fused)
        columns = torch.stack([down[n][:, 2 * rank : 2 * rank + 2] for n in range(2)])
        assert found[f"{experts}w2_weight_scale_inv{of_rank}"] == digest(columns)


def test_one_digest_holds_all_ranks():
    tied = {"model.embed_tokens.weight": "1", "model.embed_tokens.weight of rank 1": "2"}
    twice = {**tied, "lm_head.weight": "1", "lm_head.weight of rank 1": "2"}
    assert differing(tied, twice) == []
    assert digest_of(tied) == digest_of(twice)
    assert digest_of(tied) != digest_of({**tied, "model.embed_tokens.weight of rank 1": "3"})
    wrong = {**twice, "lm_head.weight of rank 1": "1"}
    assert differing(tied, wrong) == ["lm_head.weight of rank 1"]


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


@pytest.mark.parametrize(("ranks", "expert_groups"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("num_hosts", [1, 2, 3])
def test_hosts_of_the_learner_hash_what_they_have_and_join_it(
    ranks: int, expert_groups: int, num_hosts: int
):
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (101, 6),
        f"{layer}.self_attn.q_proj.weight": (8, 6),
        f"{layer}.self_attn.k_proj.weight": (4, 6),
        f"{layer}.self_attn.v_proj.weight": (4, 6),
        f"{layer}.input_layernorm.weight": (6,),
        **{
            f"{layer}.mlp.experts.{expert}.{part}_proj.weight": (6, 4) if part == "down" else (4, 6)
            for expert in range(6)
            for part in ("gate", "up", "down")
        },
    }
    tensors = {name: weights(*shape).bfloat16() for name, shape in shapes.items()}
    manifest = plan_layout(
        [TensorSpec(name, "bfloat16", shape) for name, shape in shapes.items()], bucket_bytes=99
    )
    of = EngineLayout("cuda", ranks, 1, expert_groups)
    hosts = [
        hash_parts(dict(list(tensors.items())[host::num_hosts]), manifest, of)
        for host in range(num_hosts)
    ]
    assert joined_checksums(hosts) == expected_checksums(tensors, of)
    if num_hosts > 1:
        with pytest.raises(PublishError, match=r"hosts of the learner do not have .* once"):
            joined_checksums(hosts[1:])
        with pytest.raises(PublishError, match=r"hosts of the learner do not have .* once"):
            joined_checksums([*hosts, hosts[0]])


def test_a_tower_is_fused_as_the_engine_has_it_and_may_be_missing_in_a_version():
    """Its MLP is padded to 32 rows; a version without it is compared without it."""
    gate, up, qkv = weights(20, 3), weights(20, 3), weights(9, 3)
    tower = {
        "visual.blocks.1.mlp.up_proj.weight": up,
        "visual.blocks.1.mlp.gate_proj.weight": gate,
        "visual.blocks.1.attn.qkv.weight": qkv,
    }
    text = {"model.norm.weight": weights(3)}
    found = expected_checksums(tower | text)
    fused = torch.cat([pad(gate, (0, 0, 0, 12)), pad(up, (0, 0, 0, 12))])
    assert found["visual.blocks.1.mlp.gate_up_proj.weight"] == digest(fused)
    assert found["visual.blocks.1.attn.qkv_proj.weight"] == digest(qkv)
    expected = expected_checksums(text)
    assert differing(expected, found) == []
    assert has_digest(found, digest_of(expected))
    assert has_digest(found, digest_of(found))
    other = found | {"visual.blocks.1.attn.qkv_proj.weight": "0"}
    assert not has_digest(other, digest_of(found))
    assert differing(found, other) == ["visual.blocks.1.attn.qkv_proj.weight"]
