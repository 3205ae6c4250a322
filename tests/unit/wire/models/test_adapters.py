import json
from pathlib import Path

import msgspec
import pytest

from slipstream.wire.errors import ConfigError
from slipstream.wire.models.adapters import (
    CONFIG,
    AdapterFacts,
    AdapterSource,
    adapter_config,
    adapter_shapes,
    adapter_sources,
    check_targets,
    refuse_other_adapter,
    refuse_other_tensors,
)
from slipstream.wire.models.hf_config import HfConfig, load_hf_config
from slipstream.wire.settings.lora import LINEAR_LAYERS
from tests.support.family_models import MODELS, SHAPE

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


def test_tensors_of_all_experts_have_a_and_b_as_peft_lays_them_out():
    weights = {
        "model.layers.0.mlp.experts.gate_up_proj": (3, 8, 10),  # columns and rows of each
        "model.layers.0.mlp.experts.gate_up_proj_bias": (3, 10),
        "model.layers.0.mlp.experts.down_proj": (3, 5, 8),
    }
    both = msgspec.structs.replace(FACTS, targets=("down_proj", "gate_up_proj"))
    module = "base_model.model.model.layers.0.mlp.experts"
    assert adapter_shapes(weights, both) == {
        f"{module}.base_layer.lora_A.weight": (12, 8),
        f"{module}.base_layer.lora_B.weight": (10, 12),
        f"{module}.lora_A.weight": (12, 5),
        f"{module}.lora_B.weight": (8, 12),
    }
    alone = msgspec.structs.replace(FACTS, targets=("gate_up_proj",))
    assert adapter_shapes(weights, alone).keys() == {
        f"{module}.lora_A.weight",
        f"{module}.lora_B.weight",
    }


def model_of(folder: Path, name: str) -> HfConfig:
    (folder / "config.json").write_text(json.dumps({**SHAPE, **MODELS[name]}))
    return load_hf_config(folder)


MLP = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", LINEAR_LAYERS),
        ("qwen2", LINEAR_LAYERS),
        ("qwen3_moe", LINEAR_LAYERS),
        ("qwen2_moe", ("shared_expert.gate_proj", "self_attn.q_proj")),
        ("mixtral", ("w1", "w2", "w3")),
        ("deepseek_v3", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", *MLP)),
        ("deepseek_v2_lite", ("q_proj", "kv_b_proj", "o_proj", "shared_experts.up_proj")),
        ("qwen3_5", ("in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj")),
        ("qwen3_next", ("in_proj_qkvz", "in_proj_ba")),
        ("gpt_oss", ("gate_up_proj", "down_proj", "q_proj")),
        ("glm4", ("gate_up_proj",)),
    ],
)
def test_every_linear_layer_can_be_a_target(tmp_path: Path, name: str, targets: tuple[str, ...]):
    check_targets(model_of(tmp_path, name), targets)


@pytest.mark.parametrize(
    ("name", "target", "allowed"),
    [
        ("qwen3", "query", "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
        ("qwen3", "q_norm", ""),
        ("qwen3", "lm_head", ""),
        ("qwen3_moe", "gate", ""),
        ("qwen2_moe", "shared_expert_gate", ""),
        ("deepseek_v3", "k_proj", "down_proj, gate_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj"),
        ("deepseek_v2_lite", "q_a_proj", "o_proj, q_proj, up_proj"),
        ("qwen3_5", "conv1d", ""),
        ("gpt_oss", "router", ""),
        ("gpt_oss", "gate_proj", "down_proj, gate_up_proj, k_proj"),
    ],
)
def test_a_target_without_a_layer_is_refused(tmp_path: Path, name: str, target: str, allowed: str):
    message = rf"names {target}, and \w+ has no such linear layer that can have .*{allowed}"
    with pytest.raises(ConfigError, match=message):
        check_targets(model_of(tmp_path, name), ["o_proj", target])


def test_a_written_description_is_read(tmp_path: Path):
    (tmp_path / CONFIG).write_bytes(adapter_config(FACTS, "base"))
    refuse_other_adapter(tmp_path, FACTS)


def test_tensors_of_all_experts_are_described_as_parameters(tmp_path: Path):
    facts = msgspec.structs.replace(FACTS, targets=("down_proj", "q_proj"))
    stacks = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    (tmp_path / CONFIG).write_bytes(adapter_config(facts, "base", stacks))
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["target_parameters"] == ["mlp.experts.down_proj"]
    assert config["target_modules"] == ["q_proj"]
    refuse_other_adapter(tmp_path, facts)


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


def test_adapters_of_tensors_of_all_experts_are_read_as_those_of_each(tmp_path: Path):
    facts = msgspec.structs.replace(FACTS, targets=("down_proj", "gate_proj", "up_proj"))
    experts = "base_model.model.model.layers.0.mlp.experts"
    both, down = f"{experts}.base_layer.lora_", f"{experts}.lora_"
    stored = {
        f"{both}A.weight": (12, 8),  # of three experts, of rank 4
        f"{both}B.weight": (10, 12),  # of a gate and an up of 5 rows
        f"{down}A.weight": (12, 5),
        f"{down}B.weight": (8, 12),
    }
    weights = {
        f"model.layers.0.mlp.experts.{expert}.{name}.weight": (8, 5) if "down" in name else (5, 8)
        for expert in range(3)
        for name in facts.targets
    }
    expected = adapter_shapes(weights, facts)
    sources = adapter_sources(stored, expected, facts.targets)
    assert sources[f"{experts}.2.up_proj.lora_B.weight"] == AdapterSource(f"{both}B.weight", 2, 1)
    found = {name: source.shape(stored[source.name], 4) for name, source in sources.items()}
    refuse_other_tensors(found, expected, tmp_path)

    last = sources[f"{experts}.2.up_proj.lora_A.weight"]
    assert last.shape((8, 8), 4) == (), "of two experts"
    with pytest.raises(
        ConfigError, match=r"gate_proj\.lora_B\.weight must have shape \[5, 4\], got"
    ):
        refuse_other_tensors(
            {**found, f"{experts}.0.gate_proj.lora_B.weight": (6, 4)}, expected, tmp_path
        )
    more = adapter_sources({**stored, f"{experts}.lora_C": (1,)}, expected, facts.targets)
    assert more.keys() - expected.keys() == {f"{experts}.lora_C"}

    config = json.loads(adapter_config(facts, "base"))
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config |= {"target_modules": [], "target_parameters": stacks}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    refuse_other_adapter(tmp_path, facts)
    (tmp_path / CONFIG).write_text(json.dumps(config | {"target_parameters": 3}))
    with pytest.raises(ConfigError, match="a list of target_modules"):
        refuse_other_adapter(tmp_path, facts)
