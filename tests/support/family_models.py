"""What the tiny models of every family are: their config.json, by name."""

SHAPE: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 131,  # odd, so that tensor parallelism pads it
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,  # SGLang takes it for the norms of what is compressed, too
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,  # so early that short sequences show it
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
_HYBRID = {
    "full_attention_interval": 2,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_SHARED = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
IMAGE_TOKEN = 130  # placeholder of families that see: no token of their texts
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1024},
}
_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": 4,
    "out_hidden_size": 64,
}
# What differs from SHAPE, by name: a family, with what of it.
MODELS: dict[str, dict[str, object]] = {
    "llama": {
        "model_type": "llama",
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
    },
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "qwen3_next": {**_HYBRID, **_SHARED, "model_type": "qwen3_next", "norm_topk_prob": True},
    "qwen3_5": {**_HYBRID, "model_type": "qwen3_5_text", "tie_word_embeddings": True},
    "qwen3_5_moe": {**_HYBRID, **_SHARED, "model_type": "qwen3_5_moe_text"},
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl_text",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
        },
        # Windows of two tokens each way.
        "vision_config": {**_VISION, "window_size": 16, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl_text",
        "head_dim": 32,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "vision_config": {
            **_VISION,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
        },
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {
        **_LATENT,
        **_EXPERTS,
        "model_type": "deepseek_v2",
        "q_lora_rank": 48,
        "n_routed_experts": 16,
        "n_shared_experts": 2,
        "moe_intermediate_size": 64,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 4.0,
        "rope_parameters": _YARN,
    },
    "deepseek_v2_lite": {
        **_LATENT,
        **_EXPERTS,
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "moe_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
    },
    "deepseek_v3": {
        **_LATENT,
        **_EXPERTS,
        "model_type": "deepseek_v3",
        "q_lora_rank": 48,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "num_nextn_predict_layers": 0,
    },
    "moonlight": {
        **_LATENT,
        **_EXPERTS,
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "moe_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"},
        "num_nextn_predict_layers": 0,
    },
    "glm4": {"model_type": "glm4", "head_dim": 16, "attention_bias": True},
    "glm4_moe": {
        **_EXPERTS,
        "model_type": "glm4_moe",
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "num_nextn_predict_layers": 0,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "swiglu_limit": 1.0,  # so low that it acts
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
}
IN_MAKE_TEST = {"deepseek_v3", "qwen3_5"}
"""Dense layers, experts and latent attention; linear attention. The others are slow; only they have
heads that turn by half, and norms after attention and MLP (glm4)."""
