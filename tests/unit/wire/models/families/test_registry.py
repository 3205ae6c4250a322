"""A family is one table: names, fused tensors, sizes, config.json, the engine's layout."""

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from slipstream.wire.errors import ConfigError
from slipstream.wire.models.families.registry import (
    FAMILIES,
    EngineTensor,
    engine_tensor,
    engine_tensors,
)
from slipstream.wire.models.families.tables import (
    FULL_ATTENTION,
    Family,
    FusionKind,
    HfTensor,
    Parameter,
    Size,
)
from slipstream.wire.models.hf_config import load_hf_config

QWEN2, QWEN3 = FAMILIES["qwen2"], FAMILIES["qwen3"]
V3, GLM4 = FAMILIES["deepseek_v3"], FAMILIES["glm4"]


def test_parameter_becomes_the_tensors_of_that_name():
    for family, megatron_name, kind, names in [
        (QWEN2, "embedding.word_embeddings.weight", "vocab", ("embed_tokens.weight",)),
        (QWEN2, "decoder.final_layernorm.weight", "copy", ("norm.weight",)),
    ]:
        parameter = family.parameter(megatron_name, tied_embeddings=False)
        assert (parameter.kind, parameter.names) == (kind, tuple(f"model.{name}" for name in names))


@pytest.mark.parametrize(
    ("family", "part", "kind", "names"),
    [
        (QWEN2, "pre_mlp_layernorm.weight", "copy", ["post_attention_layernorm.weight"]),
        (QWEN3, "self_attention.q_layernorm.weight", "copy", ["self_attn.q_norm.weight"]),
        (
            QWEN2,
            "self_attention.linear_qkv.bias",
            "qkv",
            [f"self_attn.{p}_proj.bias" for p in "qkv"],
        ),
        (QWEN2, "mlp.linear_fc1.weight", "gate_up", ["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
        (GLM4, "mlp.linear_fc1.weight", "gate_up", ["mlp.gate_up_proj.weight"]),
        (V3, "mlp.router.correction_bias", "copy", ["mlp.gate.e_score_correction_bias"]),
        (V3, "self_attention.linear_q_proj.weight", "copy", ["self_attn.q_proj.weight"]),
        (
            FAMILIES["mixtral"],
            "mlp.experts.local_experts.7.linear_fc1.weight",
            "gate_up",
            [f"block_sparse_moe.experts.7.w{n}.weight" for n in (1, 3)],
        ),
    ],
)
@pytest.mark.parametrize("layer", [4, 11])
def test_parameter_of_a_layer_becomes_the_tensors_of_that_name(
    family: Family, layer: int, part: str, kind: FusionKind, names: list[str]
):
    parameter = family.parameter(f"decoder.layers.{layer}.{part}", tied_embeddings=False)
    assert parameter.kind == kind
    assert parameter.names == tuple(f"model.layers.{layer}.{name}" for name in names)


def test_tied_output_layer_is_the_embedding():
    for tied, name in [(False, "lm_head.weight"), (True, "model.embed_tokens.weight")]:
        parameter = QWEN2.parameter("output_layer.weight", tied_embeddings=tied)
        assert (parameter.kind, parameter.names) == ("vocab", (name,))


def test_name_of_no_parameter_of_the_family_is_refused():
    for family, name in [
        (QWEN2, "decoder.layers.0.mlp.router.weight"),
        (QWEN2, "decoder.layers.x.input_layernorm.weight"),
        (QWEN2, "lm_head"),
        (QWEN2, "decoder.layers.0.self_attention.q_layernorm.weight"),
        (QWEN3, "decoder.layers.0.self_attention.linear_qkv.bias"),
    ]:
        with pytest.raises(KeyError, match=name):
            family.parameter(name, tied_embeddings=False)


# ---- a family of one's own: this table is all that is added ---------------------


def one(name: str, *shape: Size, columns: int = 1) -> Parameter:
    return Parameter("copy", (HfTensor(name, shape, column_multiple=columns),))


TOY = Family(
    model_type="toy",
    models="Toy",
    config={"hidden_act": "silu", "norm_type": "rms"},
    ignored=frozenset({"toy_color"}),
    layer={
        "input_layernorm.weight": one("norm_1.weight", "hidden"),
        "self_attention.linear_qkv.weight": Parameter(
            "qkv",
            (
                HfTensor("attn.wq.weight", ("queries", "hidden")),
                HfTensor("attn.wk.weight", ("keys", "hidden")),
                HfTensor("attn.wv.weight", ("keys", "hidden")),
            ),
            "attn.wqkv.weight",
        ),
        "self_attention.linear_proj.weight": one("attn.wo.weight", "hidden", "queries"),
        "pre_mlp_layernorm.weight": one("norm_2.weight", "hidden"),
    },
    mlp={
        "mlp.linear_fc1.weight": Parameter(
            "gate_up",
            (
                HfTensor("mlp.w1.weight", ("inner", "hidden"), row_multiple=32),
                HfTensor("mlp.w3.weight", ("inner", "hidden"), row_multiple=32),
            ),
            "mlp.w13.weight",
        ),
        "mlp.linear_fc2.weight": one("mlp.w2.weight", "hidden", "inner", columns=32),
    },
    ends=QWEN2.ends,
    megatron={"layernorm_zero_centered_gamma": True},
)
WITH_TOY = {**FAMILIES, "toy": TOY}
CONFIG = {
    "model_type": "toy",
    "vocab_size": 50,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Toy(NamedTuple):
    """What a family's table must know of a model."""

    tie_word_embeddings: bool
    num_hidden_layers: int = 3
    num_routed_experts: int = 0

    def is_sparse(self, layer: int) -> bool:
        return layer < 0

    def kind_of(self, layer: int) -> str:
        return FULL_ATTENTION if layer >= 0 else ""


def test_a_new_familys_folder_is_read_and_checked_by_its_table_alone(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "toy_color": "red"}))
    assert load_hf_config(tmp_path, families=WITH_TOY).model_type == "toy"
    with pytest.raises(ConfigError, match="supported are llama, qwen2, qwen3"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "norm_type": "batch"}))
    with pytest.raises(ConfigError, match="norm_type must be 'rms', got 'batch'"):
        load_hf_config(tmp_path, families=WITH_TOY)


def test_a_new_familys_names_shapes_and_size_come_from_its_table_alone():
    sizes: dict[Size, int] = {
        "queries": 8,
        "keys": 4,
        "hidden": 8,
        "inner": 12,
        "experts": 0,
        "vocabulary": 50,
    }
    fused = TOY.parameter(
        "decoder.layers.2.self_attention.linear_qkv.weight", tied_embeddings=False
    )
    assert fused.names == tuple(f"model.layers.2.attn.w{part}.weight" for part in "qkv")
    assert [t.whole_shape(sizes) for t in fused.tensors] == [(8, 8), (4, 8), (4, 8)]
    layer = 8 + (8 + 4 + 4) * 8 + 8 * 8 + 8 + 2 * 12 * 8 + 8 * 12
    for tied, tables in ((False, 2), (True, 1)):
        count = TOY.num_parameters(Toy(tied), sizes)
        assert count == 3 * layer + tables * 50 * 8 + 8
        names = [name for _, one in TOY.parameters(Toy(tied)) for name in one.names]
        assert len(names) == len(set(names)) == 3 * 9 + tables + 1


def test_a_new_familys_place_in_the_engine_comes_from_its_table_alone():
    places = engine_tensors(WITH_TOY)
    parts = tuple(f"attn.w{part}.weight" for part in "qkv")
    assert places["attn.wk.weight"] == EngineTensor(
        "attn.wqkv.weight", 1, split="rows", partners=parts
    )
    assert places["mlp.w3.weight"] == EngineTensor(
        "mlp.w13.weight",
        1,
        row_multiple=32,
        split="rows",
        partners=("mlp.w1.weight", "mlp.w3.weight"),
    )
    assert places["mlp.w2.weight"] == EngineTensor(
        "mlp.w2.weight", column_multiple=32, split="columns"
    )


def test_families_that_contradict_each_other_about_the_engine_are_refused():
    moved = {**QWEN2.mlp, "mlp.linear_fc2.weight": one("mlp.down_proj.weight", "hidden", "inner")}
    with pytest.raises(ValueError, match=r"other keeps mlp.down_proj.weight elsewhere"):
        engine_tensors({**FAMILIES, "other": replace(QWEN2, model_type="other", mlp=moved)})


def test_tensors_are_fused_in_a_model_that_has_all_of_them():
    layer = "model.layers.3.self_attn."
    latent = [layer + name for name in ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")]
    found = [engine_tensor(name, latent) for name in latent]
    assert [one.name for one in found] == [layer + "fused_qkv_a_proj_with_mqa.weight"] * 2
    assert [one.position for one in found] == [0, 1]
    assert engine_tensor(latent[1], latent[1:]).name == latent[1]
    queries = layer + "q_proj.weight"
    alone = engine_tensor(queries, [queries, *latent[1:]])
    assert (alone.name, alone.position, alone.split) == (queries, 0, "rows")
    grouped = [f"{layer}{part}_proj.weight" for part in "qkv"]
    assert engine_tensor(queries, grouped).name == layer + "qkv_proj.weight"


def test_a_tensor_of_no_family_stays_as_it_is_in_the_engine():
    name = "model.layers.0.mlp.router.weight"
    assert engine_tensor(name) == EngineTensor(name)
