import pytest
import torch

from slipstream.learner.model.names import (
    HfMapping,
    MappingKind,
    fuse_gate_up,
    fuse_qkv,
    hf_mapping,
    split_gate_up,
    split_qkv,
)


@pytest.mark.parametrize(
    ("megatron_name", "kind", "names"),
    [
        ("embedding.word_embeddings.weight", "vocab", ("model.embed_tokens.weight",)),
        ("output_layer.weight", "vocab", ("lm_head.weight",)),
        ("decoder.final_layernorm.weight", "copy", ("model.norm.weight",)),
        (
            "decoder.layers.11.pre_mlp_layernorm.weight",
            "copy",
            ("model.layers.11.post_attention_layernorm.weight",),
        ),
        (
            "decoder.layers.0.self_attention.q_layernorm.weight",
            "copy",
            ("model.layers.0.self_attn.q_norm.weight",),
        ),
        (
            "decoder.layers.2.self_attention.linear_qkv.bias",
            "qkv",
            tuple(f"model.layers.2.self_attn.{part}_proj.bias" for part in "qkv"),
        ),
        (
            "decoder.layers.2.mlp.linear_fc1.weight",
            "gate_up",
            ("model.layers.2.mlp.gate_proj.weight", "model.layers.2.mlp.up_proj.weight"),
        ),
    ],
)
def test_parameter_becomes_the_tensors_of_that_name(
    megatron_name: str, kind: MappingKind, names: tuple[str, ...]
):
    assert hf_mapping(megatron_name, tied_embeddings=False) == HfMapping(kind, names)


def test_tied_output_layer_is_the_embedding():
    mapping = hf_mapping("output_layer.weight", tied_embeddings=True)
    assert mapping == HfMapping("vocab", ("model.embed_tokens.weight",))


@pytest.mark.parametrize(
    "name",
    ["decoder.layers.0.mlp.router.weight", "decoder.layers.x.input_layernorm.weight", "lm_head"],
)
def test_name_of_no_supported_model_is_refused(name: str):
    with pytest.raises(KeyError, match=name):
        hf_mapping(name, tied_embeddings=False)


def test_fused_projection_interleaves_query_key_and_value_by_group():
    # 4 query heads in 2 groups, 1 channel per head
    query, key, value = torch.arange(4), torch.tensor([10, 11]), torch.tensor([20, 21])
    fused = fuse_qkv(query, key, value, num_groups=2)
    assert fused.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


@pytest.mark.parametrize("rest", [(), (5,)])
def test_splitting_undoes_fusing(rest: tuple[int, ...]):
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(heads * 3, *rest, generator=generator) for heads in (6, 2, 2)]
    fused = fuse_qkv(*parts, num_groups=2)
    split = split_qkv(fused, num_heads=6, num_groups=2, head_dim=3)
    assert all(torch.equal(a, b) for a, b in zip(split, parts, strict=True))


def test_a_ranks_share_of_the_heads_fuses_to_its_share_of_the_fused_rows():
    parts = [torch.randn(heads * 3, 5) for heads in (8, 4, 4)]
    whole = fuse_qkv(*parts, num_groups=4)
    for rank in range(2):
        share = fuse_qkv(*(part.chunk(2)[rank] for part in parts), num_groups=2)
        assert torch.equal(share, whole.chunk(2)[rank])


def test_gate_comes_before_up():
    gate, up = torch.zeros(2, 3), torch.ones(2, 3)
    fused = fuse_gate_up(gate, up)
    assert fused[:, 0].tolist() == [0, 0, 1, 1]
    assert all(torch.equal(a, b) for a, b in zip(split_gate_up(fused), (gate, up), strict=True))
