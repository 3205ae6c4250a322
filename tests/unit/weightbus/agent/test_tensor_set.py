import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slipstream.weightbus.agent.tensor_set import (
    Shapes,
    TensorSet,
    has_tower,
    mismatch,
    model_tensors,
)
from slipstream.weightbus.version.layout import plan_layout
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.manifest import TensorSpec, WeightManifest
from slipstream.wire.models.hf_config import load_hf_config
from tests.support.family_models import MODELS, SHAPE

MODEL: Shapes = {"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,)}
TIED = {"lm_head.weight": (8, 4)}


def manifest(shapes: Shapes) -> WeightManifest:
    specs = (TensorSpec(name, "float32", shape) for name, shape in shapes.items())
    return plan_layout(specs, bucket_bytes=20)


def differs(offered: WeightManifest, known: Shapes) -> str:
    return mismatch(offered, TensorSet(known, "float32"))


@pytest.mark.parametrize("offered", [MODEL, MODEL | TIED])
@pytest.mark.parametrize("known", [MODEL, MODEL | TIED])
def test_the_same_tensors_match_with_or_without_a_tied_output_layer(offered: Shapes, known: Shapes):
    assert differs(manifest(offered), known) == ""


def test_a_difference_is_named():
    for offered, difference in [
        (
            {"model.norm.weight": (4,)},
            "manifest lacks ['model.embed_tokens.weight'] and has unknown []",
        ),
        (
            MODEL | {"model.extra.weight": (2,)},
            "manifest lacks [] and has unknown ['model.extra.weight']",
        ),
        (
            MODEL | {"model.norm.weight": (5,)},
            "model.norm.weight has shape (5,), the model has (4,)",
        ),
        (
            MODEL | {"lm_head.weight": (9, 4)},
            "lm_head.weight has shape (9, 4), the model has (8, 4)",
        ),
    ]:
        known = MODEL | TIED if "lm_head.weight" in offered else MODEL
        assert differs(manifest(offered), known) == difference


def test_another_type_than_the_engines_is_a_difference():
    why = mismatch(manifest(MODEL), TensorSet(MODEL, "bfloat16"))
    settings = "learner.dtype, generators.dtype, weightbus.precision"
    assert why.endswith(f"has type float32, the engine bfloat16 ({settings})")


def test_an_engine_in_fp8_takes_matrices_with_the_scales_of_their_blocks_alone():
    query = "model.layers.0.self_attn.q_proj.weight"
    model: Shapes = MODEL | {query: (256, 130)}
    own = TensorSet(model, "bfloat16", is_fp8=True)
    specs = list(own.specs.values())
    published = plan_layout(specs, bucket_bytes=1 << 20)
    assert mismatch(published, own) == ""
    assert own.num_bytes == published.num_bytes == 256 * 130 + 4 * 2 * 2 + 2 * (8 * 4 + 4)
    assert "lacks ['model.layers.0.self_attn.q_proj.weight_scale_inv']" in mismatch(
        plan_layout([s for s in specs if "scale" not in s.name], bucket_bytes=1 << 20), own
    )
    assert "unknown ['model.layers.0.self_attn.q_proj.weight_scale_inv']" in mismatch(
        published, TensorSet(model, "bfloat16")
    )
    other = [TensorSpec(s.name, s.dtype, (2, 1) if "scale" in s.name else s.shape) for s in specs]
    assert "has shape (2, 1), the model has (2, 2)" in mismatch(
        plan_layout(other, bucket_bytes=1 << 20), own
    )


def test_a_tensor_that_comes_twice_is_a_difference():
    once = manifest(MODEL)
    twice = WeightManifest(version=once.version, buckets=once.buckets * 2)
    assert differs(twice, MODEL) == "manifest names a tensor twice"


def test_shapes_are_read_from_all_files_of_a_model(tmp_path: Path):
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"b": torch.zeros(5, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")
    assert model_tensors(tmp_path, dtype="float32") == TensorSet(
        {"a": (2, 3), "b": (5,)}, "float32"
    )


@pytest.mark.parametrize("content", [b"", b"\xff" * 4, b"\x10" + bytes(7) + b"not json"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors \(run\.model\)"):
        model_tensors(tmp_path, dtype="float32")


def test_a_folder_without_weights_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no safetensors files in .*\(run\.model\)"):
        model_tensors(tmp_path, dtype="float32")


def test_tensors_are_those_that_a_learner_publishes_whatever_a_folder_has(tmp_path: Path):
    names = ("model.norm.weight", "model.layers.0.a.weight", "model.layers.0.a.weight_scale_inv")
    save_file({name: torch.zeros(2) for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")  # of no model that is known
    assert model_tensors(tmp_path, dtype="bfloat16").shapes.keys() == set(names[:2])
    config = {**SHAPE, **MODELS["qwen3_5_moe"], "mtp_num_hidden_layers": 1}
    around = {"model_type": "qwen3_5_moe", "text_config": config, "tie_word_embeddings": False}
    for written in (config, around):
        (tmp_path / "config.json").write_text(json.dumps(written))
        found = model_tensors(tmp_path, dtype="bfloat16")
        assert found.shapes == load_hf_config(tmp_path).tensor_shapes
        assert found.specs["model.layers.0.linear_attn.A_log"].dtype == "float32"
        assert found.shapes["model.layers.0.mlp.experts.7.gate_proj.weight"] == (32, 64)


def test_a_routers_bias_is_published_in_float32_whatever_the_engines_type_is():
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    known = TensorSet({bias: (4,), "model.norm.weight": (4,)}, "bfloat16")

    def offered(dtype: str) -> WeightManifest:
        specs = [TensorSpec(bias, dtype, (4,)), TensorSpec("model.norm.weight", "bfloat16", (4,))]
        return plan_layout(specs, bucket_bytes=20)

    assert mismatch(offered("float32"), known) == ""
    assert "has type bfloat16, the engine float32" in mismatch(offered("bfloat16"), known)


def test_a_version_has_all_of_a_vision_tower_or_nothing():
    tower: Shapes = {"visual.merger.a": (2,), "visual.merger.b": (2,)}
    known = TensorSet(MODEL, "float32", tower=tower)
    assert mismatch(manifest(MODEL), known) == ""
    assert mismatch(manifest(MODEL | tower), known) == ""
    assert "lacks ['visual.merger.b']" in mismatch(
        manifest(MODEL | {"visual.merger.a": (2,)}), known
    )
    assert [has_tower(manifest(shapes)) for shapes in (MODEL, MODEL | tower)] == [False, True]
