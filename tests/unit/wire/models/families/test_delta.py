"""Config.json of models with linear attention, also as one part of a model that sees pictures."""

import json
from pathlib import Path

import pytest

from slipstream.learner.checkpoints.identity import architecture_of
from slipstream.learner.model.division import refuse_undivided
from slipstream.learner.parallel import ParallelSizes
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.families.registry import engine_tensor
from slipstream.wire.models.hf_config import HfConfig, load_hf_config
from tests.support.family_models import MODELS, SHAPE
from tests.support.shelf import QWEN3_5_ROPE

TINY = {**SHAPE, **MODELS["qwen3_5"]}
# What the published folders have around the language model, and of layers that predict further.
PUBLISHED = {
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": QWEN3_5_ROPE,
}
AROUND = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5",
    "tie_word_embeddings": True,
    "vision_config": {"depth": 24, "model_type": "qwen3_5"},
}


def read(folder: Path, config: dict[str, object]) -> HfConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return load_hf_config(folder)


def test_kinds_of_layers_are_listed_or_follow_an_interval(tmp_path: Path):
    by_interval = read(tmp_path, TINY | {"full_attention_interval": None, "num_hidden_layers": 9})
    kinds = [by_interval.kind_of(layer) for layer in range(9)]
    assert kinds == [*["linear_attention"] * 3, "full_attention"] * 2 + ["linear_attention"]
    assert by_interval.attention_layers == (3, 7)
    listed = read(tmp_path, TINY | {"layer_types": [*reversed(kinds[:3]), "full_attention"][1:]})
    assert listed.attention_layers == (2,)
    with pytest.raises(ConfigError, match="must name num_hidden_layers = 3 layers, got 2"):
        read(tmp_path, TINY | {"layer_types": kinds[:2]})
    for other, got in [("sliding_attention", "'sliding_"), ([], r"\[\]")]:
        unknown = ["linear_attention", other, "full_attention"]
        with pytest.raises(ConfigError, match=f"'linear_attention' or 'full_attention', got {got}"):
            read(tmp_path, TINY | {"layer_types": unknown})
    with pytest.raises(ConfigError, match="must have a layer of 'full_attention', and has none"):
        read(tmp_path, TINY | {"layer_types": ["linear_attention"] * 3})


def test_sizes_of_heads_must_fit_each_other_and_the_layout(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"multiple of linear_num_key_heads, got 8 and 3"):
        read(tmp_path, TINY | {"linear_num_key_heads": 3})
    with pytest.raises(ConfigError, match=r"multiple of linear_num_key_heads, got 8 and 16"):
        read(tmp_path, TINY | {"linear_num_key_heads": None})
    with pytest.raises(ConfigError, match="linear_conv_kernel_dim must be from 2 to 64, got 1"):
        read(tmp_path, TINY | {"linear_conv_kernel_dim": 1})
    hf = read(tmp_path, TINY | {"num_attention_heads": 16, "num_key_value_heads": 16})
    with pytest.raises(ConfigError, match=r"linear_num_key_heads .*tensor_parallel, got 4 and 8"):
        refuse_undivided(hf, ParallelSizes(tensor=8))
    with pytest.raises(ConfigError, match=r"of a rank .*context_parallel, got 2 and 4"):
        refuse_undivided(hf, ParallelSizes(tensor=2, context=4))
    refuse_undivided(hf, ParallelSizes(tensor=2, context=2))


def test_a_language_model_within_another_is_read_as_if_alone(tmp_path: Path):
    alone = read(tmp_path, TINY | PUBLISHED)
    within = read(tmp_path, AROUND | {"text_config": TINY | PUBLISHED})
    assert within.is_wrapped
    assert not alone.is_wrapped
    assert list(within.parameters()) == list(alone.parameters())
    assert (within.sizes, within.rotary_base) == (alone.sizes, alone.rotary_base)
    assert alone.num_nextn_predict_layers == 1
    for one, pictures in ((within, True), (alone, False)):
        assert one.may_keep
        assert one.keeps("mtp.fc.weight")
        assert one.keeps("model.visual.norm.weight") is pictures
        assert not one.keeps("model.layers.3.input_layernorm.weight")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AROUND, "text_config must have model_type 'qwen3_5_text', got None"),
        (AROUND | {"text_config": {"model_type": "llama"}}, "'qwen3_5_text', got 'llama'"),
        (
            AROUND | {"text_config": TINY, "tie_word_embeddings": False},
            "tie_word_embeddings = False must be as in text_config, which has True",
        ),
        (AROUND | {"text_config": TINY | {"use_moe": True}}, "use_moe = True is not a key that"),
        (AROUND | {"model_type": "qwen3_omni"}, "has model_type 'qwen3_omni'; supported are"),
        (TINY | {"attn_output_gate": False}, "attn_output_gate must be True, got False"),
    ],
)
def test_what_is_no_such_model_is_refused(tmp_path: Path, config: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, config)


def test_projections_are_fused_as_the_engine_has_them():
    prefix = "model.layers.3.linear_attn."
    names = [f"{prefix}{name}.weight" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b")]
    names.append(f"{prefix}in_proj_a.weight")
    places = [engine_tensor(name, names) for name in names]
    assert [(place.name.removeprefix(prefix), place.position) for place in places] == [
        ("in_proj_qkvz.weight", 0),
        ("in_proj_qkvz.weight", 1),
        ("in_proj_ba.weight", 0),
        ("in_proj_ba.weight", 1),
    ]
    assert places[0].last_like == f"{prefix}out_proj.weight"
    rates = engine_tensor(f"{prefix}A_log", names)
    assert (rates.split, rates.dtype) == ("rows", "float32")


def test_a_checkpoint_knows_the_kinds_of_layers_and_the_heads_of_linear_attention(tmp_path: Path):
    last_is_full = ["linear_attention", "linear_attention", "full_attention"]
    configs = [TINY, TINY | {"layer_types": last_is_full}, TINY | {"linear_num_key_heads": 2}]
    first, *others = [architecture_of(read(tmp_path, config)) for config in configs]
    assert first["layer_types"] == "linear_attention,full_attention,linear_attention"
    assert first not in others
