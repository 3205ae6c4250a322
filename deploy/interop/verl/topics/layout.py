"""The learner's ranks and memory."""

from slipstream.deploy.interop.verl import rules
from slipstream.deploy.interop.verl.hydra import Value
from slipstream.deploy.interop.verl.keys import (
    ACTOR,
    MEGATRON,
    OPTIM,
    REF,
    ROLLOUT,
    VerlKeys,
    below,
    each,
)
from slipstream.deploy.interop.verl.rows import (
    OFF,
    Counterpart,
    Kind,
    Rule,
    Topic,
    expected,
    nothing,
    refused,
)

TOPIC = Topic("Layout and memory of the learner")
_TRANSFORMER = f"{ACTOR}.megatron.override_transformer_config"
_actor, _transformer = TOPIC.below(ACTOR), TOPIC.below(_TRANSFORMER)
_megatron = TOPIC.below(*MEGATRON)
_recomputes = TOPIC.below(_TRANSFORMER, f"{ACTOR}.mindspeed.llm_kwargs")


# ---- parallelism ---------------------------------------------------------------


def _parallel(ours: str, megatron: str, others: str) -> None:
    keys = f"{each(MEGATRON, megatron)} {below(ACTOR, others)}"
    TOPIC.setting(keys, f"learner.{ours}", rules.integer)


_parallel("tensor_parallel", "tensor_model_parallel_size", "automodel_config.tp_size")
_parallel("pipeline_parallel", "pipeline_model_parallel_size", "automodel_config.pp_size engine.pp")
_parallel("context_parallel", "context_parallel_size", "automodel_config.cp_size engine.cp")
_actor.setting(
    "ulysses_sequence_parallel_size fsdp_config.ulysses_sequence_parallel_size "
    "veomni.ulysses_parallel_size",
    "learner.context_parallel",
    rules.integer,
    "a sequence is divided over as many GPUs, by Megatron's context parallelism instead of Ulysses",
    kind="changed",
)
_parallel(
    "expert_parallel",
    "expert_model_parallel_size",
    "veomni.expert_parallel_size automodel_config.ep_size engine.ep",
)


def _ranks(keys: VerlKeys, what: str) -> int:
    return keys.integer(each(MEGATRON, f"{what}_model_parallel_size"), default=1)


@_megatron.rule(
    "expert_tensor_parallel_size",
    "learner.expert_tensor_parallel",
    "1 by default; Megatron's is that of tensor parallelism",
    default="as tensor",
)
def _expert_tensor(value: Value, keys: VerlKeys) -> Counterpart:
    if value == "as tensor":
        value = _ranks(keys, "tensor")
        if value == 1 or _ranks(keys, "expert") == 1:
            return nothing("")
    if not isinstance(value, int) or value < 1:
        return expected("a whole number", value)
    return Counterpart({"learner.expert_tensor_parallel": value})


@_megatron.rule("virtual_pipeline_model_parallel_size", "learner.interleaved_chunks")
def _interleaved(value: Value, keys: VerlKeys) -> Counterpart:
    if not isinstance(value, int) or value < 2 or _ranks(keys, "pipeline") < 2:
        return nothing("there is nothing to interleave")
    return Counterpart({"learner.interleaved_chunks": value})


TOPIC.setting(
    f"{each(MEGATRON, 'sequence_parallel')} {_TRANSFORMER}.sequence_parallel",
    "learner.sequence_parallel",
    rules.switch,
)
TOPIC.dropped(
    each(MEGATRON, "use_distributed_optimizer override_ddp_config.use_distributed_optimizer")
    + f" {_TRANSFORMER}.use_distributed_optimizer "
    + each(
        MEGATRON, "override_ddp_config.overlap_grad_reduce override_ddp_config.overlap_param_gather"
    ),
    "always done by ranks that hold the same weights",
)

# ---- memory --------------------------------------------------------------------


def _offload(what: str) -> Rule:
    """Return the rule of one thing that is on the host in between."""

    def rule(value: Value, keys: VerlKeys) -> Counterpart:
        if value is not True:
            return nothing(OFF)
        if ".ref." in keys.key and not keys.has_kl:
            return nothing("no reference policy is loaded without a KL")
        on_host = f"{OPTIM}.override_optimizer_config.optimizer_cpu_offload"
        if what == "optimizer" and keys.has_true(on_host):
            return nothing("optimizer_cpu_offload keeps the optimizer on the host for good")
        return Counterpart({"learner.offload": [what]})

    return rule


_engines = _actor.below("fsdp_config", "megatron", "mindspeed", "veomni", "engine")
_WHILE = "on the host while another model of the learner computes. No engine shares its GPUs"
for _key, _what, _when in (
    ("param_offload", "weights", _WHILE),
    ("grad_offload", "gradients", "between updates"),
    ("optimizer_offload", "optimizer", "but for the moment of its update"),
):
    _remark = f'in its list, "{_what}": {_when}'
    _engines.rule(_key, "learner.offload", _remark, kind="changed")(_offload(_what))
TOPIC.below(REF).below("fsdp_config", "megatron", "mindspeed", "veomni").rule(
    "param_offload",
    "learner.offload",
    'in its list, "weights", where there is a KL: it is of all models of the learner',
    kind="changed",
)(_offload("weights"))
_actor.setting("fsdp_config.full_determinism", "learner.deterministic", rules.switch)
_actor.setting(
    "megatron.dtype fsdp_config.dtype",
    "learner.dtype",
    rules.number_type,
    "`bfloat16` or `float32`",
)
TOPIC.below("actor_rollout_ref", "critic", "reward_model").setting(
    "nccl_timeout", "learner.timeout_s", rules.number
)

# ---- recomputation -------------------------------------------------------------

_recomputes.setting(
    "recompute_granularity", "learner.recompute", rules.choice(("full", "selective"))
)


@_recomputes.rule(
    "recompute_num_layers",
    "learner.recompute_layers",
    "with the method `block`; `uniform` is all layers",
)
def _recompute_layers(value: Value, keys: VerlKeys) -> Counterpart:
    method = keys.get(f"{keys.key.rpartition('.')[0]}.recompute_method")
    if method != "block" or not isinstance(value, int):
        return nothing("uniform computes all layers again, as learner.recompute_layers = 0 does")
    return Counterpart({"learner.recompute_layers": value})


_recomputes.dropped(
    "recompute_method", "`uniform` is `learner.recompute_layers = 0`, `block` a number"
)
_MODULES = ("core_attn", "mlp", "moe")


@_transformer.rule("recompute_modules", "learner.recompute_modules", "`core_attn`, `mlp`, `moe`")
def _recompute_modules(value: Value, keys: VerlKeys) -> Counterpart:
    if keys.get(f"{_TRANSFORMER}.recompute_granularity") != "selective":
        return nothing("it counts with recompute_granularity=selective alone")
    names = value if isinstance(value, list) else []
    known = [name for name in names if name in _MODULES]
    if not known:
        return refused(f"none of {value!r} is core_attn, mlp or moe")
    left = [str(name) for name in names if name not in known]
    note = f"without {', '.join(left)}: there are core_attn, mlp and moe" if left else ""
    kind: Kind | None = "changed" if left else None
    return Counterpart({"learner.recompute_modules": known}, kind, note)


# ---- the rest ------------------------------------------------------------------

_transformer.rule(
    "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage "
    "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split "
    "moe_aux_loss_coeff moe_z_loss_coeff",
    "learner.megatron.*",
    "as they are",
    kind="kept",
)(rules.below_table("learner.megatron"))
TOPIC.dropped(
    f"{_TRANSFORMER}.** {_TRANSFORMER} "
    + below(f"{ACTOR}.megatron", "override_mcore_model_config.** override_mcore_model_config"),
    "fusions, dispatchers and kernels are chosen by the learner; `learner.megatron` takes names of "
    "Megatron's TransformerConfig if you need one",
)


@TOPIC.rule(
    f"{ACTOR}.megatron.router_replay.mode {ACTOR}.router_replay.mode "
    f"{ROLLOUT}.enable_rollout_routing_replay",
    "run.routing_replay",
    '`"off"`, `"R2"`, `"R3"`, one setting for both sides',
)
def _replay(value: Value, _: VerlKeys) -> Counterpart:
    if value is False or value == "disabled":
        return nothing(OFF)
    if value is True or value in ("R2", "R3"):
        return Counterpart({"run.routing_replay": "R3" if value is True else value})
    return refused(f"{value!r} is none of disabled, R2, R3")


TOPIC.dropped(
    f"{ACTOR}.strategy {REF}.strategy model_engine "
    + below(
        ACTOR,
        "fsdp_config.** megatron.** mindspeed.** veomni.** automodel_config.** deepspeed.** "
        "torchtitan.** engine.** fsdp_config router_replay.**",
    ),
    "the learner is Megatron-Core: it replicates weights where FSDP divides them, so a large model "
    "needs `learner.tensor_parallel` or `pipeline_parallel` (`slipstream plan run.toml --memory`)",
)
