"""A shelf of published models: facts of their config.json, by repository of the Hugging Face hub.

The source of each is https://huggingface.co/REPOSITORY/blob/main/config.json, and of its size the
number of parameters that its page shows (without layers that predict further tokens). Where
a comment names another source, that was read instead.
"""

from typing import Any, NamedTuple

Config = dict[str, Any]
QWEN3_5_ROPE = {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_type": "default",
}


class Published(NamedTuple):
    """A model as it is published."""

    billions: float  # parameters
    config: Config
    within: float = 0.005  # share of them that this count may be off: of a name, more


def _sizes(
    hidden: int, inner: int, layers: int, heads: int, groups: int, vocabulary: int
) -> Config:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "use_cache": True,
    }


def _llama(*sizes: int, theta: float | None = 500000.0, **more: Any) -> Config:  # noqa: ANN401 JSON
    return {
        **_sizes(*sizes),
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **({"rope_theta": theta} if theta else {}),
        **more,
    }


def _llama3(factor: float) -> Config:
    rope = {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    return {
        "max_position_embeddings": 131072,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "rope_scaling": rope,
    }


def _qwen2(*sizes: int, theta: float = 1e6, **more: Any) -> Config:  # noqa: ANN401 JSON
    return {
        **_sizes(*sizes),
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "max_position_embeddings": 32768,
        "max_window_layers": sizes[2],
        "rms_norm_eps": 1e-06,
        "rope_theta": theta,
        "sliding_window": 32768,
        "tie_word_embeddings": sizes[0] < 3000,
        "use_sliding_window": False,
        **more,
    }


def _qwen3(*sizes: int, theta: float = 1e6, **more: Any) -> Config:  # noqa: ANN401 JSON
    return _qwen2(*sizes, theta=theta) | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_scaling": None,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        **more,
    }


def _qwen3_moe(*sizes: int, inner: int, **more: Any) -> Config:  # noqa: ANN401 JSON
    return _qwen3(*sizes) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": inner,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        **more,
    }


def _qwen2_moe(*sizes: int, **more: Any) -> Config:  # noqa: ANN401 JSON
    return _qwen2(*sizes) | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        **more,
    }


def _mixtral(*sizes: int, **more: Any) -> Config:  # noqa: ANN401 JSON
    return {
        **_sizes(*sizes),
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "attention_dropout": 0.0,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1e6,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        **more,
    }


def _deepseek(version: int, *sizes: int, inner: int, **more: Any) -> Config:  # noqa: ANN401 JSON
    name = f"DeepseekV{version}"
    code = {"AutoConfig": f"configuration_deepseek.{name}Config"}
    code["AutoModelForCausalLM"] = f"modeling_deepseek.{name}ForCausalLM"
    return {
        **_sizes(*sizes),
        "architectures": [f"{name}ForCausalLM"],
        "auto_map": code,
        "model_type": f"deepseek_v{version}",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "moe_intermediate_size": inner,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_shared_experts": 2,
        "norm_topk_prob": version == 3,
        "num_experts_per_tok": 6,
        "pretraining_tp": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "scoring_func": "sigmoid" if version == 3 else "softmax",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc" if version == 3 else "greedy",
        "v_head_dim": 128,
        **more,
    }


def _yarn(scale: float) -> Config:
    rope = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1}
    rope |= {"mscale": scale, "mscale_all_dim": scale, "original_max_position_embeddings": 4096}
    return {"max_position_embeddings": 163840, "rope_scaling": rope}


_V3 = _deepseek(3, 7168, 18432, 61, 128, 128, 129280, inner=2048) | {
    **_yarn(1.0),
    "first_k_dense_replace": 3,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}


def _glm(*sizes: int, **more: Any) -> Config:  # noqa: ANN401 JSON
    return {
        **_sizes(*sizes),
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": [151329, 151336, 151338],
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "pad_token_id": 151329,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **more,
    }


def _glm_moe(*sizes: int, inner: int, **more: Any) -> Config:  # noqa: ANN401 JSON
    return _glm(*sizes) | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": inner,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
        **more,
    }


def _gpt_oss(layers: int, experts: int) -> Config:
    return {
        **_sizes(2880, 2880, layers, 64, 8, 201088),
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 4,
        "num_local_experts": experts,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0",
    }


_LONG_BASE = {"eos_token_id": 151643, "max_position_embeddings": 131072, "sliding_window": 131072}
_LLAMA_8B, _QWEN_7B = (4096, 14336, 32, 32, 8, 128256), (3584, 18944, 28, 28, 4, 152064)


def _hybrid(
    hidden: int, layers: int, heads: int, groups: int, vocabulary: int, values: int = 32
) -> Config:
    return {
        **_sizes(hidden, 0, layers, heads, groups, vocabulary),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "full_attention_interval": 4,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": values,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-06,
    }


# Sizes as in scripts/models of THUDM/slime and in docs of transformers 5.19; other keys as
# config.json of a Qwen3.5-27B is printed in a report on its quantization.
def _qwen3_5(*sizes: int, inner: int, tied: bool, **more: object) -> Config:
    text = _hybrid(*sizes) | {"intermediate_size": inner, "mlp_only_layers": [], **more}
    return _with_pictures("qwen3_5", text, tied=tied)


def _qwen3_5_moe(*sizes: int, inner: int, chosen: int, experts: int) -> Config:
    text = _hybrid(*sizes) | {
        "moe_intermediate_size": inner,
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "shared_expert_intermediate_size": inner,
    }
    del text["intermediate_size"]
    return _with_pictures("qwen3_5_moe", text, tied=False)


def _with_pictures(model_type: str, text: Config, *, tied: bool) -> Config:
    more = {
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "model_type": f"{model_type}_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": QWEN3_5_ROPE,
        "tie_word_embeddings": tied,
    }
    return {
        "image_token_id": 248056,
        "model_type": model_type,
        "text_config": text | more,
        "tie_word_embeddings": tied,
        "vision_config": {"model_type": model_type},
    }


def _qwen2_5_vl(*sizes: int, tied: bool) -> Config:
    """Return a config.json of one level, with the tower of all sizes."""
    return {
        **_sizes(*sizes),
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "image_token_id": 151655,
        "max_position_embeddings": 128000,
        "max_window_layers": sizes[2],
        "model_type": "qwen2_5_vl",
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "video_token_id": 151656,
        "vision_config": {
            "depth": 32,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "hidden_act": "silu",
            "hidden_size": 1280,
            "in_chans": 3,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": sizes[0],
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "window_size": 112,
        },
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
        "vision_token_id": 151654,
    }


_SMALL_VISION = (24, 1024, 4096, [5, 11, 17])
_LARGE_VISION = (27, 1152, 4304, [8, 16, 24])


def _qwen3_vl(*sizes: int, tied: bool, vision: tuple[int, int, int, list[int]]) -> Config:
    depth, hidden, inner, seen = vision
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl",
        "text_config": {
            **_sizes(*sizes),
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "dtype": "bfloat16",
            "eos_token_id": 151645,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_type": "default",
            },
            "rope_theta": 5000000,
            "tie_word_embeddings": tied,
        },
        "tie_word_embeddings": tied,
        "video_token_id": 151656,
        "vision_config": {
            "deepstack_visual_indexes": seen,
            "depth": depth,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": hidden,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": inner,
            "model_type": "qwen3_vl",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": sizes[0],
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
    }


SHELF: dict[str, Published] = {
    "meta-llama/Llama-2-7b-hf": Published(
        6.74, _llama(4096, 11008, 32, 32, 32, 32000, theta=None, max_position_embeddings=4096)
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": Published(
        1.10, _llama(2048, 5632, 22, 32, 4, 32000, theta=1e4, max_position_embeddings=2048)
    ),
    "meta-llama/Meta-Llama-3-8B": Published(8.03, _llama(*_LLAMA_8B, max_position_embeddings=8192)),
    "meta-llama/Llama-3.1-8B-Instruct": Published(8.03, _llama(*_LLAMA_8B, **_llama3(8.0))),
    "meta-llama/Llama-3.2-1B-Instruct": Published(
        1.24,
        _llama(2048, 8192, 16, 32, 8, 128256, **_llama3(32.0), head_dim=64)
        | {"tie_word_embeddings": True},
    ),
    "meta-llama/Llama-3.2-3B": Published(
        3.21,
        _llama(3072, 8192, 28, 24, 8, 128256, **_llama3(32.0), head_dim=128)
        | {"tie_word_embeddings": True},
    ),
    "meta-llama/Llama-3.3-70B-Instruct": Published(
        70.55, _llama(8192, 28672, 80, 64, 8, 128256, **_llama3(8.0))
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": Published(
        8.03, _llama(*_LLAMA_8B, **_llama3(8.0), transformers_version="4.43.0.dev0")
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": Published(
        0.1345,
        _llama(576, 1536, 30, 9, 3, 49152, theta=1e5, max_position_embeddings=8192)
        | {
            "is_llama_config": True,
            "rope_interleaved": False,
            "tie_word_embeddings": True,
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        },
    ),
    "HuggingFaceTB/SmolLM2-1.7B": Published(
        1.71,
        _llama(2048, 8192, 24, 32, 32, 49152, theta=130000, max_position_embeddings=8192)
        | {"tie_word_embeddings": True},
    ),
    "Qwen/Qwen2-0.5B-Instruct": Published(0.494, _qwen2(896, 4864, 24, 14, 2, 151936)),
    "Qwen/Qwen2.5-1.5B-Instruct": Published(1.54, _qwen2(1536, 8960, 28, 12, 2, 151936)),
    "Qwen/Qwen2.5-Math-1.5B": Published(
        1.54,
        _qwen2(1536, 8960, 28, 12, 2, 151936, theta=1e4, max_position_embeddings=4096)
        | {"use_mrope": False},
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": Published(
        1.78,
        _qwen2(1536, 8960, 28, 12, 2, 151936, theta=1e4, max_position_embeddings=131072)
        | {"tie_word_embeddings": False, "use_mrope": False},
    ),
    "Qwen/Qwen2.5-3B": Published(3.09, _qwen2(2048, 11008, 36, 16, 2, 151936)),
    "Qwen/Qwen2.5-7B-Instruct": Published(7.62, _qwen2(*_QWEN_7B)),
    "Qwen/Qwen2.5-14B-Instruct": Published(14.77, _qwen2(5120, 13824, 48, 40, 8, 152064)),
    "Qwen/Qwen2.5-32B": Published(  # its config.json, as printed by an article on its FLOPs
        32.76, _qwen2(5120, 27648, 64, 40, 8, 152064) | _LONG_BASE | {"rms_norm_eps": 1e-05}
    ),
    "Qwen/Qwen2.5-72B-Instruct": Published(72.71, _qwen2(8192, 29568, 80, 64, 8, 152064)),
    "Qwen/Qwen3-0.6B": Published(0.596, _qwen3(1024, 3072, 28, 16, 8, 151936)),
    "Qwen/Qwen3-1.7B": Published(1.72, _qwen3(2048, 6144, 28, 16, 8, 151936)),
    "Qwen/Qwen3-4B": Published(4.02, _qwen3(2560, 9728, 36, 32, 8, 151936)),
    "Qwen/Qwen3-4B-Instruct-2507": Published(
        4.02, _qwen3(2560, 9728, 36, 32, 8, 151936, theta=5e6, max_position_embeddings=262144)
    ),
    "Qwen/Qwen3-8B": Published(8.19, _qwen3(4096, 12288, 36, 32, 8, 151936)),
    "Qwen/Qwen3-14B": Published(14.77, _qwen3(5120, 17408, 40, 40, 8, 151936)),
    "Qwen/Qwen3-32B": Published(32.76, _qwen3(5120, 25600, 64, 64, 8, 151936)),
    "Qwen/Qwen3-30B-A3B": Published(30.53, _qwen3_moe(2048, 6144, 48, 32, 4, 151936, inner=768)),
    "Qwen/Qwen3-235B-A22B": Published(
        235.09, _qwen3_moe(4096, 12288, 94, 64, 4, 151936, inner=1536)
    ),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": Published(
        30.53,
        # As transformers 4.57 prints the loaded config in a report on the model.
        _qwen3_moe(2048, 5472, 48, 32, 4, 151936, inner=768, max_position_embeddings=262144)
        | {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
        | {"max_window_layers": 28, "rope_theta": 10000000, "router_aux_loss_coef": 0.0},
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": Published(
        14.32,
        _qwen2_moe(2048, 5632, 24, 16, 16, 151936, num_experts=60, num_experts_per_tok=4)
        # As configuration_qwen.py in mindspore-lab/models has this model's.
        | {"max_position_embeddings": 8192, "max_window_layers": 21}
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    ),
    "Qwen/Qwen2-57B-A14B": Published(
        57.41,
        _qwen2_moe(3584, 18944, 28, 28, 4, 151936, num_experts=64, num_experts_per_tok=8)
        | _LONG_BASE  # QWEN2_57B_A14B_CONFIG in TensorRT-LLM's tests
        | {"moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480},
    ),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": Published(
        46.70, _mixtral(4096, 14336, 32, 32, 8, 32000, max_position_embeddings=32768)
    ),
    "mistralai/Mixtral-8x22B-v0.1": Published(
        140.62, _mixtral(6144, 16384, 56, 48, 8, 32000, max_position_embeddings=65536)
    ),
    "deepseek-ai/DeepSeek-V2-Lite-Chat": Published(
        15.71,
        _deepseek(2, 2048, 10944, 27, 16, 16, 102400, inner=1408)
        | {"n_routed_experts": 64, "routed_scaling_factor": 1.0, **_yarn(0.707)},
    ),
    "deepseek-ai/DeepSeek-V2": Published(
        235.74,
        _deepseek(2, 5120, 12288, 60, 128, 128, 102400, inner=1536)
        | {
            **_yarn(1.0),
            "n_group": 8,
            "n_routed_experts": 160,
            "q_lora_rank": 1536,
            "routed_scaling_factor": 16.0,
            "topk_group": 3,
            "topk_method": "group_limited_greedy",
        },
    ),
    "deepseek-ai/DeepSeek-V3": Published(671.03, _V3),
    "moonshotai/Moonlight-16B-A3B-Instruct": Published(
        15.96,
        _deepseek(3, 2048, 11264, 27, 16, 16, 163840, inner=1408, max_position_embeddings=8192)
        | {
            "n_routed_experts": 64,
            "num_nextn_predict_layers": 0,
            "rms_norm_eps": 1e-05,
            "rope_theta": 50000.0,
            "routed_scaling_factor": 2.446,
        },
    ),
    "THUDM/GLM-4-9B-0414": Published(9.40, _glm(4096, 13696, 40, 32, 2, 151552)),
    "THUDM/GLM-4-32B-0414": Published(
        32.57, _glm(6144, 23040, 61, 48, 2, 151552, attention_bias=False)
    ),
    "zai-org/GLM-4.5-Air": Published(106.85, _glm_moe(4096, 10944, 46, 96, 8, 151552, inner=1408)),
    "zai-org/GLM-4.5": Published(
        352.80,
        _glm_moe(5120, 12288, 92, 96, 8, 151552, inner=1536, n_routed_experts=160)
        | {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "use_qk_norm": True},
    ),
    # What these count is not published without the encoder of pictures: names round it.
    "Qwen/Qwen3.5-0.8B": Published(
        0.8, _qwen3_5(1024, 24, 8, 2, 248320, 16, inner=3584, tied=True), 0.07
    ),
    "Qwen/Qwen3.5-4B": Published(
        4.0, _qwen3_5(2560, 32, 16, 4, 248320, inner=9216, tied=True), 0.07
    ),
    "Qwen/Qwen3.5-9B": Published(
        9.0, _qwen3_5(4096, 32, 16, 4, 248320, inner=12288, tied=False), 0.07
    ),
    "Qwen/Qwen3.5-27B": Published(
        27.0, _qwen3_5(5120, 64, 24, 4, 248320, 48, inner=17408, tied=False), 0.07
    ),
    "Qwen/Qwen3.6-27B": Published(
        27.0, _qwen3_5(5120, 64, 24, 4, 248320, 48, inner=17408, tied=False), 0.07
    ),
    "Qwen/Qwen3.8-27B": Published(
        27.0,
        _qwen3_5(
            *(5120, 64, 24, 4, 248320, 48),
            inner=17408,
            tied=False,
            output_gate_type="swish",
            partial_rotary_factor=0.25,
        ),
        0.07,
    ),
    "Qwen/Qwen3.5-35B-A3B": Published(
        35.0, _qwen3_5_moe(2048, 40, 16, 2, 248320, inner=512, chosen=8, experts=256), 0.07
    ),
    "Qwen/Qwen3.6-35B-A3B": Published(
        35.0, _qwen3_5_moe(2048, 40, 16, 2, 248320, inner=512, chosen=8, experts=256), 0.07
    ),
    "Qwen/Qwen3.5-397B-A17B": Published(
        397.0, _qwen3_5_moe(4096, 60, 32, 2, 248320, 64, inner=1024, chosen=10, experts=512), 0.07
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": Published(
        80.0,
        _hybrid(2048, 48, 16, 2, 151936)
        | {
            "decoder_sparse_step": 1,
            "intermediate_size": 5120,
            "mlp_only_layers": [],
            "model_type": "qwen3_next",
            "moe_intermediate_size": 512,
            "norm_topk_prob": True,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "shared_expert_intermediate_size": 512,
            "tie_word_embeddings": False,
        },
        0.07,
    ),
    # Counted with their vision towers.
    "Qwen/Qwen2.5-VL-3B-Instruct": Published(
        3.755, _qwen2_5_vl(2048, 11008, 36, 16, 2, 151936, tied=True)
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": Published(
        8.292, _qwen2_5_vl(3584, 18944, 28, 28, 4, 152064, tied=False)
    ),
    "Qwen/Qwen3-VL-2B-Instruct": Published(
        2.128, _qwen3_vl(2048, 6144, 28, 16, 8, 151936, tied=True, vision=_SMALL_VISION)
    ),
    "Qwen/Qwen3-VL-4B-Instruct": Published(
        4.438, _qwen3_vl(2560, 9728, 36, 32, 8, 151936, tied=True, vision=_SMALL_VISION)
    ),
    "Qwen/Qwen3-VL-8B-Instruct": Published(
        8.767, _qwen3_vl(4096, 12288, 36, 32, 8, 151936, tied=False, vision=_LARGE_VISION)
    ),
    # Sizes of table 1 of arXiv:2508.10925; the page counts bytes of blocks.
    "openai/gpt-oss-20b": Published(20.91, _gpt_oss(24, 32)),
    "openai/gpt-oss-120b": Published(116.83, _gpt_oss(36, 128)),
}
# model_type of config.json of models that are refused, and what of them is not computed.
REFUSED = {
    "allenai/Olmo-3-7B-Instruct": ("olmo3", "norms lie after attention and MLP alone"),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": ("seed_oss", "its attention's biases are not known"),
    "deepseek-ai/DeepSeek-V3.2": ("deepseek_v32", "attention to chosen tokens alone (DSA)"),
    "google/gemma-3-1b-it": ("gemma3_text", "two rotary bases, and norms of another form"),
    "google/gemma-3-27b-it": ("gemma3", "two rotary bases, and norms of another form"),
    "google/gemma-4-31B-it": ("gemma4", "heads of two sizes, and layers that share keys"),
    "HuggingFaceTB/SmolLM3-3B": ("smollm3", "every fourth layer has no rotary embedding"),
    "ibm-granite/granite-4.0-h-small": ("granitemoehybrid", "layers of Mamba-2"),
    "LiquidAI/LFM2-8B-A1B": ("lfm2_moe", "layers of short convolutions alone"),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": ("llama4", "attention within chunks of a text"),
    "microsoft/phi-4": ("phi3", "queries, keys and values are one tensor of another order"),
    "MiniMaxAI/MiniMax-M2": ("minimax_m2", "norms over all heads of queries and of keys"),
    "mistralai/Mistral-7B-Instruct-v0.3": ("mistral", "its family has no table"),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": ("mistral3", "its family has no table"),
    "moonshotai/Kimi-K2-Instruct": ("kimi_k2", "its family has no table"),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("nemotron_h", "layers of Mamba-2"),
    "Qwen/Qwen3-Omni-30B-A3B-Instruct": ("qwen3_omni_moe", "it hears and sees"),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": ("qwen3_vl_moe", "pictures next to experts"),
    "zai-org/GLM-4.7-Flash": ("glm4_moe_lite", "its family has no table"),
    "zai-org/GLM-5": ("glm_moe_dsa", "attention to chosen tokens alone (DSA)"),
}
