import json
import math
from pathlib import Path

import pytest

from slipstream.wire.errors import ConfigError
from slipstream.wire.models.hf_config import load_hf_config, refuse_other_tokens

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}


def write(folder: Path, **changes: object) -> Path:
    config = {key: value for key, value in {**QWEN2, **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_head_size_follows_from_the_hidden_size_where_the_file_does_not_name_it(tmp_path: Path):
    assert load_hf_config(write(tmp_path)).kv_channels == 64
    assert load_hf_config(write(tmp_path, head_dim=128)).kv_channels == 128


def test_absent_key_value_heads_mean_one_per_query_head(tmp_path: Path):
    config = load_hf_config(write(tmp_path, num_key_value_heads="absent"))
    assert config.num_query_groups == 14


def test_rope_base_is_found_at_the_top_level_and_nested(tmp_path: Path):
    nested = {"rope_theta": 500000.0, "rope_type": "default"}
    assert load_hf_config(write(tmp_path)).rotary_base == 1000000.0
    config = load_hf_config(write(tmp_path, rope_theta="absent", rope_parameters=nested))
    assert config.rotary_base == 500000.0
    assert load_hf_config(write(tmp_path, rope_theta="absent")).rotary_base == 10000.0
    both = {"rope_parameters": nested, "rope_scaling": {}}
    assert load_hf_config(write(tmp_path, **both)).rotary_base == 500000.0


@pytest.mark.parametrize("top", [1e6, "absent"])
@pytest.mark.parametrize("rule", [{"rope_type": "default"}, {"rope_type": "llama3", "factor": 8.0}])
def test_of_both_nested_forms_rope_scaling_alone_is_read_as_by_transformers(
    tmp_path: Path, top: object, rule: dict[str, object]
):
    other = {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0}
    given = {"rope_theta": top, "rope_parameters": other, "rope_scaling": rule}
    config = load_hf_config(write(tmp_path, **given))
    usual = 1e4 if top == "absent" else top
    assert (config.rotary_base, config.rope.scaling) == (usual, rule["rope_type"])
    given["rope_scaling"] = {**rule, "rope_theta": 7e5}
    assert load_hf_config(write(tmp_path, **given)).rotary_base == 7e5


@pytest.mark.parametrize(
    ("family", "has_qkv_bias", "has_qk_norm"),
    [("llama", False, False), ("qwen2", True, False), ("qwen3", False, True)],
)
def test_families_differ_in_bias_and_norm(
    tmp_path: Path, family: str, has_qkv_bias: bool, has_qk_norm: bool
):
    config = load_hf_config(write(tmp_path, model_type=family))
    assert (config.has_qkv_bias, config.has_qk_norm) == (has_qkv_bias, has_qk_norm)


def test_unsupported_family_is_refused_with_the_supported_ones_named(tmp_path: Path):
    write(tmp_path, model_type="gemma3")
    with pytest.raises(ConfigError, match=r"'gemma3'.*llama, qwen2, qwen3.*run\.model"):
        load_hf_config(tmp_path)


def test_what_would_compute_something_else_is_refused(tmp_path: Path):
    for changes, message in [
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window must be False"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type must be one of default, llama3, yarn, got 'linear'",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "got 'longrope'"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "'yarn' must be at least 1, got 0.5"),
        (
            {"rope_scaling": {"type": "yarn", "mscale": 1.0}},
            "mscale is read in one way by the engine",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 0.5}},
            "attention_factor is read .*attention_factor 1.138",
        ),
        (
            {"rope_scaling": {"type": "llama3", "low_freq_factor": 4.0}},
            "low_freq_factor must be below high_freq_factor, got 4.0 and 4.0",
        ),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias must be False"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias must be False"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads must be {}, got {'0'"),
        ({"per_layer_config": {"0": {"hidden_size": 8}}}, "per_layer_config = .* is not a key"),
        ({"sliding_window_pattern": 6}, "sliding_window_pattern = 6 is not a key that a qwen2"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "got 'sliding_attention'"),
        ({"num_experts": 8}, "num_experts = 8 is not a key"),
        ({"attention_dropout": 0.1}, "attention_dropout must be 0.0, got 0.1"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "mrope_section": [1]}},
            "mrope_section is not known of a qwen2 model",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq'.* only fp8"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads, got 14 and 3"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "beta_fast": 32}},
            "beta_fast = 32.0 is not read by rope_type 'llama3'",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5 of rope_parameters is not known of a qwen2 model",
        ),
        ({"use_mrope": True}, "use_mrope must be False, got True"),
        ({"hidden_size": 0}, "hidden_size must be from 1 to 2147483647, got 0"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be from 1 to 1024, got 10+"),
        ({"num_attention_heads": 0}, "num_attention_heads must be from 1 to 2147483647, got 0"),
        ({"vocab_size": -4}, "vocab_size must be from 1 to 2147483647, got -4"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be from 1 to .*, got 0"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be from 0 to 1, got -1e-06"),
        ({"hidden_size": 900}, "multiple of num_attention_heads .* got 900 and 14"),
        ({"head_dim": 7}, "an even number of a head's 7 channels must turn .*, got 7"),
        ({"rope_theta": 0}, "rope_theta must be above 1, got 0"),
        ({"rope_parameters": {"rope_theta": -2.0}}, "rope_theta must be above 1, got -2"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_slow": 0.0}},
            "beta_slow of rope_type 'yarn' must be above 0, got 0",
        ),
        ({"layer_types": 3}, "layer_types must be a list, got 3"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}},
            r"weight_block_size \(0, 128\).* only fp8",
        ),
        *(
            (
                {"model_type": "glm4", "head_dim": 16, "partial_rotary_factor": share},
                f"of a head's 16 channels must turn .*, got {turning} .partial_rotary_factor",
            )
            for share, turning in ((0, 0), (0.2, 3), (2, 32), (-1.0, -16))
        ),
        ({"hidden_size": "wide"}, r"Expected `int`, got `str` - at `\$.hidden_size`"),
        ({"vocab_size": "absent"}, "missing required field `vocab_size`"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_hf_config(write(tmp_path, **changes))


QWEN3_MOE = {
    **QWEN2,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "tie_word_embeddings": False,
}


def test_keys_of_published_files_that_change_nothing_are_taken(tmp_path: Path):
    for keys in [
        {"use_mrope": False, "sliding_window": 32768, "max_window_layers": 24},  # Qwen2.5
        {"_attn_implementation_autoset": True, "_flash_attn_2_enabled": True},  # transformers 4
        {"neftune_noise_alpha": 5, "gradient_checkpointing": True},  # its trainer, and TRL's
        {"max_length": 20, "do_sample": True, "top_k": 50, "forced_eos_token_id": 2},
        {"tie_encoder_decoder": False, "torchscript": False, "pruned_heads": {}, "prefix": "a"},
        {"model_type": "llama", "is_llama_config": True, "rope_interleaved": False},  # SmolLM2
        {  # Qwen3-Coder
            **QWEN3_MOE,
            "qkv_bias": False,
            "shared_expert_intermediate_size": 0,
            "use_qk_norm": True,
        },
    ]:
        assert load_hf_config(write(tmp_path, **keys)).shared_inner == 0


def test_tied_embeddings_are_refused_where_the_engine_does_not_tie_them(tmp_path: Path):
    for family in ["qwen2_moe", "qwen3_moe", "mixtral", "glm4_moe"]:
        write(tmp_path, model_type=family)
        with pytest.raises(ConfigError, match="tie_word_embeddings must be False, got True"):
            load_hf_config(tmp_path)


V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}


def test_latent_attention_and_experts_are_read_under_one_name(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(V3))
    hf = load_hf_config(tmp_path)
    assert [hf.is_sparse(layer) for layer in range(3)] == [False, True, True]
    assert (hf.num_routed_experts, hf.shared_inner, hf.num_router_groups) == (16, 64, 4)
    assert (hf.kv_channels, hf.rotary_channels, hf.value_channels) == (24, 8, 24)
    more = 0.1 * math.log(40.0) + 1.0  # DeepSeek-V3's attention: mscale squared
    assert hf.attention_scale == pytest.approx(more**2 / math.sqrt(24))
    assert hf.rope.rotary_scale == 1.0
    greedy = {**V3, "model_type": "deepseek_v2", "topk_method": "greedy", "scoring_func": "softmax"}
    (tmp_path / "config.json").write_text(json.dumps(greedy))
    assert load_hf_config(tmp_path).num_router_groups == 1


def test_a_mixture_that_would_compute_something_else_is_refused(tmp_path: Path):
    for changes, message in [
        ({"n_group": 3}, "n_group = 3 must divide n_routed_experts = 16"),
        ({"topk_group": 1, "num_experts_per_tok": 5}, "must hold num_experts_per_tok = 5"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok = 17 is above n_routed_experts = 16"),
        ({"n_routed_experts": None}, "n_routed_experts must be at least 1"),
        ({"scoring_func": "softmax"}, "scoring_func must be 'sigmoid', got 'softmax'"),
        ({"rope_interleave": False}, "rope_interleave must be True"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0}},
            "mscale and mscale_all_dim must both be set or neither",
        ),
        ({"rope_scaling": {"type": "llama3", "factor": 4.0}}, "only 'yarn'"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 40.0, "attention_factor": 1.3688879}},
            "attention_factor is read in one way by the engine",
        ),
        ({"moe_layer_freq": 2}, "moe_layer_freq must be 1, got 2"),
        (
            {"model_type": "deepseek_v2", "scoring_func": "softmax"},
            "topk_method must be greedy or group_limited_greedy, got 'noaux_tc'",
        ),
        ({"n_group": 0}, "n_group must be from 1 to 4096, got 0"),
        ({"n_routed_experts": 10**9}, "n_routed_experts must be from 1 to 4096, got 1000000000"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be from 1 to .*, got 0"),
        ({"kv_lora_rank": None}, "kv_lora_rank must be from 1 to .*, got 0"),
        ({"qk_rope_head_dim": 5}, "channels must turn with the position, 2 or more, got 5"),
        ({"first_k_dense_replace": 3}, "below num_hidden_layers = 3, got 3"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok must be at least 1, and is not set"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor must be above 0, got 0"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({**V3, **changes}))
        with pytest.raises(ConfigError, match=message):
            load_hf_config(tmp_path)


def test_folder_without_config_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no config\.json in .*run\.model"):
        load_hf_config(tmp_path)


def test_a_frozen_policy_is_named_by_its_own_setting(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no config.json in .* \(algo.teacher.model\)"):
        load_hf_config(tmp_path / "nowhere", "algo.teacher.model")
    with pytest.raises(ConfigError, match=r"hidden_act must be 'silu'.* \(algo.teacher.model\)"):
        load_hf_config(write(tmp_path, hidden_act="gelu"), "algo.teacher.model")


def models(folder: Path, *, tokenizers: tuple[str, str], sizes: tuple[int, int]) -> list[Path]:
    found = []
    for name, tokenizer, size in zip(("teacher", "policy"), tokenizers, sizes, strict=True):
        (folder / name).mkdir()
        found.append(write(folder / name, vocab_size=size))
        if tokenizer:
            (found[-1] / "tokenizer.json").write_text(tokenizer)
    return found


@pytest.mark.parametrize(
    ("tokenizers", "sizes", "whole", "fits"),
    [
        (("", ""), (100, 100), True, True),
        (('{"a": 1}', '{"a": 1}'), (128, 100), False, True),  # the same, padded otherwise
        (('{"a": 1}', '{"a": 1}'), (128, 100), True, False),
        (('{"a": 1}', '{"a": 2}'), (128, 100), False, False),
        (("", ""), (128, 100), False, False),
    ],
)
def test_a_frozen_policy_has_the_same_tokens(
    tmp_path: Path, tokenizers: tuple[str, str], sizes: tuple[int, int], whole: bool, fits: bool
):
    teacher, policy = models(tmp_path, tokenizers=tokenizers, sizes=sizes)
    if fits:
        refuse_other_tokens(teacher, policy, "algo.teacher.model", whole=whole)
        return
    with pytest.raises(
        ConfigError, match=r"\(algo.teacher.model\) has 128 tokens and run.model 100"
    ):
        refuse_other_tokens(teacher, policy, "algo.teacher.model", whole=whole)


BPE = '{"model": {"type": "BPE", "vocab": %s}, "added_tokens": [{"id": 2, "content": "%s"}]}'
UNIGRAM = '{"model": {"type": "Unigram", "vocab": [["a", -1.0], ["%s", %s]]}}'


@pytest.mark.parametrize(
    ("tokenizers", "fits"),
    [
        ((BPE % ('{"a": 0, "b": 1}', "<x>"), BPE % ('{"b": 1, "a": 0}', "<y>")), True),
        ((BPE % ('{"a": 0, "b": 1}', "<x>"), BPE % ('{"a": 1, "b": 0}', "<x>")), False),
        ((UNIGRAM % ("b", -2.0), UNIGRAM % ("b", -3.0)), True),
        ((UNIGRAM % ("b", -2.0), UNIGRAM % ("c", -2.0)), False),
        ((BPE % ('{"a": 0}', "<x>"), ""), True),
        ((BPE % ('{"a": 0}', "<x>"), '{"model": 3}'), True),
        ((BPE % ('{"a": 0}', "<x>"), "[]"), True),
    ],
)
def test_as_many_tokens_may_be_others(tmp_path: Path, tokenizers: tuple[str, str], fits: bool):
    teacher, policy = models(tmp_path, tokenizers=tokenizers, sizes=(100, 100))
    for whole in (False, True):
        if fits:
            refuse_other_tokens(teacher, policy, "algo.teacher.model", whole=whole)
            continue
        with pytest.raises(ConfigError, match=r"\(algo.teacher.model\) numbers other tokens than"):
            refuse_other_tokens(teacher, policy, "algo.teacher.model", whole=whole)


GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def test_every_second_layer_has_a_window_where_config_json_does_not_say_which(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS | {"sliding_window": 9}))
    hf = load_hf_config(tmp_path)
    assert [hf.window_of(layer) for layer in range(4)] == [9, None, 9, None]
    kinds = ["full_attention", "full_attention", "sliding_attention", "full_attention"]
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS | {"layer_types": kinds}))
    hf = load_hf_config(tmp_path)
    assert [hf.window_of(layer) for layer in range(4)] == [None, None, 128, None]
    assert hf.swiglu_limit == 7.0


def test_what_is_not_computed_of_gpt_oss_is_refused_with_its_reason(tmp_path: Path):
    mxfp4 = {"quant_method": "mxfp4"}
    for changes, message in [
        (
            {"layer_types": ["full_attention", "chunked_attention"] * 2},
            "must all be 'sliding_attention' or 'full_attention', got 'chunked_attention'",
        ),
        ({"layer_types": ["full_attention"]}, "num_hidden_layers = 4 layers, got 1"),
        ({"sliding_window": 0}, "sliding_window must be from 1 to 2147483647, got 0"),
        ({"swiglu_limit": 0}, "swiglu_limit must be above 0, got 0"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha must be 1.702, got 1.0"),
        ({"attention_bias": False}, "attention_bias must be True, got False"),
        (
            {"quantization_config": mxfp4, "intermediate_size": 40},
            "mxfp4 has blocks of 32 numbers, got intermediate_size = 40",
        ),
        ({"quantization_config": {"quant_method": "quark"}}, "quant_method 'quark'.* only fp8"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(GPT_OSS | changes))
        with pytest.raises(ConfigError, match=f"{message}.*run.model"):
            load_hf_config(tmp_path)
    mixtral = GPT_OSS | {"model_type": "mixtral", "quantization_config": mxfp4}
    (tmp_path / "config.json").write_text(json.dumps(mixtral))
    with pytest.raises(ConfigError, match=r"'mxfp4'.* and mxfp4 where the experts of a layer are"):
        load_hf_config(tmp_path)
