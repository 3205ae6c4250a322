"""Sampling, evaluation, engines, and answers over several turns."""

import math
from functools import partial

from slipstream.deploy.interop.verl import rules
from slipstream.deploy.interop.verl.hydra import Value
from slipstream.deploy.interop.verl.keys import REF, ROLLOUT, VerlKeys
from slipstream.deploy.interop.verl.rows import (
    Counterpart,
    Rule,
    Topic,
    expected,
    nothing,
    refused,
    unlike,
)

TOPIC = Topic("Rollout")
_MORE_THAN_ANY_VOCABULARY = 300_000
_KEPT = (
    "log-probabilities are over the whole vocabulary, as verl's are; "
    'sampling.kept_tokens = "replay" takes the tokens that were left, on both sides'
)
_VAL = f"{ROLLOUT}.val_kwargs"
_rollout, _val = TOPIC.below(ROLLOUT), TOPIC.below(_VAL)

# ---- sampling ------------------------------------------------------------------

_rollout.setting("n", "run.group_size", rules.integer, "8 by default; verl has 1", default=1)


@_rollout.rule("temperature", "sampling.temperature")
def _temperature(value: Value, _: VerlKeys) -> Counterpart:
    if not isinstance(value, int | float) or value <= 0:  # in training it cannot be 0
        return expected("a number above 0", value)
    return Counterpart({"sampling.temperature": float(value)})


@_rollout.rule(
    "top_p",
    "sampling.top_p sampling.kept_tokens",
    'below 1 with `sampling.kept_tokens = "drop"`, as verl\'s log-probabilities are '
    "over all tokens; `replay` takes those that were left, on both sides",
    kind="kept",
)
def _top_p(value: Value, _: VerlKeys) -> Counterpart:
    if not isinstance(value, int | float) or not 0 < value <= 1:
        return expected("a number above 0 and at most 1", value)
    if value == 1:
        return Counterpart({"sampling.top_p": 1.0})
    return Counterpart(
        {"sampling.top_p": float(value), "sampling.kept_tokens": "drop"}, "changed", _KEPT
    )


def _top_k(setting: str) -> Rule:
    """Return the rule of top-k: any number that is not below the vocabulary is all tokens."""

    def rule(value: Value, keys: VerlKeys) -> Counterpart:
        if not isinstance(value, int) or isinstance(value, bool):
            return expected("a whole number", value)
        if value == -1:
            return Counterpart({setting: -1})
        if value == 0:
            return Counterpart({setting: -1}, "changed", "0 is written -1")
        if value >= (keys.vocab_size or _MORE_THAN_ANY_VOCABULARY):
            note = f"{value} is the whole vocabulary, written -1"
            return Counterpart({setting: -1}, "changed", note)
        if setting == "eval.top_k":
            return Counterpart({setting: value})
        if value < 2:
            return refused("a token without an alternative has no gradient")
        return Counterpart({setting: value, "sampling.kept_tokens": "drop"}, "changed", _KEPT)

    return rule


_rollout.rule(
    "top_k",
    "sampling.top_k sampling.kept_tokens",
    "-1 is all tokens, and so is every number that is not below the vocabulary",
    kind="kept",
)(_top_k("sampling.top_k"))

# ---- evaluation ----------------------------------------------------------------


def _greedy(keys: VerlKeys) -> str:
    is_greedy = keys.get(f"{_VAL}.do_sample") is False
    return "val_kwargs.do_sample=False is greedy" if is_greedy else ""


@_val.rule("n", "eval.samples", "1 where evaluation is greedy")
def _eval_samples(value: Value, keys: VerlKeys) -> Counterpart:
    if not isinstance(value, int) or value < 1:
        return expected("a whole number", value)
    if value > 1 and (_greedy(keys) or not keys.number(f"{_VAL}.temperature")):
        note = f"{value} greedy answers are all the same"
        return Counterpart({"eval.samples": 1}, "changed", note)
    return Counterpart({"eval.samples": value})


_val.setting("temperature", "eval.temperature", rules.unless(_greedy, rules.number), "0 is greedy")
_val.setting("top_p", "eval.top_p", rules.number)
_val.setting("top_k", "eval.top_k", _top_k)
_val.dropped("do_sample", "`eval.temperature` above 0 samples, 0 is greedy")

# ---- engines -------------------------------------------------------------------

_rollout.setting(
    "tensor_model_parallel_size",
    "generators.sglang.tp_size",
    rules.integer,
    "1 by default; verl has 2. On GPUs of one host, or of `generators.nodes`",
    default=2,
)


@_rollout.rule(
    "expert_parallel_size moe_ep_size",
    "generators.sglang.ep_size",
    "ranks of an engine that each have a share of a mixture's experts; "
    "verl counts those of joined engines (`data_parallel_size`), an engine here is by itself",
)
def _expert_groups(value: Value, keys: VerlKeys) -> Counterpart:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        return expected("a whole number", value)
    ranks = keys.integer(f"{ROLLOUT}.tensor_model_parallel_size", default=2)
    groups = math.gcd(value, ranks)
    if value == 1:
        return nothing("every rank has a share of every expert (generators.sglang.ep_size)")
    if groups == 1:
        note = f"{value} over joined engines; one of {ranks} ranks has all experts"
        return Counterpart({}, "changed", note)
    if groups == value:
        return Counterpart({"generators.sglang.ep_size": value})
    note = f"{value} over joined engines; one of {ranks} ranks has {groups} groups of experts"
    return Counterpart({"generators.sglang.ep_size": groups}, "changed", note)


@_rollout.rule(
    "gpu_memory_utilization",
    "generators.sglang.mem_fraction_static",
    "written from 0.7 on: a generator has its GPU to itself, and a small share was "
    "for verl's learner beside it",
    kind="renamed",
)
def _memory_share(value: Value, _: VerlKeys) -> Counterpart:
    if not isinstance(value, int | float) or not 0 < value < 1:
        return expected("a share of 1", value)
    if value < 0.7:
        return nothing(
            f"{value:g} leaves room for verl's learner; a generator has its GPU to itself, and "
            "SGLang chooses (generators.sglang.mem_fraction_static)"
        )
    return Counterpart({"generators.sglang.mem_fraction_static": float(value)})


_rollout.setting(
    "max_num_seqs max_batch_size",
    "generators.max_sequences",
    rules.integer,
    "64 by default; verl has 256, and had 1024",
    default=256,
)
_rollout.setting(
    "dtype", "generators.dtype", rules.number_type, "`bfloat16` or `float32`; there is no `float16`"
)


def _flag(setting: str, *, when: bool) -> Rule:
    """Return the rule of a flag of SGLang's, which can only be switched on."""
    return lambda value, _: (
        Counterpart({setting: True}) if value is when else nothing("as by default")
    )


_rollout.setting(
    "enforce_eager", "generators.sglang.disable_cuda_graph", partial(_flag, when=True), "True"
)
_rollout.setting(
    "enable_prefix_caching",
    "generators.sglang.disable_radix_cache",
    partial(_flag, when=False),
    "False",
)


@_rollout.rule(
    "engine_kwargs.sglang.**", "generators.sglang.*", "as they are, with underscores", kind="kept"
)
def _sglang_option(value: Value, keys: VerlKeys) -> Counterpart:
    name = keys.key.rpartition("engine_kwargs.sglang.")[2].replace("-", "_")
    if "." in name or isinstance(value, dict):
        return refused("an option that is a table: write it into [generators.sglang]")
    if value is False:
        return nothing("SGLang's flags can only be switched on")
    return Counterpart({f"generators.sglang.{name}": value})


_rollout.dropped(
    "engine_kwargs.**",
    "the engine is SGLang: look for its name of the option in `generators.sglang`",
)
_rollout.dropped("name", "the engine is SGLang, whatever verl's was")
TOPIC.dropped(
    f"{ROLLOUT}.mode actor_rollout_ref.hybrid_engine actor_rollout_ref.model_engine",
    "engines are processes of their own, always: no memory is switched between rollout and "
    "training",
)
_rollout.dropped("calculate_log_probs logprobs_mode", "engines report log-probabilities always")
TOPIC.below(ROLLOUT, REF).dropped(
    "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
    "log_prob_max_token_len_per_gpu",
    "log-probabilities are computed again in the microbatches of training: "
    "`learner.max_tokens_per_microbatch`",
)
_rollout.dropped(
    "prompt_length response_length max_model_len",
    "they follow from `sampling.max_prompt_tokens` and `max_response_tokens`",
)
_rollout.dropped(
    "max_num_batched_tokens enable_chunked_prefill scheduling_policy cudagraph_capture_sizes",
    "SGLang schedules by itself (`generators.sglang.chunked_prefill_size`, `max_prefill_tokens`)",
)
_rollout.dropped(
    "data_parallel_size dp_model_parallel_size rollout_world_size nnodes n_gpus_per_node",
    "`generators.count` engines; each is a whole model on `tp_size` GPUs",
)
_rollout.dropped(
    "pipeline_model_parallel_size",
    "an engine has no stages: SGLang counts ranks of a weight group by tensor parallelism alone",
)
_rollout.dropped(
    "moe_tensor_parallel_size moe_tp_size",
    "ranks that share an expert are `tp_size / ep_size` of `generators.sglang`",
)


@_rollout.rule(
    "quantization",
    "weightbus.precision",
    "`fp8` is quantized by the learner as it publishes, in blocks of 128 x 128; others are refused",
)
def _quantization(value: Value, _: VerlKeys) -> Counterpart:
    if value is None or value == "null":
        return nothing("engines hold the weights as they are trained")
    return Counterpart({"weightbus.precision": "fp8"}) if value == "fp8" else unlike(value, ["fp8"])


_rollout.dropped(
    "quantization.* quantization_config_file qat qat.**",
    "an engine holds what the learner publishes bit by bit: `weightbus.precision`",
)
_rollout.dropped(
    "checkpoint_engine.** update_weights_bucket_megabytes",
    "`[weightbus]` sends weights, in buckets of its own",
)

# ---- several turns -------------------------------------------------------------


_rollout.left_to_write(
    "multi_turn.enable",
    "environment.function",
    "a class with typed functions as tools ([environments.md](environments.md)): it is written "
    "anew",
    "tools and interactions are a class, not a YAML file",
    "environment.function: FILE.py:CLASS with your tools as typed functions (docs/environments.md)",
    off="off: a prompt is answered in one turn",
)


def _one_turn(keys: VerlKeys) -> str:
    has_turns = keys.has_true(f"{ROLLOUT}.multi_turn.enable")
    return "" if has_turns else "it counts with multi_turn.enable=True alone"


_rollout.setting(
    "multi_turn.max_assistant_turns",
    "environment.max_turns",
    rules.unless(_one_turn, rules.count("not set")),
    "16 by default",
)


@_rollout.rule(
    "multi_turn.format",
    "environment.tool_call_parser",
    "SGLang's name: `hermes` is `qwen25`",
    kind="changed",
)
def _tool_format(value: Value, keys: VerlKeys) -> Counterpart:
    if reason := _one_turn(keys):
        return nothing(reason)
    name = "qwen25" if value == "hermes" else str(value)
    return Counterpart({"environment.tool_call_parser": name}, "changed", "SGLang's name")


_rollout.left_to_write(
    "agent.agent_loop_config_path multi_turn.tool_config_path multi_turn.function_tool_path "
    "multi_turn.interaction_config_path agent.agent_loop_manager_class custom.**",
    "environment.function",
    "tools, interactions and loops are a class or an async function in Python",
    "tools, interactions and loops are Python, not YAML",
    "environment.function: FILE.py:CLASS, or an async function that drives your agent "
    "(docs/environments.md)",
)
_rollout.dropped(
    "multi_turn.** agent.**",
    "an environment cuts its own answers, and each trajectory has a process of its own "
    "(`environment.max_outside`)",
)

# ---- the rest ------------------------------------------------------------------

_rollout.dropped(
    "ignore_eos do_sample",
    "answers are sampled and end with the model's tokens (`sampling.min_response_tokens` for "
    "longer ones)",
)
_rollout.dropped(
    "seed full_determinism", "each answer has a seed of its own, of `run.seed`, prompt and sibling"
)
_rollout.dropped(
    "prometheus.** disable_log_stats trace.** moe_load_balance_metrics_interval",
    "the broker serves metrics and traces of all roles",
)
_rollout.dropped(
    "free_cache_engine enable_sleep_mode multi_stage_wake_up load_format layered_summon "
    "over_sample_rate skip_rollout skip_dump_dir skip_tokenizer_init layer_name_map.** "
    "limit_images mtp mtp.** disaggregation.** router.** engine_kwargs",
    "of verl's engines that share GPUs with the learner",
)
