"""The table of verl's keys: what each becomes, or why there is nothing for it.

`slipstream import-verl` applies it and docs/coming_from_verl.md is generated from it. A row
that names a key is its row; else it is the first, from above, whose wildcards fit.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.deploy.interop.verl import rules
from slipstream.deploy.interop.verl.rows import Row, integer, number, one_of, path, switch, text
from slipstream.deploy.interop.verl.rules import (
    ACTOR,
    CORRECTION,
    FUNCTION,
    MEGATRON,
    MODEL,
    OPTIM,
    OVERLONG,
    REF,
    ROLLOUT,
)


def _below(place: str, names: str) -> tuple[str, ...]:
    """Return the keys below a place, from their names with spaces between them."""
    return tuple(f"{place}.{name}" for name in names.split())


def _of(places: Iterable[str], *names: str) -> tuple[str, ...]:
    return tuple(f"{place}.{name}" for place in places for name in names)


_SIZES = (*MEGATRON,)
_OVERRIDE = f"{ACTOR}.megatron.override_transformer_config"
_OPTIMIZER = f"{OPTIM}.override_optimizer_config"
_ENGINES = (*_below(ACTOR, "fsdp_config megatron mindspeed veomni engine"),)
_REF_ENGINES = (f"{REF}.fsdp_config", f"{REF}.megatron", f"{REF}.mindspeed", f"{REF}.veomni")


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that stand under one heading in the page."""

    title: str
    rows: tuple[Row, ...]


_DATA = Group(
    "Data",
    (
        Row(
            ("data.train_files",),
            ("data.file", "data.sources.*.file", "data.sources.*.max_rows"),
            "parquet or JSONL; several as sources, with weights if you want",
            rules.files("data.file", "data.sources", "data.train_max_samples"),
            kind="renamed",
        ),
        Row(
            ("data.val_files",),
            ("eval.file", "eval.sets.*.file", "eval.sets.*.max_rows"),
            "",
            rules.files("eval.file", "eval.sets", "data.val_max_samples"),
            kind="renamed",
        ),
        Row(
            ("data.train_max_samples", "data.val_max_samples"),
            ("data.sources.*.max_rows", "eval.sets.*.max_rows"),
            "written with the files; the first rows, where verl may draw them",
            rules.most_rows,
        ),
        Row(
            ("data.train_batch_size",),
            ("run.groups_per_step",),
            "prompts per learner step",
            integer("run.groups_per_step"),
            default=1024,
        ),
        Row(
            ("data.gen_batch_size", "data.val_batch_size"),
            remark="prompts are issued as they are needed, not in batches",
        ),
        Row(
            ("data.max_prompt_length",),
            ("sampling.max_prompt_tokens",),
            "",
            integer("sampling.max_prompt_tokens"),
        ),
        Row(
            ("data.max_response_length",),
            ("sampling.max_response_tokens",),
            "",
            integer("sampling.max_response_tokens"),
        ),
        Row(
            ("data.filter_overlong_prompts",),
            ("sampling.overlong_prompts",),
            "True is `drop`; a prompt is measured when it is asked, not before the run. One "
            "setting for this key and the next: where this is True, the next decides nothing",
            rules.filter_overlong,
        ),
        Row(
            ("data.truncation",),
            ("sampling.overlong_prompts",),
            "`error` the same, `left` is `truncate`, which keeps the last tokens; `right` and "
            "`middle` have no counterpart and become `truncate`",
            rules.truncation,
            kind="renamed",
        ),
        Row(("data.prompt_key",), ("data.prompt_column",), "", text("data.prompt_column")),
        Row(("data.shuffle",), ("data.shuffle",), "", switch("data.shuffle")),
        Row(
            ("data.seed",),
            ("run.seed",),
            "of sampling and learner as well",
            integer("run.seed", least=-(2**31)),
        ),
        Row(
            ("data.apply_chat_template_kwargs.*",),
            ("sampling.chat_template_kwargs.*",),
            "",
            rules.named("sampling.chat_template_kwargs"),
        ),
        Row(
            (
                "data.custom_cls.*",
                "data.sampler.*",
                "data.datagen.*",
                "data.cis.*",
                "data.continuous_token.*",
            ),
            (),
            "prompts come from files or reasoning-gym: write what your class makes into a file",
            rules.left_to_write(
                "a class of one's own makes no prompts here",
                "data.file: write what your class makes into a JSONL or parquet file",
            ),
            kind="changed",
        ),
        Row(
            ("data.reward_fn_key",),
            remark="the column is `data_source`",
            rule=rules.just("data_source", "the column is data_source"),
            kind="dropped",
        ),
        Row(
            (
                *_below(
                    "data",
                    "image_key video_key audio_key image_patch_size return_multi_modal_inputs "
                    "mm_processor_kwargs mm_processor_kwargs.**",
                ),
            ),
            remark="prompts are text",
        ),
        Row(
            ("data.tool_config_path", "data.function_tool_path"),
            remark="tools are those of `environment.function`",
        ),
        Row(
            (
                *_below(
                    "data",
                    "trust_remote_code use_shm tokenizer return_raw_chat return_raw_input_ids "
                    "return_full_prompt dataloader_num_workers filter_overlong_prompts_workers "
                    "validation_shuffle apply_chat_template_kwargs custom_cls sampler",
                ),
            ),
            remark="the broker reads rows itself, and needs no such switch",
        ),
    ),
)

_MODEL = Group(
    "Model and adapters",
    (
        Row(
            (f"{MODEL}.path",),
            ("run.model",),
            "a local folder, the URL of one, or a name of the hub",
            rules.model,
            kind="renamed",
        ),
        Row(
            (f"{MODEL}.enable_gradient_checkpointing",),
            ("learner.recompute",),
            'True, verl\'s default, is `"full"` for FSDP; with Megatron '
            "`recompute_granularity` decides",
            rules.recompute,
            default=True,
        ),
        Row(
            (f"{MODEL}.lora_rank", f"{MODEL}.lora.rank"),
            ("lora.rank",),
            "0 is without adapters",
            rules.of_adapters("lora.rank"),
            kind="kept",
        ),
        Row(
            (f"{MODEL}.lora_alpha",),
            ("lora.alpha",),
            "32 by default; verl has 16",
            rules.of_adapters("lora.alpha"),
            default=16,
        ),
        Row((f"{MODEL}.lora.alpha",), ("lora.alpha",), "", rules.of_adapters("lora.alpha")),
        Row(
            (f"{MODEL}.target_modules", f"{MODEL}.lora.target_modules"),
            ("lora.targets",),
            "Hugging Face's names of layers",
            rules.adapter_layers,
        ),
        Row(
            (f"{MODEL}.lora_adapter_path", f"{MODEL}.lora.adapter_path"),
            ("lora.adapter",),
            "",
            rules.of_adapters("lora.adapter"),
        ),
        Row((f"{MODEL}.lora.merge",), ("lora.publish",), '`"merged"`, `"named"`', rules.merged),
        Row(
            (f"{MODEL}.custom_chat_template",),
            ("sampling.chat_template",),
            "a file, not its text",
            rules.left_to_write(
                "a file, not its text",
                "sampling.chat_template: write the template into a file and name it",
            ),
            kind="changed",
        ),
        Row(
            (
                f"{MODEL}.trust_remote_code",
                "critic.model.trust_remote_code",
                "reward_model.model.trust_remote_code",
            ),
            remark=(
                "code of a model is never run: families are known by name ([models.md](models.md))"
            ),
        ),
        Row(
            (f"{MODEL}.mtp.**",),
            remark="layers that predict further tokens are left out, in training and in sampling",
        ),
        Row(
            (f"{MODEL}.use_remove_padding", f"{ACTOR}.use_remove_padding"),
            remark="always on: sequences are packed",
        ),
        Row(
            (f"{MODEL}.override_config.**", f"{MODEL}.override_config"),
            remark="a model is what its config.json says: change that file",
        ),
        Row(
            (
                *_below(
                    MODEL,
                    "use_shm external_lib hf_config_path tokenizer_path use_liger "
                    "use_fused_kernels fused_kernel_options.** tiled_mlp.** "
                    "enable_activation_offload exclude_modules use_prefix_tree "
                    "prefix_tree_attention lora.*",
                ),
            ),
            remark="the learner's model is Megatron-Core's, with kernels of its own",
        ),
    ),
)

_OPTIMIZER_GROUP = Group(
    "Optimizer and batches",
    (
        Row((f"{OPTIM}.lr",), ("learner.lr",), "", number("learner.lr")),
        Row(
            (f"{OPTIM}.lr_warmup_steps",),
            ("learner.lr_warmup_steps",),
            "in learner steps",
            rules.warmup_steps,
        ),
        Row(
            (f"{OPTIM}.lr_warmup_steps_ratio",),
            ("learner.lr_warmup_steps",),
            "in steps, where `total_training_steps` is known",
            rules.warmup_ratio,
            kind="changed",
        ),
        Row(
            (f"{OPTIM}.lr_scheduler_type", f"{OPTIM}.warmup_style", f"{OPTIM}.lr_decay_style"),
            ("learner.lr_schedule",),
            "the same names",
            rules.schedule,
        ),
        Row(
            (f"{OPTIM}.min_lr_ratio",),
            ("learner.lr_min",),
            "a rate, not a share",
            rules.lowest_rate(is_ratio=True),
            kind="changed",
        ),
        Row((f"{OPTIM}.min_lr",), ("learner.lr_min",), "", rules.lowest_rate(is_ratio=False)),
        Row(
            (f"{OPTIM}.lr_decay_steps",),
            ("learner.lr_decay_steps",),
            "",
            rules.of_schedule("learner.lr_decay_steps"),
        ),
        Row(
            (f"{OPTIM}.lr_wsd_decay_steps",),
            ("learner.wsd_decay_steps",),
            "",
            rules.of_schedule("learner.wsd_decay_steps", "WSD"),
        ),
        Row((f"{OPTIM}.lr_wsd_decay_style",), ("learner.wsd_decay",), "", rules.wsd_decay),
        Row(
            (f"{OPTIM}.weight_decay",),
            ("learner.weight_decay",),
            "0 by default; verl has 0.01",
            number("learner.weight_decay"),
            default=0.01,
        ),
        Row(
            (f"{OPTIM}.betas",),
            ("learner.adam_beta1", "learner.adam_beta2"),
            "0.9 and 0.95 by default; verl has 0.9 and 0.999",
            rules.betas,
            default=[0.9, 0.999],
        ),
        Row(
            (f"{OPTIM}.clip_grad", f"{ACTOR}.grad_clip"),
            ("learner.clip_grad",),
            "",
            number("learner.clip_grad"),
        ),
        Row(
            (f"{_OPTIMIZER}.optimizer_offload_fraction", f"{_OPTIMIZER}.optimizer_cpu_offload"),
            ("learner.optimizer_offload_fraction",),
            "in place of `learner.offload` with the optimizer",
            rules.host_optimizer,
        ),
        Row(
            (f"{_OPTIMIZER}.exp_avg_dtype", f"{_OPTIMIZER}.exp_avg_sq_dtype"),
            ("learner.moments_dtype",),
            "bfloat16 needs a second beta of at most 0.99; without Transformer Engine",
            rules.moments,
        ),
        Row(
            (f"{_OPTIMIZER}.**", _OPTIMIZER),
            remark=(
                "the optimizer is Slipstream's own Adam; of Megatron's keys there are those above"
            ),
        ),
        Row(
            (f"{OPTIM}.*",), remark="decoupled Adam, with a warm-up from 0; it has no other choice"
        ),
        Row(
            (f"{ACTOR}.ppo_mini_batch_size",),
            ("learner.minibatches",),
            "how many, not how large: `train_batch_size / ppo_mini_batch_size`",
            rules.minibatches,
            kind="changed",
            default=256,
        ),
        Row(
            (f"{ACTOR}.ppo_max_token_len_per_gpu",),
            ("learner.max_tokens_per_microbatch",),
            "of all ranks that divide a sequence together; at least the longest sequence",
            rules.microbatch_tokens,
            default=16384,
        ),
        Row((f"{ACTOR}.use_dynamic_bsz",), remark="always on: microbatches are packed by tokens"),
        Row(
            (f"{ACTOR}.ppo_micro_batch_size", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
            remark="microbatches are packed by tokens: `learner.max_tokens_per_microbatch`",
        ),
        Row(
            (f"{ACTOR}.ppo_epochs",),
            remark="every batch is trained once",
            rule=rules.epochs_of_ppo,
            kind="dropped",
        ),
        Row(
            (f"{ACTOR}.shuffle", f"{ACTOR}.data_loader_seed"),
            remark="trajectories are divided over minibatches by `run.seed`",
        ),
    ),
)

_LAYOUT = Group(
    "Layout and memory of the learner",
    (
        Row(
            (*_of(_SIZES, "tensor_model_parallel_size"), f"{ACTOR}.automodel_config.tp_size"),
            ("learner.tensor_parallel",),
            "",
            integer("learner.tensor_parallel"),
        ),
        Row(
            (
                *_of(_SIZES, "pipeline_model_parallel_size"),
                f"{ACTOR}.automodel_config.pp_size",
                f"{ACTOR}.engine.pp",
            ),
            ("learner.pipeline_parallel",),
            "",
            integer("learner.pipeline_parallel"),
        ),
        Row(
            (
                *_of(_SIZES, "context_parallel_size"),
                f"{ACTOR}.automodel_config.cp_size",
                f"{ACTOR}.engine.cp",
            ),
            ("learner.context_parallel",),
            "",
            integer("learner.context_parallel"),
        ),
        Row(
            (
                *_below(
                    ACTOR,
                    "ulysses_sequence_parallel_size fsdp_config.ulysses_sequence_parallel_size "
                    "veomni.ulysses_parallel_size",
                ),
            ),
            ("learner.context_parallel",),
            "a sequence is divided over as many GPUs, by Megatron's context parallelism "
            "instead of Ulysses",
            integer("learner.context_parallel"),
            kind="changed",
        ),
        Row(
            (
                *_of(_SIZES, "expert_model_parallel_size"),
                *_below(ACTOR, "veomni.expert_parallel_size automodel_config.ep_size engine.ep"),
            ),
            ("learner.expert_parallel",),
            "",
            integer("learner.expert_parallel"),
        ),
        Row(
            _of(_SIZES, "expert_tensor_parallel_size"),
            ("learner.expert_tensor_parallel",),
            "1 by default; Megatron's is that of tensor parallelism",
            rules.expert_tensor,
            default="as tensor",
        ),
        Row(
            _of(_SIZES, "virtual_pipeline_model_parallel_size"),
            ("learner.interleaved_chunks",),
            "",
            rules.interleaved,
        ),
        Row(
            (*_of(_SIZES, "sequence_parallel"), f"{_OVERRIDE}.sequence_parallel"),
            ("learner.sequence_parallel",),
            "",
            switch("learner.sequence_parallel"),
        ),
        Row(
            (
                *_of(
                    _SIZES,
                    "use_distributed_optimizer",
                    "override_ddp_config.use_distributed_optimizer",
                ),
                f"{_OVERRIDE}.use_distributed_optimizer",
            ),
            ("learner.distributed_optimizer",),
            "off by default; verl's Megatron has it on, and FSDP divides the optimizer, too",
            switch("learner.distributed_optimizer"),
            default=True,
        ),
        Row(
            _of(_SIZES, "override_ddp_config.overlap_grad_reduce"),
            ("learner.overlap_grad_reduce",),
            "",
            switch("learner.overlap_grad_reduce"),
        ),
        Row(
            _of(_ENGINES, "param_offload"),
            ("learner.offload",),
            'in its list, "weights": on the host while another model of the learner computes. '
            "No engine shares its GPUs",
            rules.offload("weights"),
            kind="changed",
        ),
        Row(
            _of(_ENGINES, "grad_offload"),
            ("learner.offload",),
            'in its list, "gradients": between updates',
            rules.offload("gradients"),
            kind="changed",
        ),
        Row(
            _of(_ENGINES, "optimizer_offload"),
            ("learner.offload",),
            'in its list, "optimizer": but for the moment of its update',
            rules.offload("optimizer"),
            kind="changed",
        ),
        Row(
            _of(_REF_ENGINES, "param_offload"),
            ("learner.offload",),
            'in its list, "weights", where there is a KL: it is of all models of the learner',
            rules.offload("weights"),
            kind="changed",
        ),
        Row(
            (f"{ACTOR}.fsdp_config.full_determinism",),
            ("learner.deterministic",),
            "",
            switch("learner.deterministic"),
        ),
        Row(
            (f"{ACTOR}.megatron.dtype", f"{ACTOR}.fsdp_config.dtype"),
            ("learner.dtype",),
            "`bfloat16` or `float32`",
            rules.number_type("learner.dtype"),
        ),
        Row(
            _of(("actor_rollout_ref", "critic", "reward_model"), "nccl_timeout"),
            ("learner.timeout_s",),
            "",
            number("learner.timeout_s"),
        ),
        Row(
            (
                f"{_OVERRIDE}.recompute_granularity",
                f"{ACTOR}.mindspeed.llm_kwargs.recompute_granularity",
            ),
            ("learner.recompute",),
            "",
            one_of("learner.recompute", {"full": "full", "selective": "selective"}),
        ),
        Row(
            (
                f"{_OVERRIDE}.recompute_num_layers",
                f"{ACTOR}.mindspeed.llm_kwargs.recompute_num_layers",
            ),
            ("learner.recompute_layers",),
            "with the method `block`; `uniform` is all layers",
            rules.recompute_layers,
        ),
        Row(
            (f"{_OVERRIDE}.recompute_method", f"{ACTOR}.mindspeed.llm_kwargs.recompute_method"),
            remark="`uniform` is `learner.recompute_layers = 0`, `block` a number",
        ),
        Row(
            (f"{_OVERRIDE}.recompute_modules",),
            ("learner.recompute_modules",),
            "`core_attn`, `mlp`, `moe`",
            rules.recompute_modules,
        ),
        Row(
            tuple(
                f"{_OVERRIDE}.{name}"
                for name in (
                    "num_layers_in_first_pipeline_stage",
                    "num_layers_in_last_pipeline_stage",
                    "account_for_embedding_in_pipeline_split",
                    "account_for_loss_in_pipeline_split",
                    "moe_aux_loss_coeff",
                    "moe_z_loss_coeff",
                )
            ),
            ("learner.megatron.*",),
            "as they are",
            rules.megatron_option,
            kind="kept",
        ),
        Row(
            (
                f"{_OVERRIDE}.**",
                _OVERRIDE,
                f"{ACTOR}.megatron.override_mcore_model_config.**",
                f"{ACTOR}.megatron.override_mcore_model_config",
            ),
            remark=(
                "fusions, dispatchers and kernels are chosen by the learner; `learner.megatron` "
                "takes names of Megatron's TransformerConfig if you need one"
            ),
        ),
        Row(
            (
                f"{ACTOR}.megatron.router_replay.mode",
                f"{ACTOR}.router_replay.mode",
                f"{ROLLOUT}.enable_rollout_routing_replay",
            ),
            ("run.routing_replay",),
            '`"off"`, `"R2"`, `"R3"`, one setting for both sides',
            rules.replay,
        ),
        Row(
            (
                f"{ACTOR}.strategy",
                f"{REF}.strategy",
                "model_engine",
                *_below(
                    ACTOR,
                    "fsdp_config.** megatron.** mindspeed.** veomni.** automodel_config.** "
                    "deepspeed.** torchtitan.** engine.** fsdp_config router_replay.**",
                ),
            ),
            remark=(
                "the learner is Megatron-Core: it replicates weights where FSDP divides them, so "
                "a large model needs `learner.tensor_parallel` or `pipeline_parallel` "
                "(`slipstream plan run.toml --memory`)"
            ),
        ),
    ),
)

_LOSS = Group(
    "Loss",
    (
        Row(
            (f"{ACTOR}.policy_loss.loss_mode",),
            (
                "algo.surrogate.name",
                "algo.reduce.name",
                "algo.correction.clip-cov.share",
                "algo.correction.clip-cov.low",
                "algo.correction.clip-cov.high",
                "algo.correction.kl-cov.share",
                "algo.correction.kl-cov.coefficient",
                *_below("algo.kl", "coefficient name to"),
            ),
            "[names below](#names-of-algorithms)",
            rules.surrogate,
            kind="renamed",
            default="vanilla",
        ),
        Row(
            _of(
                (f"{ACTOR}.policy_loss",),
                "clip_cov_ratio",
                "clip_cov_lb",
                "clip_cov_ub",
                "kl_cov_ratio",
                "ppo_kl_coef",
                "dro_beta",
            ),
            ("algo.correction.clip-cov.*", "algo.correction.kl-cov.*"),
            "written with `loss_mode`",
            rules.decided_by("loss_mode"),
            kind="renamed",
        ),
        Row(
            (f"{ACTOR}.clip_ratio_low",),
            ("algo.surrogate.clip_low",),
            "verl has 0.2 for every surrogate; here `gspo`, `cispo` and others have their papers'",
            rules.clip("low"),
            default=0.2,
        ),
        Row(
            (f"{ACTOR}.clip_ratio_high",),
            ("algo.surrogate.clip_high",),
            "verl has 0.2 for every surrogate; here `gspo`, `cispo` and others have their papers'",
            rules.clip("high"),
            default=0.2,
        ),
        Row(
            (f"{ACTOR}.clip_ratio",),
            ("algo.surrogate.clip_low", "algo.surrogate.clip_high"),
            "where `clip_ratio_low` and `clip_ratio_high` are not given",
            rules.clip_both,
            kind="renamed",
        ),
        Row(
            (f"{ACTOR}.clip_ratio_c",),
            ("algo.surrogate.clip_dual",),
            "off by default; verl has 3",
            rules.dual_clip,
            default=3.0,
        ),
        Row(
            (f"{ACTOR}.tau_pos",),
            ("algo.surrogate.tau_positive",),
            "",
            rules.temperature_of_sapo("positive"),
        ),
        Row(
            (f"{ACTOR}.tau_neg",),
            ("algo.surrogate.tau_negative",),
            "",
            rules.temperature_of_sapo("negative"),
        ),
        Row(
            (f"{ACTOR}.loss_agg_mode",),
            ("algo.reduce.name",),
            "the same names with `sequence-` for `seq-`; always over the global minibatch",
            rules.reduction,
        ),
        Row(
            (f"{ACTOR}.use_token_level_loss",),
            ("algo.reduce.name",),
            "the older name: True is `token-mean`",
            rules.token_level,
        ),
        Row(
            (f"{ACTOR}.loss_scale_factor",),
            ("algo.reduce.length",),
            "for `sequence-mean-token-sum-norm`",
            rules.scale_factor,
        ),
        Row((f"{ACTOR}.entropy_coeff",), ("algo.entropy_bonus",), "", number("algo.entropy_bonus")),
        Row(
            (f"{ACTOR}.use_kl_loss",),
            ("algo.kl.place", "algo.kl.coefficient", "algo.kl.name"),
            "True is a KL in the loss, and loads the reference policy; coefficient 0.001 and "
            "`low-var` as in verl unless given",
            rules.kl_loss,
            kind="renamed",
        ),
        Row(
            (f"{ACTOR}.kl_loss_coef",),
            ("algo.kl.coefficient",),
            "with `use_kl_loss=True`",
            rules.part_of_kl(f"{ACTOR}.use_kl_loss", "algo.kl.coefficient"),
        ),
        Row(
            (f"{ACTOR}.kl_loss_type",),
            ("algo.kl.name",),
            "[names below](#names-of-algorithms)",
            rules.part_of_kl(f"{ACTOR}.use_kl_loss", "algo.kl.name"),
        ),
        Row(
            (f"{ACTOR}.tis_imp_ratio_cap",),
            (
                "algo.correction.importance-sampling.level",
                "algo.correction.importance-sampling.high",
            ),
            "the older name of `rollout_is=token`",
            rules.ratio_cap,
            kind="renamed",
        ),
        Row(
            (f"{REF}.ref_model_sync_steps",),
            ("algo.kl.renew_every",),
            "a copy: weights are not mixed",
            rules.renewed,
            kind="changed",
        ),
        Row(
            (f"{REF}.sync_ref_model", f"{REF}.ref_model_mixup_alpha"),
            remark="`algo.kl.renew_every` copies the policy into the reference",
        ),
        Row(
            (f"{REF}.model", f"{REF}.model.path"),
            ("algo.kl.reference",),
            "where there is a KL",
            rules.reference,
        ),
        Row(
            (f"{ACTOR}.checkpoint.async_save",),
            ("checkpoint.asynchronous",),
            "on by default",
            switch("checkpoint.asynchronous"),
        ),
        Row(
            (f"{ACTOR}.checkpoint.**",),
            remark=(
                "a checkpoint has everything that a resumed run needs; `checkpoint.export_at_end` "
                "and `slipstream export` write a Hugging Face folder"
            ),
        ),
        Row(
            (
                f"{ACTOR}.use_torch_compile",
                f"{REF}.use_torch_compile",
                *_below(
                    ACTOR,
                    "use_fused_kernels use_prefix_grouper calculate_entropy "
                    "calculate_sum_pi_squared entropy_from_logits_with_chunking "
                    "entropy_from_logits_chunk_size entropy_checkpointing pad_to_length "
                    "load_weight rollout_n freeze_vision_tower qat.**",
                ),
            ),
            remark=(
                "how the loss is computed, not what it is: the learner has its own way, and logs "
                "the entropy always"
            ),
        ),
        Row(
            (f"{REF}.**",),
            remark="the reference policy is divided and packed as the policy is, on the same GPUs",
        ),
    ),
)

_ROLLOUT = Group(
    "Rollout",
    (
        Row(
            (f"{ROLLOUT}.n",),
            ("run.group_size",),
            "8 by default; verl has 1",
            integer("run.group_size"),
            default=1,
        ),
        Row((f"{ROLLOUT}.temperature",), ("sampling.temperature",), "", rules.temperature),
        Row(
            (f"{ROLLOUT}.top_p",),
            ("sampling.top_p", "sampling.kept_tokens"),
            'below 1 with `sampling.kept_tokens = "drop"`, as verl\'s log-probabilities are '
            "over all tokens; `replay` takes those that were left, on both sides",
            rules.top_p,
            kind="kept",
        ),
        Row(
            (f"{ROLLOUT}.top_k",),
            ("sampling.top_k", "sampling.kept_tokens"),
            "-1 is all tokens, and so is every number that is not below the vocabulary",
            rules.top_k("sampling.top_k"),
            kind="kept",
        ),
        Row(
            (f"{ROLLOUT}.val_kwargs.n",),
            ("eval.samples",),
            "1 where evaluation is greedy",
            rules.eval_samples,
        ),
        Row(
            (f"{ROLLOUT}.val_kwargs.temperature",),
            ("eval.temperature",),
            "0 is greedy",
            rules.eval_temperature,
        ),
        Row((f"{ROLLOUT}.val_kwargs.top_p",), ("eval.top_p",), "", number("eval.top_p")),
        Row((f"{ROLLOUT}.val_kwargs.top_k",), ("eval.top_k",), "", rules.top_k("eval.top_k")),
        Row(
            (f"{ROLLOUT}.val_kwargs.do_sample",),
            remark="`eval.temperature` above 0 samples, 0 is greedy",
        ),
        Row(
            (f"{ROLLOUT}.tensor_model_parallel_size",),
            ("generators.sglang.tp_size",),
            "1 by default; verl has 2. On GPUs of one host, or of `generators.nodes`",
            integer("generators.sglang.tp_size"),
            default=2,
        ),
        Row(
            (f"{ROLLOUT}.gpu_memory_utilization",),
            ("generators.sglang.mem_fraction_static",),
            "written from 0.7 on: a generator has its GPU to itself, and a small share was "
            "for verl's learner beside it",
            rules.memory_share,
            kind="renamed",
        ),
        Row(
            (f"{ROLLOUT}.max_num_seqs", f"{ROLLOUT}.max_batch_size"),
            ("generators.max_sequences",),
            "64 by default; verl has 256, and had 1024",
            integer("generators.max_sequences"),
            default=256,
        ),
        Row(
            (f"{ROLLOUT}.dtype",),
            ("generators.dtype",),
            "`bfloat16` or `float32`; there is no `float16`",
            rules.number_type("generators.dtype"),
        ),
        Row(
            (f"{ROLLOUT}.enforce_eager",),
            ("generators.sglang.disable_cuda_graph",),
            "True",
            rules.flag("disable_cuda_graph", when=True),
        ),
        Row(
            (f"{ROLLOUT}.enable_prefix_caching",),
            ("generators.sglang.disable_radix_cache",),
            "False",
            rules.flag("disable_radix_cache", when=False),
        ),
        Row(
            (f"{ROLLOUT}.engine_kwargs.sglang.**",),
            ("generators.sglang.*",),
            "as they are, with underscores",
            rules.sglang_option,
            kind="kept",
        ),
        Row(
            (f"{ROLLOUT}.engine_kwargs.**",),
            remark="the engine is SGLang: look for its name of the option in `generators.sglang`",
        ),
        Row((f"{ROLLOUT}.name",), remark="the engine is SGLang, whatever verl's was"),
        Row(
            (
                f"{ROLLOUT}.mode",
                "actor_rollout_ref.hybrid_engine",
                "actor_rollout_ref.model_engine",
            ),
            remark=(
                "engines are processes of their own, always: no memory is switched between "
                "rollout and training"
            ),
        ),
        Row(
            (f"{ROLLOUT}.calculate_log_probs", f"{ROLLOUT}.logprobs_mode"),
            remark="engines report log-probabilities always",
        ),
        Row(
            _of(
                (ROLLOUT, REF),
                "log_prob_micro_batch_size",
                "log_prob_micro_batch_size_per_gpu",
                "log_prob_use_dynamic_bsz",
                "log_prob_max_token_len_per_gpu",
            ),
            remark=(
                "log-probabilities are computed again in the microbatches of training: "
                "`learner.max_tokens_per_microbatch`"
            ),
        ),
        Row(
            (f"{ROLLOUT}.prompt_length", f"{ROLLOUT}.response_length", f"{ROLLOUT}.max_model_len"),
            remark="they follow from `sampling.max_prompt_tokens` and `max_response_tokens`",
        ),
        Row(
            (
                *_below(
                    ROLLOUT,
                    "max_num_batched_tokens enable_chunked_prefill scheduling_policy "
                    "cudagraph_capture_sizes",
                ),
            ),
            remark=(
                "SGLang schedules by itself (`generators.sglang.chunked_prefill_size`, "
                "`max_prefill_tokens`)"
            ),
        ),
        Row(
            (
                *_below(
                    ROLLOUT,
                    "data_parallel_size dp_model_parallel_size rollout_world_size nnodes "
                    "n_gpus_per_node",
                ),
            ),
            remark="`generators.count` engines; each is a whole model on `tp_size` GPUs",
        ),
        Row(
            (
                *_below(
                    ROLLOUT,
                    "expert_parallel_size pipeline_model_parallel_size moe_tensor_parallel_size "
                    "moe_tp_size moe_ep_size",
                ),
            ),
            remark=(
                "an engine is divided by tensor parallelism alone: its weights are checked that way"
            ),
        ),
        Row(
            (*_below(ROLLOUT, "quantization quantization.* quantization_config_file qat qat.**"),),
            remark="an engine holds the learner's weights bit by bit",
        ),
        Row(
            (f"{ROLLOUT}.checkpoint_engine.**", f"{ROLLOUT}.update_weights_bucket_megabytes"),
            remark="`[weightbus]` sends weights, in buckets of its own",
        ),
        Row(
            (f"{ROLLOUT}.multi_turn.enable",),
            ("environment.function",),
            "a class with typed functions as tools ([environments.md](environments.md)): it "
            "is written anew",
            rules.turns,
            kind="changed",
        ),
        Row(
            (f"{ROLLOUT}.multi_turn.max_assistant_turns",),
            ("environment.max_turns",),
            "16 by default",
            rules.of_turns("environment.max_turns"),
        ),
        Row(
            (f"{ROLLOUT}.multi_turn.format",),
            ("environment.tool_call_parser",),
            "SGLang's name: `hermes` is `qwen25`",
            rules.tool_format,
            kind="changed",
        ),
        Row(
            (
                *_below(
                    ROLLOUT,
                    "agent.agent_loop_config_path multi_turn.tool_config_path "
                    "multi_turn.function_tool_path multi_turn.interaction_config_path "
                    "agent.agent_loop_manager_class custom.**",
                ),
            ),
            ("environment.function",),
            "tools, interactions and loops are a class or an async function in Python",
            rules.left_to_write(
                "tools, interactions and loops are Python, not YAML",
                "environment.function: FILE.py:CLASS, or an async function that drives your "
                "agent (docs/environments.md)",
            ),
            kind="changed",
        ),
        Row(
            (f"{ROLLOUT}.multi_turn.**", f"{ROLLOUT}.agent.**"),
            remark=(
                "an environment cuts its own answers, and each trajectory has a process of its "
                "own (`environment.max_outside`)"
            ),
        ),
        Row(
            (f"{ROLLOUT}.ignore_eos", f"{ROLLOUT}.do_sample"),
            remark=(
                "answers are sampled and end with the model's tokens "
                "(`sampling.min_response_tokens` for longer ones)"
            ),
        ),
        Row(
            (f"{ROLLOUT}.seed", f"{ROLLOUT}.full_determinism"),
            remark="each answer has a seed of its own, of `run.seed`, prompt and sibling",
        ),
        Row(
            (
                *_below(
                    ROLLOUT,
                    "prometheus.** disable_log_stats trace.** moe_load_balance_metrics_interval",
                ),
            ),
            remark="the broker serves metrics and traces of all roles",
        ),
        Row(
            (
                *_below(
                    ROLLOUT,
                    "free_cache_engine enable_sleep_mode multi_stage_wake_up load_format "
                    "layered_summon over_sample_rate skip_rollout skip_dump_dir "
                    "skip_tokenizer_init layer_name_map.** limit_images mtp mtp.** "
                    "disaggregation.** router.** engine_kwargs",
                ),
            ),
            remark="of verl's engines that share GPUs with the learner",
        ),
    ),
)

_ALGORITHM = Group(
    "Algorithm",
    (
        Row(
            ("algorithm.adv_estimator",),
            ("algo.advantage.name", "algo.whiten"),
            "[names below](#names-of-algorithms), as parts: the preset of a paper's name "
            "brings its KL and reduction along",
            rules.advantage,
            kind="changed",
            default="gae",
        ),
        Row(
            ("algorithm.norm_adv_by_std_in_grpo",),
            ("algo.advantage.divide_by_std",),
            "",
            rules.by_std,
        ),
        Row(("algorithm.gamma",), ("algo.advantage.discount",), "", rules.discount),
        Row(
            ("algorithm.lam",),
            ("algo.advantage.decay",),
            "of gae; 0.95 by default, verl has 1",
            rules.of_critic("algo.advantage.decay"),
            default=1.0,
        ),
        Row(
            ("algorithm.use_kl_in_reward",),
            ("algo.kl.place", "algo.kl.coefficient", "algo.kl.name"),
            "True is a KL in the reward",
            rules.kl_reward,
            kind="renamed",
        ),
        Row(
            ("algorithm.kl_ctrl.kl_coef",),
            ("algo.kl.coefficient",),
            "with `use_kl_in_reward=True`; 0.001 unless given, as in verl",
            rules.part_of_kl("algorithm.use_kl_in_reward", "algo.kl.coefficient"),
        ),
        Row(
            ("algorithm.kl_penalty",),
            ("algo.kl.name",),
            "with `use_kl_in_reward=True`",
            rules.part_of_kl("algorithm.use_kl_in_reward", "algo.kl.name"),
        ),
        Row(
            ("algorithm.kl_ctrl.type",),
            remark="the coefficient is constant: there is no controller that adapts it",
            rule=rules.controller,
            kind="dropped",
        ),
        Row(
            ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
            remark="of the adaptive controller",
        ),
        Row(
            ("algorithm.filter_groups.enable",),
            ("broker.drop_zero_variance",),
            "on by default, verl has it off; another prompt is issued",
            rules.filter_groups,
            default=False,
        ),
        Row(
            ("algorithm.filter_groups.metric",),
            remark=(
                "groups are compared by the reward before it is shaped; `broker.zero_variance_of` "
                "names a part of it instead"
            ),
        ),
        Row(("algorithm.filter_groups.*",), remark="prompts are issued until a step is full"),
        Row(
            (f"{CORRECTION}.rollout_is", "algorithm.rollout_is"),
            ("algo.correction.importance-sampling.level",),
            "`token`, `sequence`",
            rules.importance,
        ),
        Row(
            (f"{CORRECTION}.rollout_is_threshold", "algorithm.rollout_is_threshold"),
            ("algo.correction.importance-sampling.high", "algo.correction.importance-sampling.low"),
            "",
            rules.importance_bounds,
            kind="renamed",
        ),
        Row(
            (f"{CORRECTION}.rollout_is_batch_normalize",),
            ("algo.correction.importance-sampling.normalize",),
            "",
            rules.normalized,
        ),
        Row(
            (f"{CORRECTION}.rollout_rs",),
            (
                *_below("algo.correction.rejection", "measure level low high"),
                "algo.reduce.denominator",
            ),
            "[algorithms.md](algorithms.md#rejection) has verl's names; with "
            '`algo.reduce.denominator = "kept"`, as verl divides by what is kept',
            rules.rejection,
            kind="renamed",
        ),
        Row(
            (f"{CORRECTION}.rollout_rs_threshold", f"{CORRECTION}.rollout_rs_threshold_lower"),
            ("algo.correction.rejection.low", "algo.correction.rejection.high"),
            "written with `rollout_rs`",
            rules.decided_by("rollout_rs"),
            kind="renamed",
        ),
        Row(
            (f"{CORRECTION}.rollout_token_veto_threshold", "algorithm.rollout_is_veto_threshold"),
            ("algo.correction.veto.threshold",),
            "",
            number("algo.correction.veto.threshold"),
        ),
        Row(
            (f"{CORRECTION}.bypass_mode", f"{CORRECTION}.bypass_old_logprob_for_rollout"),
            ("algo.anchor",),
            '`"behavior"` with True; verl\'s default, False, is `"proximal"`. The default '
            'here is `"behavior"`',
            rules.anchor,
            default=False,
        ),
        Row(
            (f"{CORRECTION}.loss_type",),
            remark="`ppo_clip` alone",
            rule=rules.just("ppo_clip", "of the bypass losses there is ppo_clip"),
            kind="dropped",
        ),
        Row((f"{CORRECTION}.**",), remark="of older releases; `algo.correction` has what is here"),
        Row(
            ("algorithm.use_pf_ppo",),
            ("algo.data.resample", "algo.data.resample_power"),
            "",
            rules.resampled,
            kind="renamed",
        ),
        Row(
            ("algorithm.pf_ppo.*",),
            ("algo.data.resample", "algo.data.resample_power"),
            "written with `use_pf_ppo`",
            rules.decided_by("use_pf_ppo"),
            kind="renamed",
        ),
        Row(
            ("algorithm.filter_sample.**",),
            remark="GFPO chooses among siblings; there is no such rule",
        ),
        Row(
            ("distillation.enabled",),
            ("algo.teacher.model",),
            "a teacher is a model of the learner's or a server's",
            rules.left_to_write(
                "a teacher is named anew",
                "algo.teacher: model or endpoint, and coefficient (docs/algorithms.md)",
            ),
            kind="changed",
        ),
        Row(("distillation.**",), remark="`algo.teacher` names the teacher"),
    ),
)

_CRITIC = Group(
    "Critic",
    (
        Row(("critic.optim.lr",), ("algo.critic.lr",), "", rules.of_critic("algo.critic.lr")),
        Row(
            ("critic.cliprange_value",),
            ("algo.critic.clip",),
            "0.2 by default; verl has 0.5",
            rules.of_critic("algo.critic.clip"),
            default=0.5,
        ),
        Row(
            ("trainer.critic_warmup",),
            ("algo.critic.warmup_steps",),
            "in learner steps",
            rules.of_critic("algo.critic.warmup_steps"),
        ),
        Row(
            ("critic.model.path",),
            remark="the critic starts from the policy's weights, with a value head of zeros",
        ),
        Row(("critic.enable",), remark="`gae` has a critic, the others have none"),
        Row(
            ("critic.**", "critic"),
            remark=(
                "the critic is trained with the policy's schedule, batches and layout, on the "
                "same GPUs"
            ),
        ),
    ),
)

_REWARD = Group(
    "Rewards",
    (
        Row(
            FUNCTION,
            ("reward.function", "reward.sources.*.function"),
            "`FILE.py:NAME`. Without one verl scores by `data_source`: `openai/gsm8k` becomes "
            "`numeric`, code `code`, everything else `math_answer` ([rewards.md](rewards.md))",
            rules.reward_function,
            kind="renamed",
            default="",
        ),
        Row(
            ("custom_reward_function.name", "reward.custom_reward_function.name"),
            ("reward.function",),
            "the part after the colon",
            rules.decided_by("custom_reward_function.path"),
            kind="renamed",
        ),
        Row(
            _of(OVERLONG, "len"),
            ("algo.data.overlong_buffer",),
            "a share of `sampling.max_response_tokens`; the penalty stops growing at the limit",
            rules.overlong_length,
            kind="changed",
        ),
        Row(
            _of(OVERLONG, "penalty_factor"),
            ("algo.data.overlong_penalty",),
            "",
            rules.overlong_penalty,
        ),
        Row(
            (
                *_of(OVERLONG, "enable", "log"),
                "reward_model.reward_kwargs.max_resp_len",
                "reward.reward_kwargs.max_resp_len",
            ),
            remark="the buffer is on if it has a length, and of `sampling.max_response_tokens`",
        ),
        Row(
            (
                "custom_reward_function.reward_kwargs.**",
                "reward.custom_reward_function.reward_kwargs.**",
                "reward_model.reward_kwargs.**",
                "reward.reward_kwargs.**",
            ),
            ("reward.options.*",),
            "keyword arguments of the function",
            rules.reward_option,
            kind="kept",
        ),
        Row(
            (
                "reward_model.reward_manager",
                "reward.reward_manager.name",
                "reward_manager.name",
                "reward_manager",
            ),
            remark=(
                "reward workers call the function in parallel, whatever the manager was; one that "
                "takes a batch says so itself"
            ),
            rule=rules.reward_manager,
            kind="dropped",
        ),
        Row(
            ("reward_model.num_workers", "reward.num_workers"),
            ("reward.processes",),
            "child processes of one reward worker",
            integer("reward.processes"),
        ),
        Row(
            ("reward_model.num_examine", "reward.num_examine"),
            ("learner.rollouts_per_step",),
            "written to `rollouts/`, shown by `slipstream show`",
            integer("learner.rollouts_per_step", least=0),
            kind="changed",
        ),
        Row(
            ("reward_model.enable", "reward.reward_model.enable", "reward_model.grm.enable"),
            ("reward.function",),
            "a reward function asks the server of a reward model: no role holds one",
            rules.reward_model,
            kind="changed",
        ),
        Row(
            (
                "reward_model.sandbox_fusion.**",
                "reward_model.sandbox_fusion_url",
                "reward.sandbox_fusion.**",
                "sandbox_fusion.**",
            ),
            remark=(
                "code runs in the sandbox of the reward worker "
                "(`slipstream.broker.rewards.code:score`)"
            ),
        ),
        Row(
            (
                "reward_model.launch_reward_fn_async",
                "reward.launch_reward_fn_async",
                *_below(
                    "reward_model",
                    "use_reward_loop reward_loop_* reward_loop_source reward_loop_module_path "
                    "reward_loop_class_name",
                ),
                "reward_manager.**",
                "reward.reward_manager.**",
            ),
            remark="answers are scored as they come, by processes of their own",
        ),
        Row(
            ("reward_model.**", "reward.reward_model.**", "reward.**", "trainer.grm_nnodes"),
            remark="of a reward model, which is a server of your own here",
        ),
    ),
)

_TRAINER = Group(
    "Run",
    (
        Row(
            ("trainer.total_epochs",),
            ("run.epochs",),
            "`run.steps`, 100 by default, is raised so that the epochs end the run",
            number("run.epochs"),
            default=30,
        ),
        Row(
            ("trainer.total_training_steps",),
            ("run.steps",),
            "whichever of the two comes first",
            integer("run.steps"),
        ),
        Row(
            ("trainer.save_freq",),
            ("checkpoint.every_steps",),
            "-1 is written 0",
            rules.save_every,
            kind="renamed",
        ),
        Row(
            ("trainer.max_actor_ckpt_to_keep",),
            ("checkpoint.keep_last",),
            "2 by default; verl keeps all",
            rules.kept_checkpoints,
            default="all",
        ),
        Row(
            ("trainer.test_freq",),
            ("eval.every_steps", "eval.at_end"),
            "-1 is written 0, and `eval.at_end = false`",
            rules.test_every,
            kind="renamed",
            default=-1,
        ),
        Row(("trainer.val_before_train",), ("eval.before_train",), "", switch("eval.before_train")),
        Row(
            ("trainer.log_val_generations",),
            ("eval.keep_answers",),
            "256 by default",
            integer("eval.keep_answers"),
        ),
        Row(
            ("trainer.resume_mode", "trainer.resume_from_path"),
            remark=(
                "an argument: `slipstream run --resume auto`, or a folder; checkpoints of verl "
                "are not read"
            ),
            rule=rules.resumes,
            kind="dropped",
        ),
        Row(
            ("trainer.default_local_dir",),
            ("run.dir",),
            "the folder of all runs: a run's own is DIR/NAME",
            path("run.dir"),
            kind="changed",
        ),
        Row(("trainer.project_name",), ("logging.project",), "", text("logging.project")),
        Row(
            ("trainer.experiment_name",), ("run.name",), "the name of a folder, too", rules.run_name
        ),
        Row(
            ("trainer.logger",),
            ("logging.trackers",),
            "without `console`, which is always written to",
            rules.trackers,
            kind="renamed",
        ),
        Row(
            ("trainer.n_gpus_per_node",),
            ("deploy.gpus_per_host", "learner.ranks", "generators.count"),
            "learner and generators have GPUs of their own: `import-verl` gives the learner "
            "about half of them",
            integer("deploy.gpus_per_host"),
            kind="changed",
            default=8,
        ),
        Row(
            ("trainer.nnodes",),
            ("deploy.hosts",),
            "names of hosts, not a number; `--on hosts` prints the commands of each; `--on ray` or "
            "`slipstream render` start several ([clusters.md](clusters.md))",
            rules.hosts,
            kind="changed",
        ),
        Row(
            ("trainer.device",),
            ("generators.device",),
            "`cuda` or `cpu`",
            one_of("generators.device", {"cuda": "cuda", "cpu": "cpu", "npu": "auto"}),
        ),
        Row(
            ("global_profiler.steps", "trainer.profile_steps"),
            ("profile.steps",),
            "first and last step, of torch's profiler",
            rules.profiled,
            kind="changed",
        ),
        Row(
            ("trainer.val_only",),
            remark="there is no run that evaluates alone",
            rule=rules.just(expected=False, why="there is no run that evaluates alone"),
            kind="dropped",
        ),
        Row(
            (*_below("trainer", "rollout_data_dir validation_data_dir log_train_generations"),),
            remark="answers are in `rollouts/` and `eval/` of the run folder",
        ),
        Row(("trainer.balance_batch",), remark="always on"),
        Row(
            ("trainer.v1.**", "trainer.use_v1"),
            remark=(
                "roles are processes of their own; `run.mode` and `run.max_staleness_steps` say "
                "how far they may be apart"
            ),
        ),
        Row(
            (
                *_below(
                    "trainer",
                    "default_hdfs_dir del_local_ckpt_after_load max_critic_ckpt_to_keep "
                    "ray_wait_register_center_timeout esi_redundant_time use_legacy_worker_impl "
                    "dump_high_diff_tokens dump_high_diff_dir",
                ),
            ),
            remark="of verl's trainer and its workers in Ray",
        ),
        Row(
            (
                "global_profiler.**",
                "*.profiler.**",
                "*.*.profiler.**",
                "profile.**",
                "*.profile_ranks",
                "*.profile_ranks_all",
                "*.profile_discrete",
                "*.*.profile_ranks",
                "*.*.profile_ranks_all",
                "*.*.profile_discrete",
            ),
            remark="`[profile]` traces the learner's ranks; engines have SGLang's own profiler",
        ),
        Row(
            ("ray_init.**", "ray_kwargs.**", "transfer_queue.**", "skip.**", "atropos.**"),
            remark="there is no Ray between the roles; `[deploy.ray]` starts them on a cluster",
        ),
        Row(
            (
                "--config-path",
                "--config-name",
                "--config-dir",
                "-cn",
                "-cp",
                "-cd",
                "--multirun",
                "-m",
                "--cfg",
                "--resolve",
                "hydra.**",
                "defaults",
                "*@**",
                "*@*",
                "actor@actor_rollout_ref.actor",
                "--*",
                "critic@**",
            ),
            remark="switches of Hydra's; one TOML file is all there is",
        ),
    ),
)

GROUPS: tuple[Group, ...] = (
    _DATA,
    _MODEL,
    _OPTIMIZER_GROUP,
    _LAYOUT,
    _LOSS,
    _ROLLOUT,
    _ALGORITHM,
    _CRITIC,
    _REWARD,
    _TRAINER,
)
# What the page says of a value of adv_estimator, loss_mode or kl_loss_type besides its settings.
OF_VALUES = {
    "gae": "the critic comes with it",
    "gdpo": "`algo.advantage.weights` names the parts of the reward",
    "reinforce_plus_plus": 'no KL: the preset `"reinforce++"` has the paper\'s',
    "reinforce_plus_plus_baseline": 'no KL: the preset `"reinforce++-baseline"` has the paper\'s',
    "gspo": "whatever `loss_agg_mode` is, as in verl",
    "sapo": "whatever `loss_agg_mode` is, as in verl",
    "geo_mean": "whatever `loss_agg_mode` is, as in verl",
    "dppo_tv": 'with `algo.anchor = "behavior"` as in the paper (`bypass_mode=True`)',
    "dppo_kl": 'with `algo.anchor = "behavior"` as in the paper (`bypass_mode=True`)',
    "kl_cov": "with `learner.minibatches` above 1",
    "dro": "coefficient = `dro_beta`",
    "low_var_kl": "our `k3` is not bounded at 10",
    "full": "verl lists it and does not compute it",
}
# A key of a profiler, of a type or of the last rows may stand below a wildcard of an earlier group.
_FIRST = tuple(row for row in _TRAINER.rows if any("profile" in key for key in row.verl))
ROWS: tuple[Row, ...] = (*_FIRST, *(row for group in GROUPS for row in group.rows))
