"""Names of the keys that verl's own example scripts set, with values of ours.

The names are facts, read off examples/grpo_trainer, examples/ppo_trainer and recipe/dapo of verl in
2025 and 2026; no script is copied. Where several scripts have a key, it stands here once.
"""

Keys = dict[str, dict[str, str]]  # what all keys of a group begin with -> the rest, and a value


def words(*groups: Keys) -> list[str]:
    """Return the words of a command that sets all these keys."""
    found: dict[str, str] = {}
    for group in groups:
        for prefix, keys in group.items():
            for name, value in keys.items():
                found[f"{prefix}.{name}" if prefix else name] = value
    return [f"{name}={value}" for name, value in found.items()]


COMMON: Keys = {
    "": {"--config-path": "config", "--config-name": "ppo_trainer", "+ray_init.num_cpus": "8"},
    "data": {
        "train_files": "['a/gsm8k/train.parquet','a/math/train.parquet']",
        "val_files": "a/gsm8k/test.parquet",
        "train_batch_size": "128",
        "val_batch_size": "64",
        "max_prompt_length": "256",
        "max_response_length": "512",
        "filter_overlong_prompts": "True",
        "filter_overlong_prompts_workers": "4",
        "truncation": "error",
        "prompt_key": "prompt",
        "shuffle": "False",
        "seed": "7",
        "return_raw_chat": "True",
        "image_key": "images",
        "trust_remote_code": "True",
        "train_max_samples": "-1",
        "val_max_samples": "32",
    },
    "actor_rollout_ref.model": {
        "path": "models/Qwen2.5-0.5B",
        "use_remove_padding": "True",
        "enable_gradient_checkpointing": "True",
        "trust_remote_code": "True",
        "use_shm": "True",
        "use_fused_kernels": "True",
        "fused_kernel_options.impl_backend": "triton",
        "external_lib": "null",
        "enable_activation_offload": "False",
        "custom_chat_template": "null",
    },
    "actor_rollout_ref": {"hybrid_engine": "True", "nccl_timeout": "1200"},
    "actor_rollout_ref.actor": {
        "strategy": "fsdp2",
        "optim.lr": "1e-6",
        "optim.lr_warmup_steps": "10",
        "optim.lr_warmup_steps_ratio": "0.",
        "optim.weight_decay": "0.1",
        "optim.betas": "[0.9,0.95]",
        "optim.lr_scheduler_type": "constant",
        "optim.warmup_style": "constant",
        "grad_clip": "1.0",
        "ppo_mini_batch_size": "32",
        "ppo_micro_batch_size": "8",
        "ppo_micro_batch_size_per_gpu": "4",
        "use_dynamic_bsz": "True",
        "ppo_max_token_len_per_gpu": "4096",
        "ppo_epochs": "1",
        "use_kl_loss": "True",
        "kl_loss_coef": "0.001",
        "kl_loss_type": "low_var_kl",
        "entropy_coeff": "0",
        "clip_ratio": "0.2",
        "use_torch_compile": "False",
        "entropy_from_logits_with_chunking": "True",
        "entropy_checkpointing": "True",
        "ulysses_sequence_parallel_size": "2",
        "fsdp_config.param_offload": "True",
        "fsdp_config.optimizer_offload": "True",
        "fsdp_config.fsdp_size": "-1",
        "fsdp_config.forward_prefetch": "True",
        "fsdp_config.reshard_after_forward": "True",
        "fsdp_config.offload_policy": "True",
        "fsdp_config.model_dtype": "bf16",
        "fsdp_config.entropy_checkpointing": "True",
        "fsdp_config.ulysses_sequence_parallel_size": "2",
        "fsdp_config.wrap_policy.min_num_params": "0",
        "fsdp_config.custom_engine_module": "pkg://mine",
        "checkpoint.save_contents": "['model','extra']",
        "profile_ranks": "[0,1]",
        "profile_ranks_all": "False",
        "profile_discrete": "True",
        "profiler.enable": "True",
        "profiler.ranks": "[0,1]",
        "profiler.all_ranks": "False",
        "profiler.discrete": "True",
        "profiler.tool_config.npu.discrete": "True",
        "profiler.tool_config.npu.contents": "['cpu']",
        "profiler.tool_config.npu.level": "level1",
        "profiler.tool_config.npu.analysis": "True",
    },
    "actor_rollout_ref.ref": {
        "strategy": "fsdp2",
        "log_prob_micro_batch_size": "8",
        "log_prob_micro_batch_size_per_gpu": "8",
        "log_prob_use_dynamic_bsz": "True",
        "log_prob_max_token_len_per_gpu": "8192",
        "fsdp_config.param_offload": "True",
        "fsdp_config.forward_prefetch": "True",
        "fsdp_config.reshard_after_forward": "True",
        "fsdp_config.offload_policy": "True",
        "fsdp_config.model_dtype": "bf16",
        "fsdp_config.ulysses_sequence_parallel_size": "2",
        "fsdp_config.custom_engine_module": "pkg://mine",
        "ulysses_sequence_parallel_size": "2",
        "entropy_from_logits_with_chunking": "True",
        "use_torch_compile": "False",
        "profile_ranks": "[0,1]",
        "profile_ranks_all": "False",
        "profile_discrete": "True",
        "profiler.ranks": "[0,1]",
        "profiler.all_ranks": "False",
        "profiler.discrete": "True",
    },
    "actor_rollout_ref.rollout": {
        "name": "vllm",
        "mode": "async",
        "n": "4",
        "temperature": "1.0",
        "top_p": "1.0",
        "top_k": "-1",
        "tensor_model_parallel_size": "2",
        "data_parallel_size": "1",
        "expert_parallel_size": "1",
        "gpu_memory_utilization": "0.6",
        "max_num_seqs": "64",
        "max_num_batched_tokens": "8192",
        "max_model_len": "4096",
        "prompt_length": "256",
        "response_length": "512",
        "dtype": "bfloat16",
        "load_format": "safetensors",
        "layered_summon": "True",
        "enforce_eager": "True",
        "free_cache_engine": "True",
        "enable_sleep_mode": "True",
        "multi_stage_wake_up": "True",
        "enable_chunked_prefill": "True",
        "enable_prefix_caching": "False",
        "ignore_eos": "False",
        "disable_log_stats": "False",
        "calculate_log_probs": "True",
        "cudagraph_capture_sizes": "[1,2,4]",
        "log_prob_micro_batch_size": "8",
        "log_prob_micro_batch_size_per_gpu": "8",
        "log_prob_use_dynamic_bsz": "True",
        "log_prob_max_token_len_per_gpu": "8192",
        "engine_kwargs.vllm.disable_mm_preprocessor_cache": "True",
        "engine_kwargs.sglang.attention_backend": "torch_native",
        "engine_kwargs.trtllm.batch_wait_timeout_iters": "32",
        "engine_kwargs.trtllm.batch_wait_max_tokens_ratio": "0.5",
        "engine_kwargs.trtllm.moe_config.backend": "DEEPGEMM",
        "checkpoint_engine.update_weights_bucket_megabytes": "4096",
        "update_weights_bucket_megabytes": "1024",
        "quantization": "fp8",
        "profile_ranks": "[0,1]",
        "profile_ranks_all": "False",
        "profile_discrete": "True",
        "profiler.enable": "True",
        "profiler.ranks": "[0,1]",
        "profiler.all_ranks": "False",
        "profiler.all_replicas": "False",
        "profiler.replicas": "[0,2]",
        "profiler.discrete": "True",
        "val_kwargs.n": "2",
        "val_kwargs.temperature": "0.6",
        "val_kwargs.top_p": "0.7",
        "val_kwargs.top_k": "-1",
        "val_kwargs.do_sample": "True",
        "agent.num_workers": "8",
    },
    "algorithm": {"use_kl_in_reward": "False", "kl_ctrl.kl_coef": "0.0"},
    "trainer": {
        "balance_batch": "True",
        "critic_warmup": "0",
        "logger": '["console","tensorboard"]',
        "project_name": "sums",
        "experiment_name": "first/try",
        "n_gpus_per_node": "8",
        "nnodes": "1",
        "save_freq": "20",
        "test_freq": "-1",
        "val_before_train": "False",
        "val_only": "False",
        "total_epochs": "3",
        "total_training_steps": "50",
        "resume_mode": "auto",
        "resume_from_path": "checkpoints/",
        "default_local_dir": "ckpts",
        "default_hdfs_dir": "null",
        "log_val_generations": "10",
        "max_actor_ckpt_to_keep": "3",
        "device": "cuda",
        "use_legacy_worker_impl": "disable",
        "rollout_data_dir": "rollouts",
        "profile_steps": "[1,2,5]",
    },
    "global_profiler": {
        "tool": "nsys",
        "steps": "[2,3]",
        "profile_continuous_steps": "True",
        "save_path": "profile",
        "global_tool_config.nsys.discrete": "False",
        "global_tool_config.nsys.worker_nsight_options.capture-range-end": "stop",
    },
    "profile.options": {
        "save_path": "profile",
        "level": "level1",
        "with_memory": "False",
        "record_shapes": "False",
        "with_npu": "True",
        "with_cpu": "True",
        "with_module": "False",
        "with_stack": "False",
        "analysis": "True",
    },
}
GRPO: Keys = {
    "": {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": "True",
        "model_engine": "megatron",
        "actor@actor_rollout_ref.actor": "ds_actor",
        "critic": "ds_critic",
        "critic.enable": "False",
        "critic.deepspeed_config.zero_stage": "2",
        "critic.deepspeed_config.offload": "none",
        "atropos.host": "localhost",
        "atropos.port": "8000",
        "reward_model.reward_manager": "generative",
        "reward.num_workers": "2",
        "reward.reward_manager.name": "dapo",
        "reward.custom_reward_function.path": "mine.py",
        "+reward.reward_kwargs.method": "flexible",
        "+reward.reward_kwargs.format_score": "0.1",
        "+reward.reward_kwargs.score": "1.0",
        "+custom_reward_function.reward_kwargs.beta": "0.0",
        "+ray_kwargs.ray_init.runtime_env.env_vars.WANDB_MODE": "offline",
        "+data.apply_chat_template_kwargs.enable_thinking": "True",
        "+data.cis.swap_seed": "7",
        "data.custom_cls.path": "null",
        "data.continuous_token.enable": "False",
        "+data.gen_batch_size": "192",
        "algorithm.rollout_correction.rollout_is_threshold": "2.0",
        "hydra.searchpath": "[file:///tmp]",
    },
    "actor_rollout_ref.model": {
        "lora_rank": "16",
        "lora_alpha": "32",
        "target_modules": "all-linear",
        "lora.merge": "True",
        "lora.rank": "16",
        "lora.alpha": "32",
        "override_config.attn_implementation": "eager",
        "override_config.max_position_embeddings": "4096",
        "override_config.model_config.max_position_embeddings": "4096",
        "use_prefix_tree": "True",
        "prefix_tree_attention": "magi",
        "use_liger": "True",
        "mtp.enable": "True",
        "mtp.enable_train": "True",
        "mtp.enable_rollout": "False",
        "mtp.detach_encoder": "True",
        "mtp.mtp_loss_scaling_factor": "0.3",
        "mtp.method": "mtp",
        "mtp.num_speculative_tokens": "1",
    },
    "actor_rollout_ref.actor": {
        "policy_loss.loss_mode": "gspo",
        "clip_ratio_low": "3e-4",
        "clip_ratio_high": "4e-4",
        "clip_ratio_c": "10.0",
        "loss_agg_mode": "seq-mean-token-mean",
        "optim.lr_decay_style": "constant",
        "optim.clip_grad": "1.0",
        "optim.override_optimizer_config.optimizer_offload_fraction": "1",
        "optim.override_optimizer_config.optimizer_cpu_offload": "True",
        "optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d": "True",
        "optim.override_optimizer_config.use_precision_aware_optimizer": "True",
        "optim.override_optimizer_config.offload_fraction": "1.0",
        "optim.override_optimizer_config.decoupled_weight_decay": "True",
        "optim.override_optimizer_config.chunked_optimizer_state_offload": "True",
        "megatron.router_replay.mode": "R3",
        "veomni.param_offload": "True",
        "veomni.optimizer_offload": "True",
        "veomni.enable_fsdp_offload": "True",
        "veomni.enable_full_shard": "True",
        "veomni.fsdp_size": "4",
        "veomni.ulysses_parallel_size": "2",
        "veomni.expert_parallel_size": "1",
        "veomni.moe_implementation": "fused_triton",
        "veomni.attn_implementation": "eager",
        "automodel_config.distributed_strategy": "fsdp2",
        "automodel_config.tp_size": "1",
        "automodel_config.pp_size": "1",
        "automodel_config.cp_size": "1",
        "automodel_config.ep_size": "1",
        "automodel_config.backend_config.dispatcher": "deepep",
        "automodel_config.activation_checkpointing": "True",
        "deepspeed.zero_stage": "2",
        "deepspeed.offload": "none",
        "mindspeed.tensor_model_parallel_size": "1",
        "mindspeed.pipeline_model_parallel_size": "1",
        "mindspeed.expert_model_parallel_size": "1",
        "mindspeed.param_offload": "True",
        "mindspeed.optimizer_offload": "True",
        "mindspeed.grad_offload": "True",
        "mindspeed.use_mbridge": "True",
        "mindspeed.vanilla_mbridge": "True",
        "mindspeed.llm_kwargs.seq_length": "4096",
        "mindspeed.llm_kwargs.spec": "[a, b]",
        "mindspeed.llm_kwargs.recompute_granularity": "full",
        "mindspeed.llm_kwargs.recompute_method": "uniform",
        "mindspeed.llm_kwargs.recompute_num_layers": "1",
        "mindspeed.llm_kwargs.overlap_grad_reduce": "True",
        "engine.impl": "vllm",
        "engine.seed": "1",
        "engine.full_determinism": "True",
        "engine.pp": "1",
        "engine.cp": "1",
        "engine.ep": "1",
        "engine.param_offload": "False",
        "engine.optimizer_offload": "True",
        "engine.impl_cfg.recompute": "full",
        "engine.resync_format": "block_fp8",
    },
    "actor_rollout_ref.ref": {
        "sync_ref_model": "True",
        "ref_model_sync_steps": "128",
        "ref_model_mixup_alpha": "0.9",
        "veomni.param_offload": "True",
        "veomni.optimizer_offload": "True",
        "mindspeed.tensor_model_parallel_size": "1",
        "mindspeed.param_offload": "True",
        "engine.grad_offload": "False",
    },
    "actor_rollout_ref.rollout": {
        "moe_tp_size": "2",
        "moe_ep_size": "2",
        "moe_tensor_parallel_size": "2",
        "seed": "1",
        "full_determinism": "True",
        "enable_rollout_routing_replay": "True",
        "custom.agent_framework.gateway_count": "7",
        "custom.agent_framework.agent_runner_kwargs.max_turns": "5",
        "engine_kwargs.vllm.kv_cache_dtype": "fp8",
    },
}
MEGATRON: Keys = {
    f"actor_rollout_ref.{part}.megatron": {
        "tensor_model_parallel_size": "2",
        "pipeline_model_parallel_size": "2",
        "virtual_pipeline_model_parallel_size": "null",
        "context_parallel_size": "1",
        "expert_model_parallel_size": "2",
        "expert_tensor_parallel_size": "1",
        "sequence_parallel": "True",
        "param_offload": "True",
        "grad_offload": "True",
        "optimizer_offload": "True",
        "use_mbridge": "True",
        "vanilla_mbridge": "False",
        "use_dist_checkpointing": "False",
        "dist_checkpointing_path": "null",
        "use_megatron_fsdp": "True",
        "use_remove_padding": "True",
        "thd_format": "False",
        "dtype": "bfloat16",
        **{
            f"override_transformer_config.{name}": value
            for name, value in {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": "1",
                "recompute_modules": "[core_attn]",
                "attention_backend": "flash",
                "apply_rope_fusion": "True",
                "masked_softmax_fusion": "True",
                "bias_activation_fusion": "True",
                "bias_dropout_fusion": "True",
                "gradient_accumulation_fusion": "True",
                "deallocate_pipeline_outputs": "True",
                "persist_layer_norm": "True",
                "moe_grouped_gemm": "True",
                "moe_permute_fusion": "True",
                "moe_token_dispatcher_type": "flex",
                "moe_router_dtype": "fp32",
                "moe_enable_deepep": "True",
                "moe_shared_expert_overlap": "False",
                "moe_router_load_balancing_type": "none",
                "moe_aux_loss_coeff": "0.01",
                "moe_z_loss_coeff": "0.001",
                "num_layers_in_first_pipeline_stage": "2",
                "num_layers_in_last_pipeline_stage": "2",
                "account_for_loss_in_pipeline_split": "False",
                "account_for_embedding_in_pipeline_split": "False",
                "use_flash_attn": "True",
                "context_parallel_size": "1",
                "normalization": "RMSNorm",
                "swiglu": "True",
                "use_fused_rmsnorm": "True",
                "use_fused_swiglu": "True",
                "use_distributed_optimizer": "True",
                "sequence_parallel": "True",
                "fp8": "e4m3",
                "fp8_recipe": "blockwise",
                "calculate_per_token_loss": "True",
                "mtp_num_layers": "2",
                "cuda_graph_scope": "[]",
                "cp_partition_mode": "contiguous",
            }.items()
        },
    }
    for part in ("actor", "ref")
}
DAPO: Keys = {
    "": {
        "algorithm.adv_estimator": "grpo",
        "algorithm.filter_groups.enable": "True",
        "algorithm.filter_groups.metric": "acc",
        "algorithm.filter_groups.max_num_gen_batches": "10",
        **{
            f"algorithm.filter_sample.{name}": value
            for name, value in {
                "enable": "True",
                "metric": "length",
                "retain_count": "8",
                "adaptive": "True",
                "easy_count": "4",
                "medium_count": "6",
                "hard_count": "8",
                "very_hard_count": "8",
            }.items()
        },
        "algorithm.rollout_correction.rollout_is": "sequence",
        "algorithm.rollout_correction.rollout_is_threshold": "2.0",
        "algorithm.rollout_correction.rollout_is_batch_normalize": "true",
        "algorithm.rollout_correction.rollout_rs": "seq_mean_k1",
        "algorithm.rollout_correction.rollout_rs_threshold": "0.99_1.01",
        "algorithm.rollout_correction.rollout_rs_threshold_lower": "null",
        "algorithm.rollout_correction.rollout_token_veto_threshold": "1e-4",
        "data.gen_batch_size": "384",
        "data.truncation": "left",
        "reward_model.reward_manager": "dapo",
        "+reward_model.grm.enable": "False",
        "+reward_model.grm.model.path": "models/judge",
        "+reward_model.grm.rollout.n": "1",
        "+reward_model.grm.rollout.template_file": "template.txt",
        "+reward_model.grm.rollout.fsdp_config.fsdp_size": "-1",
        "+trainer.grm_nnodes": "4",
        "+trainer.log_train_generations": "10",
        "+trainer.dump_high_diff_tokens": "False",
        "+trainer.dump_high_diff_dir": "dumps",
        "actor_rollout_ref.rollout.quantization.weight_dtype": "fp8",
        "actor_rollout_ref.rollout.prometheus.enable": "True",
        "actor_rollout_ref.rollout.prometheus.port": "9090",
        "actor_rollout_ref.rollout.dp_model_parallel_size": "4",
        "actor_rollout_ref.rollout.rollout_world_size": "8",
        "actor_rollout_ref.rollout.max_batch_size": "256",
        "+actor_rollout_ref.model.override_config.attention_dropout": "0.",
        "+actor_rollout_ref.model.override_config.embd_pdrop": "0.",
        "+actor_rollout_ref.model.override_config.resid_pdrop": "0.",
        "+actor_rollout_ref.actor.optim.override_optimizer_config.fp8_recipe": "blockwise",
    },
    "actor_rollout_ref.actor": {
        "clip_ratio_low": "0.2",
        "clip_ratio_high": "0.28",
        "clip_ratio_c": "10.0",
        "loss_agg_mode": "token-mean",
        "use_token_level_loss": "True",
        "use_kl_loss": "False",
    },
    **{
        f"{place}.overlong_buffer{end}": {
            "enable": "True",
            "len": "128",
            "penalty_factor": "1.0",
            "log": "False",
        }
        for place, end in (
            ("+reward_model.reward_kwargs", "_cfg"),
            ("+reward.reward_kwargs", "_cfg"),
            ("reward_model", ""),
            ("custom_reward_function", ""),
        )
    },
    "+reward_model.reward_kwargs": {"max_resp_len": "512"},
    "+reward.reward_kwargs": {"max_resp_len": "512"},
}
PPO: Keys = {
    "": {
        "algorithm.adv_estimator": "gae",
        "algorithm.gamma": "1.0",
        "algorithm.lam": "0.95",
        "custom_reward_function.path": "mine.py",
        "custom_reward_function.name": "compute_score",
    },
    "critic": {
        "optim.lr": "1e-5",
        "optim.lr_warmup_steps_ratio": "0.05",
        "model.path": "models/Qwen2.5-0.5B",
        "model.use_remove_padding": "True",
        "model.enable_gradient_checkpointing": "True",
        "model.trust_remote_code": "True",
        "model.fsdp_config.param_offload": "False",
        "model.fsdp_config.optimizer_offload": "False",
        "fsdp.param_offload": "False",
        "fsdp.optimizer_offload": "False",
        "ppo_micro_batch_size": "16",
        "ppo_micro_batch_size_per_gpu": "4",
        "forward_micro_batch_size_per_gpu": "4",
        "use_dynamic_bsz": "True",
        "ppo_max_token_len_per_gpu": "8192",
        "forward_max_token_len_per_gpu": "8192",
        "ulysses_sequence_parallel_size": "2",
        "cliprange_value": "0.5",
        "strategy": "fsdp2",
        "profile_ranks": "[0,1]",
        "profile_ranks_all": "False",
        "profile_discrete": "True",
        "profiler.enable": "True",
        "profiler.ranks": "[0,1]",
        "profiler.all_ranks": "False",
        "megatron.tensor_model_parallel_size": "2",
        "megatron.pipeline_model_parallel_size": "2",
        "megatron.expert_model_parallel_size": "2",
        "megatron.expert_tensor_parallel_size": "1",
        "megatron.param_offload": "True",
        "megatron.optimizer_offload": "True",
        "megatron.grad_offload": "True",
    },
    "reward_model": {
        "enable": "True",
        "model.path": "models/reward",
        "model.input_tokenizer": "models/reward",
        "model.use_remove_padding": "True",
        "model.use_fused_kernels": "True",
        "model.fsdp_config.param_offload": "True",
        "model_path": "models/reward",
        "micro_batch_size": "8",
        "micro_batch_size_per_gpu": "8",
        "use_dynamic_bsz": "True",
        "forward_max_token_len_per_gpu": "8192",
        "max_length": "4096",
        "reward_manager": "prime",
        "sandbox_fusion_url": "http://127.0.0.1:8080/run_code",
        "sandbox_fusion.url": "http://127.0.0.1:8080/run_code",
        "sandbox_fusion.max_concurrent": "64",
        "launch_reward_fn_async": "True",
        "use_reward_loop": "True",
        "num_workers": "8",
        "enable_resource_pool": "False",
        "n_gpus_per_node": "8",
        "nnodes": "0",
        **{
            f"{place}.{name}": value
            for place in ("rollout", "inference")
            for name, value in {
                "name": "vllm",
                "gpu_memory_utilization": "0.8",
                "tensor_model_parallel_size": "1",
                "prompt_length": "4096",
                "response_length": "4096",
            }.items()
        },
    },
}

# Names of the whole configuration, as verl prints it, with all that its defaults bring along.
CONFIGURATION: dict[tuple[str, ...], str] = {
    ("actor_rollout_ref.actor",): (
        "rollout_n strategy ppo_mini_batch_size ppo_micro_batch_size "
        "ppo_micro_batch_size_per_gpu use_dynamic_bsz ppo_max_token_len_per_gpu clip_ratio "
        "clip_ratio_low clip_ratio_high tau_pos tau_neg freeze_vision_tower "
        "policy_loss.loss_mode policy_loss.clip_cov_ratio policy_loss.clip_cov_lb "
        "policy_loss.clip_cov_ub policy_loss.kl_cov_ratio policy_loss.ppo_kl_coef "
        "policy_loss.dro_beta clip_ratio_c loss_agg_mode loss_scale_factor entropy_coeff "
        "calculate_entropy calculate_sum_pi_squared use_kl_loss use_prefix_grouper "
        "use_torch_compile kl_loss_coef kl_loss_type ppo_epochs shuffle data_loader_seed "
        "checkpoint.save_contents checkpoint.load_contents checkpoint.async_save "
        "checkpoint.strict use_fused_kernels router_replay.mode router_replay.record_file "
        "qat.enable qat.group_size grad_clip ulysses_sequence_parallel_size "
        "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing "
        "pad_to_length use_remove_padding load_weight"
    ),
    ("actor_rollout_ref.actor.megatron", "actor_rollout_ref.ref.megatron"): (
        "param_offload grad_offload optimizer_offload tensor_model_parallel_size "
        "expert_model_parallel_size expert_tensor_parallel_size pipeline_model_parallel_size "
        "virtual_pipeline_model_parallel_size context_parallel_size sequence_parallel "
        "use_distributed_optimizer use_dist_checkpointing dist_checkpointing_path "
        "dist_checkpointing_prefix seed override_ddp_config "
        "override_transformer_config.recompute_granularity "
        "override_transformer_config.recompute_modules "
        "override_transformer_config.attention_backend override_mcore_model_config use_mbridge "
        "vanilla_mbridge use_remove_padding forward_only dtype"
    ),
    ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp"): (
        "wrap_policy.min_num_params param_offload optimizer_offload offload_policy "
        "reshard_after_forward fsdp_size forward_prefetch model_dtype use_orig_params seed "
        "full_determinism ulysses_sequence_parallel_size entropy_from_logits_with_chunking "
        "entropy_from_logits_chunk_size use_torch_compile entropy_checkpointing "
        "use_no_sync_for_gradient_accumulation pad_to_length pad_to_length_bucket forward_only "
        "strategy dtype qat.enable qat.mode turbo_config.distributed.fully_shard_parallel_size"
    ),
    ("actor_rollout_ref.actor.optim", "critic.optim"): (
        "optimizer optimizer_impl lr lr_warmup_steps_ratio total_training_steps weight_decay "
        "lr_warmup_steps betas clip_grad min_lr_ratio num_cycles lr_scheduler_type "
        "zero_indexed_step warmup_style override_optimizer_config lr_warmup_init lr_decay_steps "
        "lr_decay_style min_lr weight_decay_incr_style lr_wsd_decay_style lr_wsd_decay_steps "
        "use_checkpoint_opt_param_scheduler"
    ),
    (
        "actor_rollout_ref.actor.profiler",
        "actor_rollout_ref.ref.profiler",
        "actor_rollout_ref.rollout.profiler",
        "critic.profiler",
    ): (
        "tool enable all_ranks ranks save_path relocate_results finish_hook_cmd "
        "finish_hook_ranks tool_config.nsys.discrete tool_config.npu.contents "
        "tool_config.torch.schedule.skip_first tool_config.torch_memory.stack_depth "
        "tool_config.precision_debugger.steps"
    ),
    ("actor_rollout_ref.rollout",): (
        "name mode nnodes n_gpus_per_node temperature top_k top_p full_determinism seed "
        "prompt_length response_length dtype gpu_memory_utilization ignore_eos enforce_eager "
        "cudagraph_capture_sizes free_cache_engine tensor_model_parallel_size "
        "data_parallel_size expert_parallel_size pipeline_model_parallel_size "
        "max_num_batched_tokens max_model_len max_num_seqs enable_chunked_prefill "
        "enable_prefix_caching logprobs_mode scheduling_policy load_format layered_summon "
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
        "log_prob_max_token_len_per_gpu disable_log_stats do_sample n over_sample_rate "
        "multi_stage_wake_up engine_kwargs.vllm engine_kwargs.sglang engine_kwargs.trtllm "
        "val_kwargs.top_k val_kwargs.top_p val_kwargs.temperature val_kwargs.n "
        "val_kwargs.do_sample multi_turn.enable multi_turn.max_assistant_turns "
        "multi_turn.tool_config_path multi_turn.function_tool_path multi_turn.max_user_turns "
        "multi_turn.max_parallel_calls multi_turn.max_tool_response_length "
        "multi_turn.tool_response_truncate_side multi_turn.interaction_config_path "
        "multi_turn.use_inference_chat_template multi_turn.tokenization_sanity_check_mode "
        "multi_turn.format multi_turn.num_repeat_rollouts calculate_log_probs agent.num_workers "
        "agent.default_agent_loop agent.agent_loop_config_path agent.custom_async_server.path "
        "checkpoint_engine.backend checkpoint_engine.update_weights_bucket_megabytes "
        "checkpoint_engine.engine_kwargs checkpoint_engine.custom_backend_module "
        "trace.project_name trace.backend trace.token2text skip_rollout skip_dump_dir "
        "skip_tokenizer_init enable_rollout_routing_replay moe_load_balance_metrics_interval "
        "prometheus.enable prometheus.port quantization quantization_config_file mtp qat "
        "disaggregation.enabled disaggregation.prefill_replicas layer_name_map.qkv_layer_name "
        "update_weights_bucket_megabytes limit_images"
    ),
    ("actor_rollout_ref.model",): (
        "path hf_config_path tokenizer_path use_shm trust_remote_code custom_chat_template "
        "external_lib override_config override_config.moe_config.freeze_moe_router "
        "enable_gradient_checkpointing enable_activation_offload use_remove_padding lora_rank "
        "lora_alpha target_modules exclude_modules lora_adapter_path use_liger "
        "use_fused_kernels fused_kernel_options.impl_backend tiled_mlp.enabled mtp.enable "
        "mtp.speculative_algorithm lora.type lora.merge lora.rank lora.alpha lora.dropout "
        "lora.target_modules lora.exclude_modules lora.dropout_position lora.a2a_experimental "
        "lora.dtype lora.adapter_path lora.freeze_vision_model"
    ),
    ("data",): (
        "tokenizer use_shm train_files val_files train_max_samples val_max_samples prompt_key "
        "reward_fn_key max_prompt_length max_response_length train_batch_size gen_batch_size "
        "val_batch_size tool_config_path function_tool_path return_raw_input_ids "
        "return_raw_chat return_full_prompt shuffle seed dataloader_num_workers "
        "image_patch_size validation_shuffle filter_overlong_prompts "
        "filter_overlong_prompts_workers truncation image_key video_key audio_key "
        "trust_remote_code custom_cls.path custom_cls.name return_multi_modal_inputs "
        "sampler.class_path sampler.class_name datagen.path datagen.name "
        "apply_chat_template_kwargs mm_processor_kwargs"
    ),
    ("critic",): (
        "rollout_n strategy enable ppo_mini_batch_size forward_micro_batch_size cliprange_value "
        "loss_agg_mode nccl_timeout load_weight grad_clip fsdp.param_offload megatron.seed "
        "model.path model.tokenizer_path optim.lr checkpoint.async_save profiler.enable"
    ),
    ("reward",): (
        "num_workers custom_reward_function.path custom_reward_function.name "
        "reward_manager.source reward_manager.name reward_manager.module.path "
        "reward_model.enable reward_model.enable_resource_pool reward_model.n_gpus_per_node "
        "reward_model.model_path reward_model.rollout.name "
        "reward_model.rollout.disaggregation.enabled sandbox_fusion.url "
        "sandbox_fusion.max_concurrent"
    ),
    ("algorithm",): (
        "rollout_correction.rollout_is rollout_correction.rollout_is_threshold "
        "rollout_correction.rollout_rs rollout_correction.rollout_rs_threshold "
        "rollout_correction.bypass_mode rollout_correction.loss_type "
        "rollout_correction.rollout_is_batch_normalize gamma lam adv_estimator "
        "norm_adv_by_std_in_grpo filter_groups.enable filter_groups.metric "
        "filter_groups.max_num_gen_batches filter_groups.max_inflight_gen_batches "
        "use_kl_in_reward kl_penalty kl_ctrl.type kl_ctrl.kl_coef kl_ctrl.horizon "
        "kl_ctrl.target_kl use_pf_ppo pf_ppo.reweight_method pf_ppo.weight_pow"
    ),
    ("trainer",): (
        "balance_batch total_epochs total_training_steps project_name experiment_name logger "
        "log_val_generations rollout_data_dir validation_data_dir nnodes n_gpus_per_node "
        "save_freq esi_redundant_time resume_mode resume_from_path val_before_train val_only "
        "test_freq critic_warmup default_hdfs_dir del_local_ckpt_after_load default_local_dir "
        "max_actor_ckpt_to_keep max_critic_ckpt_to_keep ray_wait_register_center_timeout device "
        "use_legacy_worker_impl use_v1 v1.trainer_mode v1.sync "
        "v1.separate_async.parameter_sync_step v1.sampler.max_off_policy_threshold"
    ),
    ("",): (
        "global_profiler.tool global_profiler.steps "
        "global_profiler.global_tool_config.nsys.discrete global_profiler.finish_hook_cmd "
        "skip.rollout.enable skip.rollout.steps ray_kwargs.ray_init.num_cpus "
        "ray_kwargs.timeline_json_file transfer_queue.enable "
        "transfer_queue.backend.storage_backend distillation.enabled "
        "distillation.distillation_loss.loss_mode distillation.teacher_key "
        "distillation.teacher_models.teacher_model.key reward_model.reward_loop_source "
        "reward_model.reward_loop_class_name reward_model.megatron.seed "
        "reward_model.profiler.tool reward_model.max_length reward_model.nccl_timeout "
        "sandbox_fusion.url reward_manager.source reward_manager.module.name "
        "actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout "
        "custom_reward_function.path"
    ),
}


def configuration() -> list[str]:
    """Return all keys of the whole configuration."""
    return [
        f"{place}.{name}" if place else name
        for places, names in CONFIGURATION.items()
        for place in places
        for name in names.split()
    ]
