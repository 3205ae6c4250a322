import json
import math
from pathlib import Path

import pytest

from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.load import Table, to_table
from slipstream.wire.settings.lora import LINEAR_LAYERS, LoraSection, lora_section, publishing
from tests.support.family_models import MODELS, SHAPE


def test_without_a_rank_there_are_no_adapters():
    assert not lora_section({}).is_on
    with pytest.raises(ValueError, match=r"lora\.rank is not set"):
        lora_section({}).facts()


def test_defaults_without_a_rank_are_as_good_as_none():
    assert not lora_section({"lora": to_table(LoraSection())}).is_on


def test_adapters_are_on_every_linear_layer_and_scaled_by_alpha_over_rank():
    lora = lora_section({"lora": {"rank": 8, "alpha": 4.0}})
    assert lora.is_on
    facts = lora.facts(base="a")
    assert (facts.rank, facts.scale, facts.base) == (8, 0.5, "a")
    assert set(facts.targets) == set(LINEAR_LAYERS)


def test_what_is_no_adapter_is_refused():
    for settings, message in [
        ({"rank": 0}, r"lora\.rank must be at least 1, got 0: leave it out to train all weights"),
        ({"rank": -4}, r"lora\.rank must be at least 1, got -4"),
        ({"rank": 10**9}, r"lora\.rank must be at most 8192, got 1000000000"),
        ({"rank": 4, "alpha": math.inf}, r"lora\.alpha must be at most 1e\+06, got inf"),
        ({"alpha": 8.0}, r"lora\.alpha has no meaning without lora\.rank, which is not set"),
        ({"adapter": "a"}, r"lora\.adapter has no meaning without lora\.rank"),
        ({"rank": 4, "alpha": 0.0}, r"lora\.alpha must be a number above 0"),
        ({"rank": 4, "targets": []}, r"lora\.targets must name one layer or more, each once"),
        ({"rank": 4, "targets": ["q_proj", "q_proj"]}, r"each once, got \['q_proj', 'q_proj'\]"),
        ({"rnak": 4}, r"unknown setting lora\.rnak; did you mean rank\?"),
    ]:
        with pytest.raises(ConfigError, match=message):
            lora_section({"lora": settings})


def run_of(folder: Path, name: str, **lora: object) -> Table:
    (folder / "config.json").write_text(json.dumps({**SHAPE, **MODELS[name]}))
    (folder / "tokenizer.json").write_text("{}")
    return {
        "run": {"model": str(folder)},
        "generators": {"device": "cpu"},
        "lora": {"rank": 4, "targets": ["q_proj", "v_proj"], **lora},
    }


def test_a_run_says_how_adapters_are_published_and_why(tmp_path: Path):
    said = {
        "next to the weights in every engine": run_of(tmp_path, "qwen3"),
        "as lora.publish says": run_of(tmp_path, "qwen3", publish="merged"),
    }
    for reason, table in said.items():
        route = lora_section(table).publish
        assert publishing(table) == f"lora.publish: {route}, {reason}"
    table = run_of(tmp_path, "qwen3_5", targets=["in_proj_z"])
    assert lora_section(table).publish == "merged"
    assert publishing(table) == (
        "lora.publish: merged, because SGLang has no adapters of linear attention's in_proj_z"
    )
    assert publishing({"run": {"model": str(tmp_path)}}) == ""


@pytest.mark.parametrize("name", ["ep_size", "attn_dp_size"])
def test_engines_of_several_groups_have_adapters_in_their_weights(tmp_path: Path, name: str):
    table = run_of(tmp_path, "qwen3_moe")
    table["generators"]["sglang"] = {"tp_size": 2, name: 2}
    assert lora_section(table).publish == "merged"
    assert f"because generators.sglang.{name} = 2" in publishing(table)


def test_named_adapters_that_no_engine_can_hold_are_refused(tmp_path: Path):
    table = run_of(tmp_path, "qwen3_5", targets=["in_proj_z"], publish="named")
    with pytest.raises(
        ConfigError, match=r'publish = "named" cannot be had: SGLang has no .*"merged"'
    ):
        lora_section(table)
