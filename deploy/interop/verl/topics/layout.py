"""The learner's ranks and memory."""

from slipstream.deploy.interop.verl.hydra import Value
from slipstream.deploy.interop.verl.keys import (
    ACTOR,
    MEGATRON,
    OPTIM,
    REF,
    ROLLOUT,
    USES_KL,
    VerlKeys,
    below,
    each,
)
from slipstream.deploy.interop.verl.rows import (
    OFF,
    Counterpart,
    Kind,
    Topic,
    below_table,
    choice,
    expected,
    integer,
    nothing,
    number,
    number_type,
    refused,
    switch,
)

TOPIC = Topic("Layout and memory of the learner")
_TRANSFORMER = f"{ACTOR}.megatron.override_transformer_config"
_MINDSPEED = f"{ACTOR}.mindspeed.llm_kwargs"


# ---- parallelism ---------------------------------------------------------------

TOPIC.setting(
    f"{each(MEGATRON, 'tensor_model_parallel_size')} {ACTOR}.automodel_config.tp_size",
    "learner.tensor_parallel",
    integer,
)
TOPIC.setting(
    f"{each(MEGATRON, 'pipeline_model_parallel_size')} "
    + below(ACTOR, "automodel_config.pp_size engine.pp"),
    "learner.pipeline_parallel",
    integer,
)
TOPIC.setting(
    f"{each(MEGATRON, 'context_parallel_size')} "
    + below(ACTOR, "automodel_config.cp_size engine.cp"),
    "learner.context_parallel",
    integer,
)
TOPIC.setting(
    below(
        ACTOR,
        "ulysses_sequence_parallel_size fsdp_config.ulysses_sequence_parallel_size "
        "veomni.ulysses_parallel_size",
    ),
    "learner.context_parallel",
    integer,
    "a sequence is divided over as many GPUs, by Megatron's context parallelism instead of Ulysses",
    kind="changed",
)
TOPIC.setting(
    f"{each(MEGATRON, 'expert_model_parallel_size')} "
    + below(ACTOR, "veomni.expert_parallel_size automodel_config.ep_size engine.ep"),
    "learner.expert_parallel",
    integer,
)


def _ranks(keys: VerlKeys, what: str) -> int:
    return keys.integer(*each(MEGATRON, f"{what}_model_parallel_size").split(), default=1)


@TOPIC.rule(
    each(MEGATRON, "expert_tensor_parallel_size"),
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


@TOPIC.rule(each(MEGATRON, "virtual_pipeline_model_parallel_size"), "learner.interleaved_chunks")
def _interleaved(value: Value, keys: VerlKeys) -> Counterpart:
    if not isinstance(value, int) or value < 2 or _ranks(keys, "pipeline") < 2:
        return nothing("there is nothing to interleave")
    return Counterpart({"learner.interleaved_chunks": value})


TOPIC.setting(
    f"{each(MEGATRON, 'sequence_parallel')} {_TRANSFORMER}.sequence_parallel",
    "learner.sequence_parallel",
    switch,
)
TOPIC.setting(
    each(MEGATRON, "use_distributed_optimizer override_ddp_config.use_distributed_optimizer")
    + f" {_TRANSFORMER}.use_distributed_optimizer",
    "learner.distributed_optimizer",
    switch,
    "off by default; verl's Megatron has it on, and FSDP divides the optimizer, too",
    default=True,
)
TOPIC.setting(
    each(MEGATRON, "override_ddp_config.overlap_grad_reduce"), "learner.overlap_grad_reduce", switch
)

# ---- memory --------------------------------------------------------------------


def _offload(value: Value, keys: VerlKeys) -> Counterpart:
    """Take one of the things that are on the host in between."""
    if value is not True:
        return nothing(OFF)
    if ".ref." in keys.key and not keys.has_true(*USES_KL):
        return nothing("no reference policy is loaded without a KL")
    what = _OFFLOADED[keys.key.rpartition(".")[2]]
    on_host = f"{OPTIM}.override_optimizer_config.optimizer_cpu_offload"
    if what == "optimizer" and keys.has_true(on_host):
        return nothing("optimizer_cpu_offload keeps the optimizer on the host for good")
    return Counterpart({"learner.offload": [what]})


_OFFLOADED = {
    "param_offload": "weights",
    "grad_offload": "gradients",
    "optimizer_offload": "optimizer",
}
_ENGINES = below(ACTOR, "fsdp_config megatron mindspeed veomni engine").split()
for _name, _remark in {
    "param_offload": 'in its list, "weights": on the host while another model of the learner '
    "computes. No engine shares its GPUs",
    "grad_offload": 'in its list, "gradients": between updates',
    "optimizer_offload": 'in its list, "optimizer": but for the moment of its update',
}.items():
    TOPIC.rule(each(_ENGINES, _name), "learner.offload", _remark, kind="changed")(_offload)
TOPIC.rule(
    each(below(REF, "fsdp_config megatron mindspeed veomni").split(), "param_offload"),
    "learner.offload",
    'in its list, "weights", where there is a KL: it is of all models of the learner',
    kind="changed",
)(_offload)
TOPIC.setting(f"{ACTOR}.fsdp_config.full_determinism", "learner.deterministic", switch)
TOPIC.setting(
    below(ACTOR, "megatron.dtype fsdp_config.dtype"),
    "learner.dtype",
    number_type,
    "`bfloat16` or `float32`",
)
TOPIC.setting(
    each(("actor_rollout_ref", "critic", "reward_model"), "nccl_timeout"),
    "learner.timeout_s",
    number,
)

# ---- recomputation -------------------------------------------------------------

_RECOMPUTES = (_TRANSFORMER, _MINDSPEED)
TOPIC.setting(
    each(_RECOMPUTES, "recompute_granularity"),
    "learner.recompute",
    choice({"full": "full", "selective": "selective"}),
)


@TOPIC.rule(
    each(_RECOMPUTES, "recompute_num_layers"),
    "learner.recompute_layers",
    "with the method `block`; `uniform` is all layers",
)
def _recompute_layers(value: Value, keys: VerlKeys) -> Counterpart:
    method = keys.get(f"{keys.key.rpartition('.')[0]}.recompute_method")
    if method != "block" or not isinstance(value, int):
        return nothing("uniform computes all layers again, as learner.recompute_layers = 0 does")
    return Counterpart({"learner.recompute_layers": value})


TOPIC.dropped(
    each(_RECOMPUTES, "recompute_method"),
    "`uniform` is `learner.recompute_layers = 0`, `block` a number",
)
_MODULES = {"core_attn", "mlp", "moe"}


@TOPIC.rule(
    f"{_TRANSFORMER}.recompute_modules", "learner.recompute_modules", "`core_attn`, `mlp`, `moe`"
)
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

TOPIC.rule(
    below(
        _TRANSFORMER,
        "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split "
        "moe_aux_loss_coeff moe_z_loss_coeff",
    ),
    "learner.megatron.*",
    "as they are",
    kind="kept",
)(below_table("learner.megatron"))
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
    if value is True or value in {"R2", "R3"}:
        return Counterpart({"run.routing_replay": "R3" if value is True else value})
    return refused(f"{value!r} is none of disabled, R2, R3")


TOPIC.dropped(
    f"{ACTOR}.strategy {REF}.strategy model_engine "
    + below(
        ACTOR,
        "fsdp_config.** megatron.** mindspeed.** veomni.** automodel_config.** deepspeed.** "
        "torchtitan.** engine.** fsdp_config router_replay.**",
    ),
    "the learner is Megatron-Core: it replicates weights where FSDP divides them, so a large "
    "model needs `learner.tensor_parallel` or `pipeline_parallel` (`slipstream memory run.toml`)",
)
