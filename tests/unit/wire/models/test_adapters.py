import json
from pathlib import Path

import pytest

from slipstream.wire.errors import ConfigError
from slipstream.wire.models.adapters import (
    CONFIG,
    AdapterFacts,
    adapter_config,
    adapter_shapes,
    check_targets,
    refuse_other_adapter,
    refuse_other_tensors,
)
from slipstream.wire.models.families.registry import FAMILIES
from slipstream.wire.settings.lora import LINEAR_LAYERS

FACTS = AdapterFacts(rank=4, alpha=8.0, targets=("o_proj", "q_proj"))


def test_every_target_has_a_and_b_under_the_names_of_peft():
    weights = {
        "model.layers.0.self_attn.q_proj.weight": (6, 5),
        "model.layers.0.self_attn.q_proj.bias": (6,),
        "model.layers.0.self_attn.k_proj.weight": (3, 5),
        "model.norm.weight": (5,),
    }
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    assert adapter_shapes(weights, FACTS) == {
        f"{prefix}.lora_A.weight": (4, 5),
        f"{prefix}.lora_B.weight": (6, 4),
    }


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_dense_families_take_every_linear_layer(family: str):
    check_targets(FAMILIES[family], LINEAR_LAYERS)


def test_a_target_without_a_layer_is_refused():
    for family, target, message in [
        ("qwen3", "query", r"names query, and qwen3 has no such linear layer that can have"),
        ("qwen3", "q_norm", "no such linear layer"),
        ("qwen3_moe", "up_proj", "names up_proj, which qwen3_moe has in its experts"),
        ("qwen3_moe", "gate", "no such linear layer"),
        ("qwen3_5_text", "in_proj_z", "no such linear layer that can have an adapter: .*out_proj"),
        ("qwen3_next", "in_proj_qkvz", "no such linear layer"),
        ("glm4", "gate_up_proj", "no such linear layer that can have an adapter"),
    ]:
        check_targets(FAMILIES[family], ["q_proj", "o_proj"])
        with pytest.raises(ConfigError, match=message):
            check_targets(FAMILIES[family], ["q_proj", target])


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_is_refused(family: str):
    check_targets(FAMILIES[family], ())
    with pytest.raises(ConfigError, match=r"lora\.rank cannot be set for deepseek_v.: latent"):
        check_targets(FAMILIES[family], ["o_proj"])


def test_a_written_description_is_read(tmp_path: Path):
    (tmp_path / CONFIG).write_bytes(adapter_config(FACTS, "base"))
    refuse_other_adapter(tmp_path, FACTS)


def test_another_adapter_is_refused(tmp_path: Path):
    for changed, message in [
        ({"r": 8}, r"lora\.rank is 8 there and 4 here"),
        ({"lora_alpha": 16}, r"lora\.alpha is 16\.0 there and 8\.0 here"),
        ({"target_modules": ["q_proj"]}, r"lora\.targets is \['q_proj'\] there and \['o_proj'"),
        ({"use_dora": True}, "has use_dora = True: only plain adapters"),
        ({"bias": "all"}, "has bias = 'all'"),
        ({"rank_pattern": {"q_proj": 2}}, "has rank_pattern"),
        ({"peft_type": "IA3"}, "must have peft_type = LORA"),
        ({"target_modules": "all-linear"}, "a list of target_modules, got 'LORA' and 'all-linear'"),
        ({"r": "4"}, r"must have a whole r, and a lora_alpha of at most 1e\+06, got '4' and 8.0"),
        ({"r": 4.7}, "got 4.7 and 8.0"),
        ({"lora_alpha": "nan"}, "got 4 and 'nan'"),
        ({"lora_alpha": 10**400}, "got 4 and 10+"),
        ({"alora_invocation_tokens": [1]}, "has alora_invocation_tokens"),
        ({"layer_replication": [[0, 2]]}, "has layer_replication"),
    ]:
        config = json.loads(adapter_config(FACTS, "base")) | changed
        (tmp_path / CONFIG).write_text(json.dumps(config))
        with pytest.raises(ConfigError, match=message):
            refuse_other_adapter(tmp_path, FACTS)


def test_a_folder_without_a_description_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot read .*adapter_config\.json \(lora\.adapter\)"):
        refuse_other_adapter(tmp_path, FACTS)
    (tmp_path / CONFIG).write_text("[")
    with pytest.raises(ConfigError, match=r"is no such file of PEFT's"):
        refuse_other_adapter(tmp_path, FACTS)


def test_other_tensors_are_refused():
    folder, right = Path("adapter"), {"a": (4, 5), "b": (6, 4)}
    refuse_other_tensors(right, right, folder)
    for found, message in (
        ({"a": (4, 5)}, "holds no tensor b"),
        ({"a": (4, 5), "b": (4, 6)}, r"tensor b must have shape \[6, 4\], got \[4, 6\]"),
        (right | {"c": (1,)}, r"holds c, which run\.model has no layer for"),
    ):
        with pytest.raises(ConfigError, match=message):
            refuse_other_tensors(found, right, folder)
