import json
from pathlib import Path

import pytest

from slipstream.wire.models.hf_config import load_hf_config
from slipstream.wire.models.served_adapters import trouble_next_to_weights
from tests.support.family_models import MODELS, SHAPE

MLP = ("gate_proj", "up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def trouble(
    folder: Path,
    name: str,
    targets: tuple[str, ...],
    *,
    on_cpu: bool = False,
    ranks: int = 1,
    **changes: object,
) -> str:
    (folder / "config.json").write_text(json.dumps({**SHAPE, **MODELS[name], **changes}))
    hf = load_hf_config(folder)
    return trouble_next_to_weights(hf, targets, on_cpu=on_cpu, ranks=ranks)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen3", ("q_proj", "v_proj", "o_proj", *MLP)),
        ("qwen3", ("gate_proj",)),
        ("qwen3_moe", MLP),
        ("qwen3_moe", ("down_proj", "gate_proj")),
        ("mixtral", ("w1", "w2", "w3")),
        ("deepseek_v3", (*LATENT, *MLP)),
        ("deepseek_v3", ("kv_b_proj", "shared_experts.down_proj")),
        ("deepseek_v2_lite", ("kv_b_proj", "o_proj")),
        ("qwen3_5_moe", ("out_proj", *MLP)),
        ("glm4", ("gate_up_proj", "down_proj")),
        ("gpt_oss", ("q_proj", "v_proj")),
    ],
)
def test_what_an_engine_can_hold_has_no_trouble(
    tmp_path: Path, name: str, targets: tuple[str, ...]
):
    assert trouble(tmp_path, name, targets) == ""
    assert trouble(tmp_path, name, targets, on_cpu=True) == ""


@pytest.mark.parametrize(
    ("name", "targets", "reason"),
    [
        ("qwen3", ("k_proj", "o_proj"), "names k_proj without q_proj, v_proj"),
        ("qwen3", ("up_proj",), "names up_proj without gate_proj"),
        ("mixtral", ("w3", "w2"), "names w3 without w1"),
        ("qwen3_moe", ("down_proj",), "experts out unless lora.targets names both"),
        ("qwen3_moe", ("gate_proj", "up_proj"), "experts out unless lora.targets names both"),
        ("deepseek_v3", ("q_a_proj", "o_proj"), "q_a_proj without kv_a_proj_with_mqa"),
        ("deepseek_v3", ("kv_a_proj_with_mqa",), "kv_a_proj_with_mqa without q_a_proj"),
        ("deepseek_v2_lite", ("q_proj",), "no adapters of q_proj in latent attention whose"),
        ("deepseek_v2_lite", ("kv_a_proj_with_mqa",), "no adapters of kv_a_proj_with_mqa"),
        ("qwen3_5", ("in_proj_qkv", "out_proj"), "linear attention's in_proj_qkv"),
        ("qwen3_next", ("in_proj_qkvz",), "linear attention's in_proj_qkvz"),
        ("gpt_oss", ("gate_up_proj", "down_proj"), "all experts of a layer in one tensor"),
    ],
)
def test_what_an_engine_cannot_hold_is_said_with_its_reason(
    tmp_path: Path, name: str, targets: tuple[str, ...], reason: str
):
    assert reason in trouble(tmp_path, name, targets)


def test_a_cpu_has_no_place_for_adapters_of_what_it_pads(tmp_path: Path):
    def found(name: str, targets: tuple[str, ...], ranks: int, **changes: object) -> str:
        assert trouble(tmp_path, name, targets, ranks=ranks, **changes) == ""
        return trouble(tmp_path, name, targets, on_cpu=True, ranks=ranks, **changes)

    assert "intermediate_size = 96 of run.model is no multiple of 64" in found("qwen3", MLP, 2)
    assert found("qwen3", ("o_proj",), 2) == ""
    assert "moe_intermediate_size = 32 of" in found("qwen3_moe", MLP, 2)
    assert found("qwen3_moe", MLP, 1, intermediate_size=97) == "", "it has no such MLP"
    wide = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 80}
    assert "shared_expert_intermediate_size = 80" in found("qwen2_moe", MLP, 1, **wide)
