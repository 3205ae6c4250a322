"""The optimizer, its learning rate, and the batches of a step."""

import math

from slipstream.deploy.interop.verl import rules
from slipstream.deploy.interop.verl.hydra import Value
from slipstream.deploy.interop.verl.keys import ACTOR, MEGATRON, OPTIM, VerlKeys, below, each
from slipstream.deploy.interop.verl.rows import Counterpart, Kind, Topic, expected, nothing, unlike

TOPIC = Topic("Optimizer and batches")
_OPTIMIZER = f"{OPTIM}.override_optimizer_config"
_optim, _actor, _optimizer = (TOPIC.below(place) for place in (OPTIM, ACTOR, _OPTIMIZER))
_SHAPES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")


# ---- learning rate -------------------------------------------------------------


def _total_steps(keys: VerlKeys) -> int:
    """Return the steps of the whole run; 0 is not known."""
    return max(0, keys.integer(f"trainer.total_training_steps {OPTIM}.total_training_steps"))


def _shape(keys: VerlKeys) -> str:
    names = below(OPTIM, "lr_scheduler_type warmup_style lr_decay_style")
    return str(keys.get(names, default="constant"))


_optim.setting("lr", "learner.lr", rules.number)


_optim.setting(
    "lr_warmup_steps",
    "learner.lr_warmup_steps",
    rules.count("no warm-up, or that of lr_warmup_steps_ratio"),
    "in learner steps",
)


@_optim.rule(
    "lr_warmup_steps_ratio",
    "learner.lr_warmup_steps",
    "in steps, where `total_training_steps` is known",
    kind="changed",
)
def _warmup_ratio(value: Value, keys: VerlKeys) -> Counterpart:
    other = keys.integer(f"{OPTIM}.lr_warmup_steps")
    if not isinstance(value, int | float) or not 0 < value < math.inf or other > 0:
        return nothing("no warm-up, or that of lr_warmup_steps")
    if steps := _total_steps(keys):
        note = f"in steps: {value:g} of {steps}"
        return Counterpart({"learner.lr_warmup_steps": round(value * steps)}, "changed", note)
    return Counterpart(
        {},
        "changed",
        "in steps, and the number of all steps is not known before the data is read",
        f"learner.lr_warmup_steps: {value:g} of the steps that run.epochs will take",
    )


@_optim.rule(
    "lr_scheduler_type warmup_style lr_decay_style", "learner.lr_schedule", "the same names"
)
def _schedule(value: Value, keys: VerlKeys) -> Counterpart:
    name = str(value)
    if name not in _SHAPES:
        return unlike(value, _SHAPES)
    is_known = name == "constant" or _total_steps(keys) or keys.integer(f"{OPTIM}.lr_decay_steps")
    todo = "" if is_known else "learner.lr_decay_steps: the steps that run.epochs will take"
    return Counterpart({"learner.lr_schedule": name}, todo=todo)


def _lowest_rate(value: Value, keys: VerlKeys) -> Counterpart:
    """Take the learning rate at the end, as a share of the highest or as it is."""
    if not isinstance(value, int | float) or value <= 0:
        return nothing("0 is what Slipstream does without the setting")
    if _constant(keys):
        return nothing("a constant learning rate has no end")
    if not keys.key.endswith("_ratio"):
        return Counterpart({"learner.lr_min": float(value)})
    lr = keys.number(f"{OPTIM}.lr", default=1e-6)
    note = f"{value:g} of learner.lr = {lr:g}"
    return Counterpart({"learner.lr_min": value * lr}, "changed", note)


_optim.rule("min_lr_ratio", "learner.lr_min", "a rate, not a share", kind="changed")(_lowest_rate)
_optim.rule("min_lr", "learner.lr_min")(_lowest_rate)


def _constant(keys: VerlKeys) -> str:
    return "lr_scheduler_type is constant" if _shape(keys) == "constant" else ""


def _not_wsd(keys: VerlKeys) -> str:
    return "" if _shape(keys) == "WSD" else f"lr_scheduler_type is {_shape(keys)}"


_steps = rules.count("not set")
_decays = rules.choice(("linear", "cosine", "exponential", "minus_sqrt"))
_optim.setting("lr_decay_steps", "learner.lr_decay_steps", rules.unless(_constant, _steps))
_optim.setting("lr_wsd_decay_steps", "learner.wsd_decay_steps", rules.unless(_not_wsd, _steps))
_optim.setting("lr_wsd_decay_style", "learner.wsd_decay", rules.unless(_not_wsd, _decays))

# ---- optimizer -----------------------------------------------------------------

_optim.setting(
    "weight_decay",
    "learner.weight_decay",
    rules.number,
    "0 by default; verl has 0.01",
    default=0.01,
)


@_optim.rule(
    "betas",
    "learner.adam_beta1 learner.adam_beta2",
    "0.9 and 0.95 by default; verl has 0.9 and 0.999",
    default=[0.9, 0.999],
)
def _betas(value: Value, _: VerlKeys) -> Counterpart:
    match value:
        case [int() | float() as first, int() | float() as second]:
            return Counterpart(
                {"learner.adam_beta1": float(first), "learner.adam_beta2": float(second)}
            )
    return expected("two numbers", value)


TOPIC.setting(f"{OPTIM}.clip_grad {ACTOR}.grad_clip", "learner.clip_grad", rules.number)


@_optimizer.rule(
    "optimizer_offload_fraction optimizer_cpu_offload",
    "learner.optimizer_offload_fraction",
    "in place of `learner.offload` with the optimizer",
)
def _host_optimizer(value: Value, keys: VerlKeys) -> Counterpart:
    if not keys.has_true(f"{_OPTIMIZER}.optimizer_cpu_offload"):
        return nothing("it counts with optimizer_cpu_offload=True alone")
    if keys.adapters:
        return nothing("an optimizer of adapters is small")
    share = value if isinstance(value, int | float) and not isinstance(value, bool) else 1.0
    fraction = keys.number(f"{_OPTIMIZER}.optimizer_offload_fraction", default=float(share))
    bounded = min(1.0, max(0.0, float(fraction)))
    return Counterpart({"learner.optimizer_offload_fraction": bounded})


@_optimizer.rule(
    "exp_avg_dtype exp_avg_sq_dtype",
    "learner.moments_dtype",
    "bfloat16 needs a second beta of at most 0.99; without Transformer Engine",
)
def _moments(value: Value, keys: VerlKeys) -> Counterpart:
    betas = keys.get(f"{OPTIM}.betas")
    decay = betas[1] if isinstance(betas, list) and len(betas) == 2 else 0.999
    if "bf" not in str(value):
        return nothing("float32, as by default")
    if not isinstance(decay, int | float) or decay > 0.99:
        return nothing(
            f"bfloat16 cannot hold the changes of a second moment with a decay of {decay}"
        )
    return Counterpart({"learner.moments_dtype": "bfloat16"})


TOPIC.dropped(
    f"{_OPTIMIZER}.** {_OPTIMIZER}",
    "the optimizer is Slipstream's own Adam; of Megatron's keys there are those above",
)
_optim.dropped("*", "decoupled Adam, with a warm-up from 0; it has no other choice")


# ---- batches -------------------------------------------------------------------


@_actor.rule(
    "ppo_mini_batch_size",
    "learner.minibatches",
    "how many, not how large: `train_batch_size / ppo_mini_batch_size`",
    kind="changed",
    default=256,
)
def _minibatches(value: Value, keys: VerlKeys) -> Counterpart:
    size = keys.integer("data.train_batch_size", default=1024)
    if not isinstance(value, int) or value < 1:
        return expected("a whole number of prompts", value)
    note = f"how many, not how large: {size} / {value} prompts"
    if size % value:
        note += f", rounded: verl refuses or drops the remainder of {size % value}"
    return Counterpart({"learner.minibatches": max(1, size // value)}, "changed", note)


@_actor.rule(
    "ppo_max_token_len_per_gpu",
    "learner.max_tokens_per_microbatch",
    "of all ranks that divide a sequence together; at least the longest sequence",
    default=16384,
)
def _microbatch_tokens(value: Value, keys: VerlKeys) -> Counterpart:
    if keys.get(f"{ACTOR}.use_dynamic_bsz") is not True:
        return nothing("it counts with use_dynamic_bsz=True alone")
    if not isinstance(value, int) or value < 1:
        return expected("a whole number of tokens", value)
    parts = keys.integer(_CONTEXT_PARALLEL, default=1)
    tokens = max(value * parts, keys.longest)
    note = f"times the {parts} GPUs that divide a sequence" if parts > 1 else ""
    if tokens != value * parts:
        note = f"raised to the longest sequence, {tokens} tokens"
    kind: Kind | None = "changed" if note else None
    return Counterpart({"learner.max_tokens_per_microbatch": tokens}, kind, note)


_CONTEXT_PARALLEL = f"{each(MEGATRON, 'context_parallel_size')} " + below(
    ACTOR,
    "ulysses_sequence_parallel_size fsdp_config.ulysses_sequence_parallel_size "
    "veomni.ulysses_parallel_size automodel_config.cp_size engine.cp",
)
_PACKED = "microbatches are packed by tokens"
_actor.dropped("use_dynamic_bsz", f"always on: {_PACKED}")
_actor.dropped(
    "ppo_micro_batch_size ppo_micro_batch_size_per_gpu",
    f"{_PACKED}: `learner.max_tokens_per_microbatch`",
)
_ONCE = "every batch is trained once"
_actor.rule("ppo_epochs", "", _ONCE, kind="dropped")(rules.just(1, _ONCE))
_actor.dropped(
    "shuffle data_loader_seed", "trajectories are divided over minibatches by `run.seed`"
)
