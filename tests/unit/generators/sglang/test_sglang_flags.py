import json
import os
from pathlib import Path
from typing import Any

import pytest

from slipstream.deploy.predict.laws.shapes import shape_folder
from slipstream.generators.config import GeneratorSettings
from slipstream.generators.sglang import start_order
from slipstream.generators.sglang.device_defaults import Flag, device_defaults
from slipstream.generators.sglang.process import SglangProcess
from slipstream.generators.sglang.start_order import EngineNode, described, server_flags
from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.lora import LINEAR_LAYERS
from slipstream.wire.settings.rendezvous import Address
from tests.support.blank_model import write_blank_model
from tests.support.generator_settings import generator_settings_of

PACKAGES = {"flashinfer", "xgrammar"}


def flags(model: Path, in_flight: str, **sglang: bool) -> dict[str, Flag]:
    settings = generator_settings_of(
        model, generators={"sglang": sglang}, weightbus={"in_flight": in_flight}
    )
    return server_flags(settings, port=1, api_key="", seed_of="generator-0")


def defaults(
    model: Path, packages: set[str], *, device: str = "cuda", **sections: dict[str, object]
) -> dict[str, Flag]:
    """Return what SGLang is started with for an engine on a GPU."""
    sections["generators"] = {"device": device, **sections.get("generators", {})}
    settings = generator_settings_of(model, **sections)
    chosen = device_defaults(settings, packages)
    return server_flags(settings, port=1, api_key="", seed_of="generator-0", defaults=chosen)


def test_a_gpu_has_sglangs_own_graphs_and_kernels_where_their_packages_are_there(tmp_path: Path):
    chosen = {"attention_backend", "sampling_backend", "grammar_backend"}
    for packages, expected in [
        (PACKAGES, {}),
        ({"aiter", "xgrammar"}, {}),
        ({"xgrammar"}, {"attention_backend": "triton", "sampling_backend": "pytorch"}),
        ({"flashinfer"}, {"grammar_backend": "none"}),
    ]:
        found = defaults(tmp_path, packages, sampling={"seed_per_sibling": False})
        assert {name: found[name] for name in chosen & found.keys()} == expected
        assert not [name for name in found if "graph" in name], "SGLang records prefill, too"
    mine = defaults(tmp_path, set(), generators={"sglang": {"attention_backend": "fa4"}})
    assert mine["attention_backend"] == "fa4"


FP8: dict[str, object] = {"precision": "fp8"}


def test_an_engine_in_fp8_is_started_from_a_folder_that_says_so(tmp_path: Path):
    model, scratch = shape_folder("Qwen3-30B-A3B"), tmp_path / "scratch"
    scratch.mkdir()
    assert start_order.model_flags(model, scratch) == {}
    flags = start_order.model_flags(model, scratch, is_fp8=True)
    assert flags == {"model_path": str(scratch / "model"), "load_format": "dummy"}
    config = json.loads((scratch / "model/config.json").read_text())
    quantization = config.pop("quantization_config")
    assert quantization["weight_block_size"] == [128, 128]
    assert config == json.loads((model / "config.json").read_text())
    assert defaults(model, PACKAGES, weightbus=FP8)["fp8_gemm_runner_backend"] == "triton"
    assert "fp8_gemm_runner_backend" not in defaults(model, PACKAGES)
    with pytest.raises(ConfigError, match='expected "triton", which reads weights as they were'):
        defaults(
            model,
            PACKAGES,
            weightbus=FP8,
            generators={"sglang": {"fp8_gemm_runner_backend": "cutlass"}},
        )


@pytest.mark.parametrize("pictures", [{"vision_config": {}}, {}])
def test_an_engine_of_a_model_that_also_sees_has_its_language_model(
    tmp_path: Path, pictures: dict[str, Any]
):
    model, scratch = tmp_path / "model", tmp_path / "scratch"
    for folder in (model, scratch):
        folder.mkdir()
    config = {"model_type": "qwen3_5", "text_config": {"num_hidden_layers": 4}, **pictures}
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").write_bytes(b"weights")
    assert start_order.model_flags(model, scratch) == {"model_path": str(scratch / "model")}
    written = json.loads((scratch / "model/config.json").read_text())
    assert written == config | {"language_model_only": True}
    assert (scratch / "model/model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_an_engine_of_a_policy_that_sees_has_all_of_it(tmp_path: Path, kind: str):
    config = {"model_type": kind, "text_config": {}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert start_order.model_flags(tmp_path, tmp_path) == {}


def test_a_quantized_model_that_sees_is_refused(tmp_path: Path):
    config = json.loads((shape_folder("Qwen3-30B-A3B") / "config.json").read_text())
    config |= {"model_type": "qwen3_vl", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="made-up weights, its vision tower included"):
        generator_settings_of(tmp_path)


@pytest.mark.parametrize("is_within", [True, False])
def test_an_engine_has_no_quantization_of_a_language_model_within_another(
    tmp_path: Path, is_within: bool
):
    text: dict[str, Any] = {"num_hidden_layers": 4}
    config = {"model_type": "qwen3_5", "text_config": text}
    (text if is_within else config)["quantization_config"] = {"quant_method": "fp8"}
    model, scratch = tmp_path / "model", tmp_path / "scratch"
    for folder in (model, scratch):
        folder.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    flags = start_order.model_flags(model, scratch)
    assert flags == {"model_path": str(scratch / "model"), "load_format": "dummy"}
    written = json.loads((scratch / "model/config.json").read_text())
    assert written == {
        "model_type": "qwen3_5",
        "text_config": {"num_hidden_layers": 4},
        "language_model_only": True,
    }


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"generators": {"sglang": {"tp_size": 4}}}, r"multiple of 512 .*tp_size = 4, got 768"),
        ({"weightbus": {**FP8, "transport": "collective"}}, 'carries no such numbers; set "tcp"'),
        ({"lora": {"rank": 8, "targets": ["o_proj"]}}, "versions are adapters of weights that"),
        ({"generators": {"device": "cuda", "dtype": "float32"}}, 'expected "bfloat16", the type'),
        ({"generators": {"sglang": {"kv_cache_dtype": "fp8_e4m3"}}}, r"needs a GPU, .*on a CPU"),
    ],
)
def test_what_cannot_be_in_fp8_is_refused(sections: dict[str, Any], message: str):
    given = {"weightbus": FP8, **sections}
    given["generators"] = {"device": "cpu", **given.get("generators", {})}
    with pytest.raises(ConfigError, match=message):
        generator_settings_of(shape_folder("Qwen3-30B-A3B"), **given)


def test_turns_that_begin_on_a_gpu_share_a_prefill(tmp_path: Path):
    environment: dict[str, object] = {"function": "environments.py:count", "max_tokens": 200}
    for device, section, expected in [
        ("cuda", environment, 8),
        ("cuda", {}, None),
        ("cpu", environment, None),
    ]:
        found = defaults(tmp_path, PACKAGES, device=device, environment=section)
        assert found.get("prefill_decode_interval") == expected
        half = expected and 64 // 2
        assert found.get("prefill_decode_interval_min_bs") == half, "of its lanes"
    own = {"sglang": {"prefill_decode_interval": 0}}
    found = defaults(tmp_path, PACKAGES, environment=environment, generators=own)
    assert found["prefill_decode_interval"] == 0


def test_turns_are_prefilled_beside_what_is_decoded_where_that_is_exact(tmp_path: Path):
    environment: dict[str, object] = {"function": "environments.py:count", "max_tokens": 200}
    groups = {"sglang": {"tp_size": 2, "attn_dp_size": 2}}
    write_blank_model(tmp_path, hidden=16, layers=1)
    config = tmp_path / "config.json"
    qwen = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    config.write_text(json.dumps(json.loads(config.read_text()) | qwen))
    for device in ("cpu", "cuda"):
        for sections, expected in [
            ({"environment": environment}, True),
            ({"environment": environment, "weightbus": {"in_flight": "in_place"}}, None),
            ({"environment": environment, "generators": groups}, None),
            (
                {
                    "environment": environment,
                    "generators": {"sglang": {"enable_mixed_chunk": False}},
                },
                False,
            ),
            ({}, None),
        ]:
            found = defaults(tmp_path, PACKAGES, device=device, **sections)
            assert found.get("enable_mixed_chunk") is expected


def test_collectors_are_frozen_where_processes_are_spawned_on_one_host(tmp_path: Path):
    several = {"nodes": 2, "sglang": {"tp_size": 2}}
    for generators, frozen in [
        ({"device": "cpu"}, False),
        ({"device": "cuda"}, True),
        ({"device": "cuda", **several}, False),
    ]:
        settings = generator_settings_of(tmp_path, generators=generators)
        assert device_defaults(settings, PACKAGES).freezes_collectors is frozen
        assert f"sglang /freeze_gc = {frozen}" in described(settings, "generator-0")


def test_prefixes_are_cached_unless_answers_keep_what_was_computed_under_old_weights(
    tmp_path: Path,
):
    assert "disable_radix_cache" not in flags(tmp_path, "retract")
    assert flags(tmp_path, "in_place")["disable_radix_cache"] is True
    assert flags(tmp_path, "retract", disable_radix_cache=True)["disable_radix_cache"] is True


def test_prefixes_have_trajectories_where_these_have_several_turns(tmp_path: Path):
    environment: dict[str, object] = {"function": "a.py:A"}
    switched: list[dict[str, object]] = [
        {"enable_session_radix_cache": False},
        {"disable_radix_cache": True},
    ]
    for sections, expected in [
        ({"environment": environment}, True),
        ({}, False),
        ({"environment": environment, "weightbus": {"in_flight": "in_place"}}, False),
        *(
            ({"environment": environment, "generators": {"sglang": flags}}, False)
            for flags in switched
        ),
    ]:
        found = defaults(tmp_path, PACKAGES, **sections)
        assert found.get("enable_session_radix_cache", False) is expected


def test_a_prefix_cache_cannot_be_asked_for_beside_in_place(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"disable_radix_cache = false: .* only be switched on"):
        flags(tmp_path, "in_place", disable_radix_cache=False)


def test_version_runs_are_exact_whatever_a_change_does_to_answers(tmp_path: Path):
    for in_flight in ("retract", "in_place"):
        assert flags(tmp_path, in_flight)["disable_overlap_schedule"] is True
        on_gpu = defaults(tmp_path, PACKAGES, weightbus={"in_flight": in_flight})
        assert on_gpu["disable_overlap_schedule"] is (in_flight == "in_place")
    overlapped = flags(tmp_path, "retract", disable_overlap_schedule=False)
    assert overlapped["disable_overlap_schedule"] is False
    with pytest.raises(ConfigError, match=r'disable_overlap_schedule = false needs .* "retract"'):
        flags(tmp_path, "in_place", disable_overlap_schedule=False)


def test_logits_are_in_float32_unless_that_is_switched_off(tmp_path: Path):
    assert flags(tmp_path, "retract")["enable_fp32_lm_head"] is True
    assert flags(tmp_path, "retract", enable_fp32_lm_head=False)["enable_fp32_lm_head"] is False


def test_shared_experts_stay_by_themselves(tmp_path: Path):
    assert flags(tmp_path, "retract")["disable_shared_experts_fusion"] is True
    for name, message in (("disable", "follows from other"), ("enforce", "must not be set")):
        with pytest.raises(ConfigError, match=f"{name}_shared_experts_fusion {message}"):
            flags(tmp_path, "retract", **{f"{name}_shared_experts_fusion": True})


def test_an_engine_gets_what_it_needs_of_the_environment_and_what_a_setting_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", "1")
    ours = {"NCCL_IB_HCA": "mlx5", "SGLANG_LOGGING": "1", "HF_TOKEN": "h", "PLUGIN": "p", "X": "x"}
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    settings = generator_settings_of(tmp_path, generators={"environment": ["PLUGIN"]})
    found = start_order.environment_of(settings, tmp_path)
    assert {name for name in ours if name in found} == {"NCCL_IB_HCA", "SGLANG_LOGGING", "PLUGIN"}
    assert found["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == f"file://{tmp_path}/rendezvous"
    assert found["SLIPSTREAM_SEEDS"] == str(int(settings.sampling.seed_per_sibling))
    assert found["SLIPSTREAM_GROUP_TIMEOUT_S"] == str(settings.weightbus.timeout_s)
    assert found["SGLANG_TIMEOUT_KEEP_ALIVE"] == str(start_order.SERVER_KEEPS_S)
    assert found["SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"] == "0", "experts are where they were loaded"
    assert (found["TMPDIR"], found["HF_HUB_OFFLINE"]) == (str(tmp_path), "1")


@pytest.mark.parametrize(
    ("sections", "keeps"),
    [
        ({}, "2"),
        ({"generators": {"count": 0}}, "1"),
        ({"generators": {"device": "cuda"}}, "1"),
        ({"generators": {"shadow": False}}, "0"),
        ({"weightbus": {"transport": "collective"}}, "0"),
        ({"lora": {"rank": 8, "targets": ["o_proj"]}}, "0"),
    ],
)
def test_an_engine_keeps_a_second_copy_if_versions_are_loaded_into_its_weights(
    tmp_path: Path, sections: dict[str, Any], keeps: str
):
    settings = generator_settings_of(tmp_path, **sections)
    assert start_order.environment_of(settings, tmp_path)["SLIPSTREAM_SHADOW"] == keeps


@pytest.mark.parametrize(
    ("torch", "core"),
    [("2.11.0+cu130", "python"), ("2.12.1", "python"), ("2.13.0+cpu", None), ("2.14.1", None)],
)
def test_an_older_torch_has_the_prefix_tree_that_reads_its_types(
    torch: str, core: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = generator_settings_of(tmp_path)
    monkeypatch.delenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", raising=False)
    found = start_order.environment_of(settings, tmp_path, torch=torch)
    assert found.get("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND") == core
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "mine")
    found = start_order.environment_of(settings, tmp_path, torch=torch)
    assert found["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] == "mine"


def test_no_watchdog_ends_an_engine_and_its_ranks_have_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = generator_settings_of(tmp_path, generators={"sglang": {"tp_size": 2}})
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {7, 4, 5})
    found = start_order.environment_of(settings, tmp_path)
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert found["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert found["SGLANG_CPU_OMP_THREADS_BIND"] == "4|5"
    assert start_order.cores_of_ranks(4) == "4|5|7|4"


def test_on_a_cpu_the_tokens_bound_the_memory_and_not_a_share_of_what_is_free(tmp_path: Path):
    found = flags(tmp_path, "retract")
    assert found["max_total_tokens"] >= 200, "one answer and its prompt"
    assert 0.5 < float(found["mem_fraction_static"]) < 1.0


def adapters(model: Path, hidden: int = 128, **changed: dict[str, object]) -> GeneratorSettings:
    write_blank_model(model, hidden=hidden, layers=1)
    lora = {"rank": 4} | changed.pop("lora", {})
    return generator_settings_of(model, run={"max_staleness_steps": 3}, lora=lora, **changed)


def test_an_engine_has_room_for_every_version_of_adapters_that_may_be_in_use(tmp_path: Path):
    settings = adapters(tmp_path)
    found = server_flags(settings, port=1, api_key="", seed_of="generator-0")
    assert found["enable_lora"] is True
    assert found["max_lora_rank"] == 4
    assert found["max_loras_per_batch"] == (3 + 1) + 1  # the base has a place, too
    assert found["lora_backend"] == "torch_native"
    assert set(found["lora_target_modules"]) == set(LINEAR_LAYERS)  # type: ignore[arg-type]
    assert settings.transport == "tcp"
    merged = adapters(tmp_path, lora={"publish": "merged"})
    assert "enable_lora" not in server_flags(merged, port=1, api_key="", seed_of="generator-0")


def test_what_adapters_cannot_be_had_with_is_refused(tmp_path: Path):
    for changed, message in [
        (
            {"weightbus": {"transport": "collective"}},
            r'weightbus\.transport = "collective" writes into the weights .* set "tcp" or "disk"',
        ),
        (
            {"lora": {"targets": ["k_proj", "o_proj"], "publish": "named"}},
            r'publish = "named" cannot be had: .* names k_proj without q_proj, v_proj, and SGLang',
        ),
        (
            {"lora": {"publish": "named"}, "generators": {"sglang": {"ep_size": 2}}},
            r'publish = "named" cannot be had: generators\.sglang\.ep_size = 2',
        ),
        (
            {"generators": {"sglang": {"max_lora_rank": 8}}},
            r"generators\.sglang\.max_lora_rank follows from other settings",
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            adapters(tmp_path, **changed)


def test_adapters_that_no_engine_can_hold_are_published_in_the_weights(tmp_path: Path):
    assert adapters(tmp_path).lora.publish == "named"
    assert adapters(tmp_path, hidden=64).lora.publish == "merged"  # an MLP that a CPU pads
    assert adapters(tmp_path, hidden=64, lora={"targets": ["o_proj"]}).lora.publish == "named"
    assert adapters(tmp_path, lora={"targets": ["up_proj"]}).lora.publish == "merged"
    adapters(tmp_path)
    path = tmp_path / "config.json"
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantized}))
    assert generator_settings_of(tmp_path, lora={"rank": 4}).lora.publish == "merged"


@pytest.mark.parametrize("number", [0, 1])
def test_a_node_of_an_engine_meets_the_others_at_one_address_and_nowhere_else(
    tmp_path: Path, number: int
):
    settings = generator_settings_of(tmp_path, generators={"nodes": 2, "sglang": {"tp_size": 2}})
    received = None if number == 0 else tmp_path / "received"
    node = EngineNode(number, 2, Address("127.0.0.1", 40001), received)
    found = server_flags(settings, port=1, api_key="", seed_of="generator-0", node=node)
    flags = found["nnodes"], found["node_rank"], found["dist_init_addr"], found["dist_timeout"]
    assert flags == (2, number, "127.0.0.1:40001", 20 * 180)
    variables = start_order.environment_of(settings, tmp_path, node)
    assert variables["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == "tcp://127.0.0.1:40001"
    assert variables["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert variables["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] == "false"
    assert {"SYNC_TOKEN_IDS_ACROSS_TP": "1"}.items() <= variables.items()
    assert variables["GLOO_SOCKET_IFNAME"] == variables["NCCL_SOCKET_IFNAME"] == "lo"
    assert variables.get("SLIPSTREAM_RECEIVED") == (received and str(received))


def test_an_engine_on_one_host_is_no_part_of_one_on_several(tmp_path: Path):
    settings = generator_settings_of(tmp_path, generators={"nodes": 2, "sglang": {"tp_size": 2}})
    with pytest.raises(ConfigError, match=r"nodes = 2 is for the generators of a run"):
        SglangProcess.start(settings, "align")
