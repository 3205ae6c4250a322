import json
from pathlib import Path

import pytest

from slipstream.generators.engine import ExpertLayers
from slipstream.generators.sglang.device_defaults import device_defaults
from slipstream.generators.sglang.running import sampling_by_item
from slipstream.generators.sglang.start_order import random_api_key, server_flags
from slipstream.wire.errors import ConfigError
from tests.support.blank_model import write_blank_model
from tests.support.generator_settings import generator_settings_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def test_settings_that_cannot_work_are_named(model: Path):
    for section, values, why in [
        ("sampling", {"top_k": 1}, r"sampling\.top_k must be -1 \(all\) or at least 2 .*, got 1"),
        ("sampling", {"top_k": 0}, r"sampling\.top_k must be -1 \(all\) or at least 2 .*, got 0"),
        (
            "sampling",
            {"top_k": 50, "max_kept_tokens": 49},
            r"sampling\.top_k = 50 keeps more than sampling\.max_kept_tokens = 49",
        ),
        (
            "generators",
            {"sglang": {"sampling_mask_max_tokens": 9}},
            r"sglang\.sampling_mask_max_tokens follows from other settings",
        ),
        ("run", {"routing_replay": "R3"}, r'routing_replay = "R3" needs experts .* llama, which'),
        ("run", {"routing_replay": "R2"}, r'routing_replay = "R2" needs experts .* llama, which'),
        (
            "generators",
            {"sglang": {"enable_return_routed_experts": True}},
            r"sglang\.enable_return_routed_experts follows from other settings",
        ),
        ("sampling", {"min_response_tokens": 101}, r"sampling\.min_response_tokens = 101 is more"),
        ("sampling", {"stop": [""]}, r"sampling\.stop must hold at most 32 texts and none"),
        ("sampling", {"stop_token_ids": [-1]}, r"sampling\.stop_token_ids must be >= 0"),
        ("sampling", {"chat_template": "nothing.jinja"}, r"sampling\.chat_template = .* no file"),
        ("eval", {"samples": 4}, r"eval\.samples = 4 greedy answers are all the same"),
        ("eval", {"top_k": 0}, r"eval\.top_k must be -1 \(all\) or at least 1, got 0"),
        (
            "sampling",
            {"max_response_tokens": 925},
            r"run\.model has 1024 positions and cannot hold .*"
            r"sampling\.max_prompt_tokens \+ sampling\.max_response_tokens = 1025",
        ),
        (
            "eval",
            {"max_response_tokens": 1000},
            r"run\.model has 1024 positions .* \+ eval\.max_response_tokens = 1100",
        ),
        ("generators", {"max_cached_tokens": 199}, r"max_cached_tokens = 199 does not hold .* 200"),
    ]:
        with pytest.raises(ConfigError, match=why):
            generator_settings_of(model, **{section: values})


def test_evaluation_has_sampling_of_its_own_and_the_stops_of_training(model: Path):
    settings = generator_settings_of(
        model,
        sampling={"temperature": 0.8, "stop": ["</answer>"], "stop_token_ids": [5]},
        eval={"temperature": 0.6, "top_p": 0.95, "top_k": 20, "samples": 4},
    )
    params = sampling_by_item(settings)
    train, evaluation = params["train"], params["eval"]
    assert (train.temperature, train.top_p, train.top_k) == (0.8, 1.0, -1)
    assert (evaluation.temperature, evaluation.top_p, evaluation.top_k) == (0.6, 0.95, 20)
    assert train.max_new_tokens == evaluation.max_new_tokens == 100
    for one in (train, evaluation):
        assert (one.stop, one.stop_token_ids) == (("</answer>",), (5,))
    longer = generator_settings_of(model, eval={"max_response_tokens": 300})
    assert sampling_by_item(longer)["eval"].max_new_tokens == 300


def test_kept_tokens_are_recorded_where_some_are_left_out(model: Path):
    for sampling, recorded in [
        ({}, 0),
        ({"top_p": 0.9}, 100),
        ({"top_k": 20}, 100),
        ({"min_p": 0.1}, 100),
        ({"top_p": 0.9, "kept_tokens": "drop"}, 0),
        ({"top_k": 200, "kept_tokens": "drop"}, 0),
    ]:
        settings = generator_settings_of(model, sampling={"max_kept_tokens": 100, **sampling})
        params = sampling_by_item(settings)
        assert params["train"].max_kept == recorded
        assert params["eval"].max_kept == 0
        assert params["train"].top_p == sampling.get("top_p", 1.0)
        assert params["train"].top_k == sampling.get("top_k", -1)
        assert params["train"].min_p == sampling.get("min_p", 0.0)
        flags = server_flags(settings, port=1, api_key="", seed_of="generator-0")
        assert ("sampling_mask_max_tokens" in flags) == bool(recorded)
        assert int(flags.get("sampling_mask_max_tokens", recorded)) >= recorded


def test_experts_are_recorded_where_they_are_replayed(tmp_path: Path):
    for replay, layers in [("off", None), ("R2", None), ("R3", ExpertLayers(total=5, dense=2))]:
        write_blank_model(tmp_path, hidden=16, layers=5)
        config = json.loads((tmp_path / "config.json").read_text())
        moved = {"model_type": "deepseek_v3", "first_k_dense_replace": 2}
        (tmp_path / "config.json").write_text(json.dumps(config | moved))
        settings = generator_settings_of(tmp_path, run={"routing_replay": replay})
        assert sampling_by_item(settings)["train"].experts_of == layers
        assert sampling_by_item(settings)["eval"].experts_of is None
        flags = server_flags(settings, port=1, api_key="", seed_of="generator-0")
        assert flags.get("enable_return_routed_experts", False) is (layers is not None)


def test_layers_without_experts_are_the_familys_where_config_json_says_nothing(tmp_path: Path):
    write_blank_model(tmp_path, hidden=16, layers=5)
    config = json.loads((tmp_path / "config.json").read_text())
    moved = {"model_type": "glm4_moe", "first_k_dense_replace": None}
    (tmp_path / "config.json").write_text(json.dumps(config | moved))
    settings = generator_settings_of(tmp_path, run={"routing_replay": "R3"})
    assert settings.expert_layers == ExpertLayers(total=5, dense=1)


@pytest.mark.parametrize(("seeded", "backend"), [(True, "pytorch"), (False, None)])
def test_seeds_ask_for_the_sampler_that_takes_them(model: Path, seeded: bool, backend: str | None):
    settings = generator_settings_of(
        model, sampling={"seed_per_sibling": seeded}, generators={"device": "cuda"}
    )
    defaults = device_defaults(settings, {"flashinfer"})
    flags = server_flags(settings, port=1, api_key="", seed_of="generator-0", defaults=defaults)
    assert flags.get("sampling_backend") == backend


def test_no_key_is_taken_for_a_flag():
    keys = {random_api_key() for _ in range(500)}
    assert len(keys) == 500
    assert all(key.isalnum() for key in keys)


def test_deltas_are_for_generators_on_other_hosts_unless_set(model: Path, tmp_path: Path):
    for encoding, broker, uses_deltas in [
        ("auto", "", False),
        ("auto", "tcp://head:5555", True),
        ("full", "tcp://head:5555", False),
        ("delta", "", True),
    ]:
        (tmp_path / "key").write_text("")
        run = {"broker": broker, "key_file": str(tmp_path / "key")} if broker else {}
        found = generator_settings_of(model, run=run, weightbus={"encoding": encoding})
        assert found.uses_deltas == uses_deltas


def test_without_workers_an_environment_gives_all_rewards(model: Path):
    for function, reward, expected in [
        ("a.py:A", {"workers": 0}, True),
        ("a.py:A", {"workers": 0, "inline": True}, False),
        ("a.py:A", {}, False),
        ("", {"workers": 0}, False),
    ]:
        found = generator_settings_of(model, environment={"function": function}, reward=reward)
        assert found.has_no_scorer is expected


@pytest.mark.parametrize(
    ("changes", "sections", "why"),
    [
        (
            {"num_experts": 6},
            {"generators": {"sglang": {"tp_size": 4, "ep_size": 4}}},
            r"num_experts of run\.model .* multiple of generators\.sglang\.ep_size, got 6 and 4",
        ),
        (
            {"moe_intermediate_size": 50},
            {"generators": {"sglang": {"tp_size": 4}}},
            r"moe_intermediate_size of run\.model .* of generators\.sglang\.tp_size, got 50 and 4",
        ),
        (
            {"moe_intermediate_size": 51},
            {"generators": {"sglang": {"tp_size": 4, "ep_size": 2}}},
            r"moe_intermediate_size .* generators\.sglang\.tp_size / ep_size, got 51 and 2",
        ),
    ],
)
def test_groups_of_experts_that_cannot_be_equal_are_named_with_both_numbers(
    changes: dict[str, int], sections: dict[str, dict[str, object]], why: str, tmp_path: Path
):
    write_mixture(tmp_path, **changes)
    with pytest.raises(ConfigError, match=why):
        generator_settings_of(tmp_path, **sections)


def test_whole_experts_need_no_inner_size_that_ranks_divide(tmp_path: Path):
    write_mixture(tmp_path, num_experts=8, moe_intermediate_size=51)
    by_experts = {"sglang": {"tp_size": 4, "ep_size": 4, "attn_dp_size": 2}}
    generators = generator_settings_of(tmp_path, generators=by_experts).generators
    assert (generators.num_ranks, generators.attention_groups) == (4, 2)
    assert generators.expert_groups == 4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_experts_are_run_by_kernels_that_read_them_as_they_were_published(
    device: str, model: Path, tmp_path: Path
):
    write_mixture(tmp_path)
    mixture, dense = (
        device_defaults(
            generator_settings_of(folder, generators={"device": device}), {"flashinfer"}
        ).flags
        for folder in (tmp_path, model)
    )
    assert mixture["moe_runner_backend"] == "triton"
    assert "moe_runner_backend" not in dense


def test_layers_with_windows_keep_all_tokens_in_the_usual_cache(model: Path, tmp_path: Path):
    write_blank_model(tmp_path, hidden=16, layers=1)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    windowed, other = (
        device_defaults(generator_settings_of(folder), {"flashinfer"}).flags
        for folder in (tmp_path, model)
    )
    assert windowed["disable_hybrid_swa_memory"] is True
    assert "disable_hybrid_swa_memory" not in other


def write_mixture(folder: Path, **changes: int) -> None:
    write_blank_model(folder, hidden=16, layers=1)
    config = json.loads((folder / "config.json").read_text())
    qwen = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    (folder / "config.json").write_text(json.dumps(config | qwen | changes))
