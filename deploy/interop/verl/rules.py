"""Rules of single rows that say more than another name. Pure."""

import math
import re
from pathlib import PurePosixPath
from typing import get_args

from slipstream.deploy.interop.verl.hydra import Value
from slipstream.deploy.interop.verl.rows import (
    Keys,
    Out,
    Rule,
    at_home,
    integer,
    nothing,
    number,
    refused,
)
from slipstream.wire.settings.sections import TrackerName

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
MODEL, OPTIM = "actor_rollout_ref.model", f"{ACTOR}.optim"
CORRECTION = "algorithm.rollout_correction"
MEGATRON = (f"{ACTOR}.megatron", f"{ACTOR}.mindspeed")  # the second takes the first's names
OVERLONG = tuple(
    f"{place}.overlong_buffer{end}"
    for place, end in (
        ("reward_model.reward_kwargs", "_cfg"),
        ("reward.reward_kwargs", "_cfg"),
        ("reward_model", ""),
        ("custom_reward_function", ""),
    )
)
FUNCTION = ("custom_reward_function.path", "reward.custom_reward_function.path")
REWARDS = "slipstream.broker.rewards."
# verl's scores by data_source, and the reward that reads the same answers
DEFAULT_SCORES = {
    "openai/gsm8k": "numeric:score",
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "code:score"),
}
OTHER_SCORE = "math_answer:score"
RATIO_FREE = frozenset({"gpg", "dro"})  # surrogates without a ratio
SEQUENCE_MEAN = "sequence-mean-token-mean"
_OF_SEQUENCES = frozenset({"gspo", "sapo", "geo_mean"})  # whose mean verl takes so, always
REDUCE = {
    "token-mean": "token-mean",
    "seq-mean-token-sum": "sequence-mean-token-sum",
    "seq-mean-token-mean": SEQUENCE_MEAN,
    "seq-mean-token-sum-norm": "sequence-mean-token-sum-norm",
}
_MORE_THAN_ANY_VOCABULARY = 300_000
_MOST_KEPT = 1024  # by default
_LARGEST_NAME = 120  # bytes
_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
SURROGATES = {
    "vanilla": "ppo-clip",
    "clip_cov": "ppo-clip",
    "kl_cov": "ppo-clip",
    "gspo": "gspo",
    "sapo": "sapo",
    "cispo": "cispo",
    "geo_mean": "gmpo",
    "dppo_tv": "dppo-tv",
    "dppo_kl": "dppo-kl",
    "gpg": "policy-gradient",
    "dro": "policy-gradient",
}
ADVANTAGES: dict[str, dict[str, object]] = {
    "gae": {"algo.advantage.name": "gae", "algo.whiten": "batch"},
    "grpo": {"algo.advantage.name": "grpo"},
    "grpo_vectorized": {"algo.advantage.name": "grpo"},
    "grpo_passk": {"algo.advantage.name": "pass-at-k"},
    "rloo": {"algo.advantage.name": "rloo"},
    "rloo_vectorized": {"algo.advantage.name": "rloo"},
    "opo": {"algo.advantage.name": "opo"},
    "gdpo": {"algo.advantage.name": "gdpo"},
    "reinforce_plus_plus": {"algo.advantage.name": "discounted-returns", "algo.whiten": "batch"},
    "reinforce_plus_plus_baseline": {
        "algo.advantage.name": "reinforce++-baseline",
        "algo.whiten": "batch",
    },
    "optimal_token_baseline": {"algo.advantage.name": "optimal-token-baseline"},
}
_DISCOUNTED = frozenset(
    {"gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "optimal_token_baseline"}
)
ESTIMATORS = {
    **dict.fromkeys(("kl", "k1"), "k1"),
    **dict.fromkeys(("mse", "k2"), "k2"),
    **dict.fromkeys(("low_var_kl", "k3"), "low-var"),
    **dict.fromkeys(("low_var_kl+", "k3+"), "k3+"),
    **dict.fromkeys(("kl+", "k1+"), "k1+"),
    "abs": "abs",
    "full": "full",
}
_SHAPES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse-square-root",
    "WSD": "WSD",
}


# ---- what keys say together ----------------------------------------------------


def is_megatron(keys: Keys) -> bool:
    """Return whether verl trains with Megatron, not with FSDP."""
    names = (keys.get("model_engine"), keys.get(f"{ACTOR}.strategy"), keys.get("--config-name"))
    return keys.any_below(f"{ACTOR}.megatron.") or any("megatron" in str(name) for name in names)


def estimator(keys: Keys) -> str:
    """Return verl's name of the advantage."""
    return str(keys.first("algorithm.adv_estimator", default="gae"))


def loss_mode(keys: Keys) -> str:
    """Return verl's name of the surrogate."""
    return str(keys.first(f"{ACTOR}.policy_loss.loss_mode", default="vanilla"))


def context_parallel(keys: Keys) -> int:
    """Return how many GPUs divide one sequence."""
    return keys.integer(
        *(f"{place}.context_parallel_size" for place in MEGATRON),
        f"{ACTOR}.ulysses_sequence_parallel_size",
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
        f"{ACTOR}.veomni.ulysses_parallel_size",
        f"{ACTOR}.automodel_config.cp_size",
        f"{ACTOR}.engine.cp",
        default=1,
    )


def response_tokens(keys: Keys) -> int:
    """Return the longest response."""
    return keys.integer("data.max_response_length", default=512)


def longest(keys: Keys) -> int:
    """Return the longest sequence."""
    return keys.integer("data.max_prompt_length", default=512) + response_tokens(keys)


def total_steps(keys: Keys) -> int:
    """Return the steps of the whole run; 0 is not known."""
    return max(0, keys.integer("trainer.total_training_steps", f"{OPTIM}.total_training_steps"))


def has_overlong(keys: Keys) -> bool:
    """Return whether a soft penalty of length is on."""
    enabled = keys.first(*(f"{place}.enable" for place in OVERLONG), default=True)
    return enabled is not False and keys.number(*(f"{place}.len" for place in OVERLONG)) > 0


def has_function(keys: Keys) -> bool:
    """Return whether there is a reward function of one's own."""
    return bool(keys.first(*FUNCTION))


# ---- data ----------------------------------------------------------------------


def files(one: str, several: str, most: str) -> Rule:
    """Return the rule of one file or a list of them.

    Args:
        one: setting of a single file.
        several: setting of the table of sources.
        most: verl's key of the largest number of rows.
    """

    def rule(value: Value, keys: Keys) -> Out:
        names = [
            at_home(str(name), keys) for name in (value if isinstance(value, list) else [value])
        ]
        most_rows = keys.integer(most, default=-1)
        if len(names) == 1 and most_rows <= 0:
            return Out({one: names[0]})
        settings: dict[str, object] = {}
        for source, name in zip(source_names(names), names, strict=True):
            settings[f"{several}.{source}.file"] = name
            if most_rows > 0:
                settings[f"{several}.{source}.max_rows"] = most_rows
        note = "the name of each source is that of its file, or of its folder"
        return Out(settings, "renamed", note)

    return rule


def most_rows(value: Value, keys: Keys) -> Out:  # noqa: ARG001
    """The first rows of each file, which the row of the files writes."""
    if isinstance(value, int) and value > 0:
        return Out({}, "changed")
    return nothing("all rows, as by default")


def source_names(files: list[str]) -> list[str]:
    """Return a short name for each file, all different."""
    usual = {"train", "test", "val", "valid", "validation", "data"}
    names: list[str] = []
    for file in files:
        path = PurePosixPath(file)
        base = path.parent.name if path.stem in usual and path.parent.name else path.stem
        base = re.sub(r"[^A-Za-z0-9_-]+", "-", base).strip("-") or "source"
        taken = sum(name == base or name.startswith(f"{base}-") for name in names)
        names.append(f"{base}-{taken + 1}" if taken else base)
    return names


def filter_overlong(value: Value, keys: Keys) -> Out:  # noqa: ARG001 as rules are
    """Longer prompts are left out, or data.truncation decides."""
    if value is True:
        return Out(
            {"sampling.overlong_prompts": "drop"},
            "changed",
            "a prompt is measured when it is asked, not before the run",
        )
    return nothing("data.truncation decides")


def truncation(value: Value, keys: Keys) -> Out:
    """What happens to longer prompts, where they are not left out before."""
    if keys.has_true("data.filter_overlong_prompts"):
        return nothing(
            "data.filter_overlong_prompts leaves longer prompts out, so it decides nothing"
        )
    if value == "error":
        return Out({"sampling.overlong_prompts": "error"})
    if value == "left":
        return Out({"sampling.overlong_prompts": "truncate"})
    if value in {"right", "middle"}:
        note = f"{value} keeps the first tokens, or both ends; truncate keeps the last ones"
        return Out({"sampling.overlong_prompts": "truncate"}, "changed", note)
    return refused(f"{value!r} is none of error, left, right, middle")


# ---- model and optimizer -------------------------------------------------------


def model(value: Value, keys: Keys) -> Out:
    """The policy's folder."""
    return Out({"run.model": at_home(str(value), keys)})


def minibatches(value: Value, keys: Keys) -> Out:
    """How many minibatches, not how large they are."""
    size = keys.integer("data.train_batch_size", default=1024)
    if not isinstance(value, int) or value < 1:
        return refused(f"expected a whole number of prompts, got {value!r}")
    count = max(1, size // value)
    note = f"how many, not how large: {size} / {value} prompts"
    if size % value:
        note += f", rounded: verl refuses or drops the remainder of {size % value}"
    return Out({"learner.minibatches": count}, "changed", note)


def microbatch_tokens(value: Value, keys: Keys) -> Out:
    """Tokens of a microbatch, of all ranks that divide it."""
    if keys.get(f"{ACTOR}.use_dynamic_bsz") is not True:
        return nothing("it counts with use_dynamic_bsz=True alone")
    if not isinstance(value, int) or value < 1:
        return refused(f"expected a whole number of tokens, got {value!r}")
    parts = context_parallel(keys)
    tokens = max(value * parts, longest(keys))
    note = f"times the {parts} GPUs that divide a sequence" if parts > 1 else ""
    if tokens != value * parts:
        note = f"raised to the longest sequence, {tokens} tokens"
    return Out({"learner.max_tokens_per_microbatch": tokens}, "changed" if note else None, note)


def betas(value: Value, keys: Keys) -> Out:  # noqa: ARG001
    """Adam's decays."""
    if not isinstance(value, list) or len(value) != 2:
        return refused(f"expected two numbers, got {value!r}")
    first, second = value
    if not isinstance(first, int | float) or not isinstance(second, int | float):
        return refused(f"expected two numbers, got {value!r}")
    return Out({"learner.adam_beta1": float(first), "learner.adam_beta2": float(second)})


def warmup_steps(value: Value, keys: Keys) -> Out:  # noqa: ARG001
    """Steps of the warm-up; -1 and 0 are none, or those of the ratio."""
    if isinstance(value, int) and value > 0:
        return Out({"learner.lr_warmup_steps": value})
    return nothing("no warm-up, or that of lr_warmup_steps_ratio")


def warmup_ratio(value: Value, keys: Keys) -> Out:
    """A share of the steps, where the number of steps is known."""
    if (
        not isinstance(value, int | float)
        or value <= 0
        or keys.integer(f"{OPTIM}.lr_warmup_steps") > 0
    ):
        return nothing("no warm-up, or that of lr_warmup_steps")
    steps = total_steps(keys)
    if steps:
        note = f"in steps: {value:g} of {steps}"
        return Out({"learner.lr_warmup_steps": round(value * steps)}, "changed", note)
    return Out(
        {},
        "changed",
        "in steps, and the number of all steps is not known before the data is read",
        f"learner.lr_warmup_steps: {value:g} of the steps that run.epochs will take",
    )


def schedule(value: Value, keys: Keys) -> Out:
    """Shape of the learning rate."""
    name = _SHAPES.get(str(value))
    if name is None:
        return refused(f"{value!r} has no counterpart; known are {', '.join(_SHAPES)}")
    if name == "constant":
        return Out({"learner.lr_schedule": name})
    steps = total_steps(keys) or keys.integer(f"{OPTIM}.lr_decay_steps")
    todo = "" if steps else "learner.lr_decay_steps: the steps that run.epochs will take"
    return Out({"learner.lr_schedule": name}, todo=todo)


def shape(keys: Keys) -> str:
    """Return verl's name of the schedule."""
    names = ("lr_scheduler_type", "warmup_style", "lr_decay_style")
    return str(keys.first(*(f"{OPTIM}.{name}" for name in names), default="constant"))


def lowest_rate(is_ratio: bool) -> Rule:
    """Return the rule of the learning rate at the end, as a share of the highest or as it is."""

    def rule(value: Value, keys: Keys) -> Out:
        if not isinstance(value, int | float) or value <= 0:
            return nothing("0 is what Slipstream does without the setting")
        if shape(keys) == "constant":
            return nothing("a constant learning rate has no end")
        if not is_ratio:
            return Out({"learner.lr_min": float(value)})
        lr = keys.number(f"{OPTIM}.lr", default=1e-6)
        return Out({"learner.lr_min": value * lr}, "changed", f"{value:g} of learner.lr = {lr:g}")

    return rule


def of_schedule(setting: str, needed: str = "") -> Rule:
    """Return the rule of a number that a schedule that falls has, or the one of this name."""

    def rule(value: Value, keys: Keys) -> Out:
        if not isinstance(value, int) or value < 1:
            return nothing("not set")
        if shape(keys) == "constant" or (needed and shape(keys) != needed):
            return nothing(f"lr_scheduler_type is {shape(keys)}")
        return Out({setting: value})

    return rule


def wsd_decay(value: Value, keys: Keys) -> Out:
    """How WSD falls."""
    if shape(keys) != "WSD":
        return nothing(f"lr_scheduler_type is {shape(keys)}")
    if value not in {"linear", "cosine", "exponential", "minus_sqrt"}:
        return refused(f"{value!r} has no counterpart")
    return Out({"learner.wsd_decay": value})


def offload(what: str) -> Rule:
    """Return the rule of one thing that is on the host in between."""

    def rule(value: Value, keys: Keys) -> Out:
        if value is not True:
            return nothing("off, as by default")
        is_of_ref = ".ref." in keys.key
        if is_of_ref and not keys.has_true(f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"):
            return nothing("no reference policy is loaded without a KL")
        if what == "optimizer" and keys.has_true(
            f"{OPTIM}.override_optimizer_config.optimizer_cpu_offload"
        ):
            return nothing("optimizer_cpu_offload keeps the optimizer on the host for good")
        return Out({"learner.offload": [what]})

    return rule


def host_optimizer(value: Value, keys: Keys) -> Out:
    """Share of the optimizer that stays on the host."""
    prefix = f"{OPTIM}.override_optimizer_config."
    if not keys.has_true(f"{prefix}optimizer_cpu_offload"):
        return nothing("it counts with optimizer_cpu_offload=True alone")
    if adapters(keys):
        return nothing("an optimizer of adapters is small")
    share = value if isinstance(value, int | float) and not isinstance(value, bool) else 1.0
    fraction = keys.number(f"{prefix}optimizer_offload_fraction", default=float(share))
    return Out({"learner.optimizer_offload_fraction": min(1.0, max(0.0, float(fraction)))})


def moments(value: Value, keys: Keys) -> Out:
    """Type of the optimizer's moments."""
    second = keys.get(f"{OPTIM}.betas")
    decay = second[1] if isinstance(second, list) and len(second) == 2 else 0.999
    if "bf" not in str(value) and "bfloat16" not in str(value):
        return nothing("float32, as by default")
    if not isinstance(decay, int | float) or decay > 0.99:
        return nothing(
            f"bfloat16 cannot hold the changes of a second moment with a decay of {decay}"
        )
    return Out({"learner.moments_dtype": "bfloat16"})


def recompute(value: Value, keys: Keys) -> Out:
    """Activations of whole layers are computed again; with Megatron other keys decide."""
    if is_megatron(keys):
        return nothing("with Megatron override_transformer_config.recompute_granularity decides")
    if value is True:
        return Out({"learner.recompute": "full"})
    return nothing("off, as by default")


def recompute_layers(value: Value, keys: Keys) -> Out:
    """Layers that are computed again, if not all of them are."""
    prefix = keys.key.rpartition(".")[0]
    if keys.get(f"{prefix}.recompute_method") != "block" or not isinstance(value, int):
        return nothing("uniform computes all layers again, as learner.recompute_layers = 0 does")
    return Out({"learner.recompute_layers": value})


def recompute_modules(value: Value, keys: Keys) -> Out:
    """Modules that "selective" computes again."""
    prefix = keys.key.rpartition(".")[0]
    if keys.get(f"{prefix}.recompute_granularity") != "selective":
        return nothing("it counts with recompute_granularity=selective alone")
    known = (
        [name for name in value if name in {"core_attn", "mlp", "moe"}]
        if isinstance(value, list)
        else []
    )
    if not known or not isinstance(value, list):
        return refused(f"none of {value!r} is core_attn, mlp or moe")
    left = [str(name) for name in value if name not in known]
    note = f"without {', '.join(left)}: there are core_attn, mlp and moe" if left else ""
    return Out({"learner.recompute_modules": known}, "changed" if left else None, note)


def interleaved(value: Value, keys: Keys) -> Out:
    """Chunks of each pipeline stage."""
    stages = keys.integer(
        *(f"{place}.pipeline_model_parallel_size" for place in MEGATRON), default=1
    )
    if not isinstance(value, int) or value < 2 or stages < 2:
        return nothing("there is nothing to interleave")
    return Out({"learner.interleaved_chunks": value})


def expert_tensor(value: Value, keys: Keys) -> Out:
    """Ranks of one expert; Megatron takes tensor parallelism's where it is not given."""
    experts = keys.integer(
        *(f"{place}.expert_model_parallel_size" for place in MEGATRON), default=1
    )
    if value == "as tensor":
        value = keys.integer(
            *(f"{place}.tensor_model_parallel_size" for place in MEGATRON), default=1
        )
        if experts == 1 or value == 1:
            return nothing("")
    if not isinstance(value, int) or value < 1:
        return refused(f"expected a whole number, got {value!r}")
    return Out({"learner.expert_tensor_parallel": value})


# ---- low-rank adapters ---------------------------------------------------------


def adapters(keys: Keys) -> int:
    """Return the rank of the adapters, 0 without any."""
    return keys.integer(f"{MODEL}.lora_rank") or keys.integer(f"{MODEL}.lora.rank")


def of_adapters(setting: str) -> Rule:
    """Return the rule of a setting that adapters alone have."""

    def rule(value: Value, keys: Keys) -> Out:
        if not adapters(keys):
            return nothing("no adapters are trained (lora_rank is 0)")
        if keys.key.endswith(".lora_alpha") and not keys.integer(f"{MODEL}.lora_rank"):
            return nothing("lora.alpha is that of lora.rank")
        if setting == "lora.alpha":
            return number(setting)(value, keys)
        if setting == "lora.rank" and not value:
            return nothing("the other rank is given")
        return Out({setting: value})

    return rule


def adapter_layers(value: Value, keys: Keys) -> Out:
    """Layers with adapters."""
    if not adapters(keys) or value == "all-linear":
        return nothing("all linear layers, as by default")
    if not isinstance(value, list):
        return refused(f"expected all-linear or a list of layers, got {value!r}")
    layers = [layer for name in value for layer in _LAYERS.get(str(name), (str(name),))]
    return Out({"lora.targets": layers})


def merged(value: Value, keys: Keys) -> Out:
    """Whether engines get adapters or whole weights."""
    if not adapters(keys):
        return nothing("no adapters are trained (lora_rank is 0)")
    return Out({"lora.publish": "merged" if value is True else "named"})


# ---- algorithm -----------------------------------------------------------------


def advantage(value: Value, keys: Keys) -> Out:  # noqa: ARG001
    """The advantage, part by part: presets of the same names bring other things along."""
    if value == "remax":
        return refused("no role generates greedy answers for training")
    settings = ADVANTAGES.get(str(value))
    if settings is None:
        return refused(f"{value!r} has no counterpart; known are {', '.join(ADVANTAGES)}")
    note = "as parts: a preset of this name would bring the paper's KL and reduction along"
    todo = (
        "algo.advantage.weights: the parts of the reward and their weights"
        if value == "gdpo"
        else ""
    )
    return Out(dict(settings), "changed", note, todo)


def discount(value: Value, keys: Keys) -> Out:
    """Gamma of the estimators that discount."""
    if estimator(keys) not in _DISCOUNTED:
        return nothing(f"{estimator(keys)} discounts nothing")
    return number("algo.advantage.discount")(value, keys)


def of_critic(setting: str) -> Rule:
    """Return the rule of a number that only gae reads."""

    def rule(value: Value, keys: Keys) -> Out:
        if estimator(keys) != "gae":
            return nothing(f"{estimator(keys)} has no critic")
        if setting.endswith("_steps"):
            return Out({setting: value}) if value else nothing("0, as by default")
        return number(setting)(value, keys)

    return rule


def by_std(value: Value, keys: Keys) -> Out:
    """Whether GRPO divides by the deviation."""
    if not estimator(keys).startswith("grpo"):
        return nothing(f"{estimator(keys)} does not")
    return Out({"algo.advantage.divide_by_std": value})


def kl_loss(value: Value, keys: Keys) -> Out:
    """A KL in the loss."""
    return _kl(
        value,
        keys,
        place="loss",
        coefficient=keys.number(f"{ACTOR}.kl_loss_coef", default=0.001),
        name=str(keys.first(f"{ACTOR}.kl_loss_type", default="low_var_kl")),
    )


def kl_reward(value: Value, keys: Keys) -> Out:
    """A KL in the reward."""
    if value is True and keys.has_true(f"{ACTOR}.use_kl_loss"):
        return refused("there is one KL: in the loss (use_kl_loss) or in the reward")
    return _kl(
        value,
        keys,
        place="reward",
        coefficient=keys.number("algorithm.kl_ctrl.kl_coef", default=0.001),
        name=str(keys.first("algorithm.kl_penalty", default="kl")),
    )


def _kl(value: Value, keys: Keys, *, place: str, coefficient: float, name: str) -> Out:  # noqa: ARG001
    if value is not True:
        return nothing("no KL, as by default")
    if coefficient == 0:
        return nothing("its coefficient is 0, and no reference policy is loaded")
    if name not in ESTIMATORS:
        return refused(f"{name!r} has no counterpart; known are {', '.join(ESTIMATORS)}")
    settings: dict[str, object] = {
        "algo.kl.place": place,
        "algo.kl.coefficient": float(coefficient),
        "algo.kl.name": ESTIMATORS[name],
    }
    return Out(settings)


def part_of_kl(switch: str, setting: str) -> Rule:
    """Return the rule of a key that the key which turns the KL on has written already."""

    def rule(value: Value, keys: Keys) -> Out:
        if not keys.has_true(switch):
            return nothing(f"it counts with {switch}=True alone")
        if setting == "algo.kl.name" and str(value) not in ESTIMATORS:
            return refused(f"{value!r} has no counterpart; known are {', '.join(ESTIMATORS)}")
        if setting == "algo.kl.coefficient" and not value:
            return nothing("0 is no KL")
        return Out({setting: ESTIMATORS[str(value)] if setting == "algo.kl.name" else value})

    return rule


def reference(value: Value, keys: Keys) -> Out:
    """The reference policy's folder."""
    if not keys.has_true(f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"):
        return nothing("no KL, no reference policy")
    return Out({"algo.kl.reference": at_home(str(value), keys)})


def renewed(value: Value, keys: Keys) -> Out:
    """How often the reference policy becomes the policy."""
    if not keys.has_true(f"{REF}.sync_ref_model") or not keys.has_true(f"{ACTOR}.use_kl_loss"):
        return nothing("it counts with sync_ref_model=True and a KL")
    if adapters(keys):
        return nothing("with adapters the reference policy is the model without them")
    return integer("algo.kl.renew_every")(value, keys)


def controller(value: Value, keys: Keys) -> Out:
    """The adaptive controller of the KL that verl has."""
    if value == "adaptive" and keys.has_true("algorithm.use_kl_in_reward"):
        return Out({}, "changed", "the coefficient is constant: nothing adapts it")
    return nothing("the coefficient is constant")


def surrogate(value: Value, keys: Keys) -> Out:
    """The function to differentiate."""
    name = SURROGATES.get(str(value))
    if name is None:
        return refused(f"{value!r} has no counterpart; known are {', '.join(SURROGATES)}")
    settings: dict[str, object] = {"algo.surrogate.name": name}
    if value in _OF_SEQUENCES:
        settings["algo.reduce.name"] = SEQUENCE_MEAN
    loss = f"{ACTOR}.policy_loss."
    if value == "clip_cov":
        settings["algo.correction.clip-cov.share"] = keys.number(
            f"{loss}clip_cov_ratio", default=2e-4
        )
        settings["algo.correction.clip-cov.low"] = keys.number(f"{loss}clip_cov_lb", default=1.0)
        settings["algo.correction.clip-cov.high"] = keys.number(f"{loss}clip_cov_ub", default=5.0)
    if value == "kl_cov":
        settings["algo.correction.kl-cov.share"] = keys.number(f"{loss}kl_cov_ratio", default=2e-4)
        settings["algo.correction.kl-cov.coefficient"] = keys.number(
            f"{loss}ppo_kl_coef", default=0.1
        )
    if value == "dro":
        beta = keys.number(f"{loss}dro_beta")
        if beta <= 0:
            return refused("dro needs policy_loss.dro_beta above 0")
        settings |= {"algo.kl.coefficient": beta, "algo.kl.name": "k2", "algo.kl.to": "behavior"}
    return Out(settings)


def clip(bound: str) -> Rule:
    """Return the rule of one bound of the ratio."""

    def rule(value: Value, keys: Keys) -> Out:
        mode = loss_mode(keys)
        if mode in RATIO_FREE or mode == "sapo":
            return nothing(f"{mode} clips nothing")
        if keys.key == f"{ACTOR}.clip_ratio" and f"{ACTOR}.clip_ratio_{bound}" in keys:
            return nothing(f"clip_ratio_{bound} is given")
        return number(f"algo.surrogate.clip_{bound}")(value, keys)

    return rule


def clip_both(value: Value, keys: Keys) -> Out:
    """Both bounds, where they are not given one by one."""
    settings: dict[str, object] = {}
    for bound in ("low", "high"):
        settings |= clip(bound)(value, keys).settings
    return Out(settings) if settings else nothing("clip_ratio_low and clip_ratio_high are given")


def dual_clip(value: Value, keys: Keys) -> Out:
    """The bound of the loss where the advantage is negative."""
    if loss_mode(keys) not in {"vanilla", "clip_cov", "kl_cov"}:
        return nothing(f"{loss_mode(keys)} has no such bound")
    if not isinstance(value, int | float) or value <= 1:
        return refused(f"expected a number above 1, got {value!r}")
    return Out({"algo.surrogate.clip_dual": float(value)})


def temperature_of_sapo(sign: str) -> Rule:
    """Return the rule of one of SAPO's temperatures."""

    def rule(value: Value, keys: Keys) -> Out:
        if loss_mode(keys) != "sapo":
            return nothing("it counts with loss_mode=sapo alone")
        return number(f"algo.surrogate.tau_{sign}")(value, keys)

    return rule


def scale_factor(value: Value, keys: Keys) -> Out:
    """The constant of Dr. GRPO's mean."""
    if keys.get(f"{ACTOR}.loss_agg_mode") != "seq-mean-token-sum-norm":
        return nothing("it counts with loss_agg_mode=seq-mean-token-sum-norm alone")
    return number("algo.reduce.length")(value, keys)


def reduction(value: Value, keys: Keys) -> Out:
    """How losses of tokens become one number."""
    if loss_mode(keys) in _OF_SEQUENCES:
        return nothing(f"{loss_mode(keys)} takes {SEQUENCE_MEAN}, whatever this says")
    if str(value) not in REDUCE:
        return refused(f"{value!r} has no counterpart; known are {', '.join(REDUCE)}")
    return Out({"algo.reduce.name": REDUCE[str(value)]})


def token_level(value: Value, keys: Keys) -> Out:
    """The old name of two of the means."""
    if f"{ACTOR}.loss_agg_mode" in keys or loss_mode(keys) in _OF_SEQUENCES:
        return nothing("loss_agg_mode or loss_mode decides")
    return Out({"algo.reduce.name": "token-mean" if value is True else SEQUENCE_MEAN})


def anchor(value: Value, keys: Keys) -> Out:
    """The policy below the line of the ratio."""
    if loss_mode(keys) in RATIO_FREE:
        return nothing(f"{loss_mode(keys)} has no ratio")
    if value is True:
        return Out({"algo.anchor": "behavior"})
    return Out(
        {"algo.anchor": "proximal"},
        "changed",
        "log-probabilities of the old policy are computed again when a step begins, as in verl; "
        '"behavior" takes those of the engine and saves a pass',
    )


def importance(value: Value, keys: Keys) -> Out:
    """Truncated importance sampling."""
    if keys.has_true(f"{CORRECTION}.bypass_mode"):
        return nothing("in bypass mode the ratio itself corrects")
    if value not in {"token", "sequence"}:
        return refused(f"{value!r} is none of token, sequence")
    return Out({"algo.correction.importance-sampling.level": value})


def importance_bounds(value: Value, keys: Keys) -> Out:
    """Bounds of the weights."""
    chosen = keys.first(f"{CORRECTION}.rollout_is", "algorithm.rollout_is")
    if not chosen or keys.has_true(f"{CORRECTION}.bypass_mode"):
        return nothing("it counts with rollout_is alone")
    bounds = _bounds(value)
    if bounds is None:
        return refused(f"expected a number or LOW_HIGH, got {value!r}")
    low, high = bounds
    settings: dict[str, object] = {"algo.correction.importance-sampling.high": high}
    if low is not None:
        settings["algo.correction.importance-sampling.low"] = low
    return Out(settings)


def normalized(value: Value, keys: Keys) -> Out:
    """Weights of mean 1."""
    if value is not True or not keys.get(f"{CORRECTION}.rollout_is"):
        return nothing("off, as by default")
    return Out({"algo.correction.importance-sampling.normalize": True})


def ratio_cap(value: Value, keys: Keys) -> Out:  # noqa: ARG001
    """The old name of importance sampling by tokens."""
    if not isinstance(value, int | float) or value <= 0:
        return nothing("off, as by default")
    return Out(
        {
            "algo.correction.importance-sampling.level": "token",
            "algo.correction.importance-sampling.high": float(value),
        }
    )


def rejection(value: Value, keys: Keys) -> Out:
    """Rejection sampling, with verl's names of measure and level."""
    name = str(value)
    threshold = keys.first(
        f"{CORRECTION}.rollout_rs_threshold", f"{CORRECTION}.rollout_is_threshold"
    )
    bounds = _bounds(threshold if threshold is not None else 2.0)
    if bounds is None:
        return refused(f"rollout_rs_threshold: expected a number or LOW_HIGH, got {threshold!r}")
    low, high = bounds
    lower = keys.get(f"{CORRECTION}.rollout_rs_threshold_lower")
    low = float(lower) if isinstance(lower, int | float) else low
    where = "algo.correction.rejection."
    if name in {"token", "sequence", "geometric"}:  # of the ratio pi / mu
        found: dict[str, object] = {"measure": "ratio", "level": name, "high": high}
        found["low"] = low if low is not None else 1 / high
    elif match := re.fullmatch(r"(token|seq_sum|seq_mean|seq_max)_(k[123])", name):
        levels = {
            "token": "token",
            "seq_sum": "sequence",
            "seq_mean": "sequence-mean",
            "seq_max": "sequence-max",
        }
        found = {"measure": match[2], "level": levels[match[1]], "high": high}
        least = low if low is not None else 1 / high
        if match[2] == "k1" and match[1] in {"seq_sum", "seq_mean"}:
            level = "sequence" if match[1] == "seq_sum" else "geometric"
            found = {"measure": "ratio", "level": level, "high": 1 / least, "low": 1 / high}
        elif match[2] == "k1":
            found |= {"high": math.log(high), "low": math.log(least)}
    else:
        return refused(f"{value!r} has no counterpart, such as token_k1 or seq_mean_k3")
    settings = {f"{where}{key}": one for key, one in found.items()}
    return Out({**settings, "algo.reduce.denominator": "kept"})


def _bounds(value: Value) -> tuple[float | None, float] | None:
    """Return the lower (if given) and the upper bound."""
    parts = str(value).split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        return None
    if not 1 <= len(numbers) <= 2 or min(numbers) <= 0:
        return None
    return (numbers[0] if len(numbers) == 2 else None), numbers[-1]


def resampled(value: Value, keys: Keys) -> Out:
    """PF-PPO."""
    if value is not True:
        return nothing("off, as by default")
    method = str(keys.first("algorithm.pf_ppo.reweight_method", default="pow")).replace("_", "-")
    if method not in {"pow", "max-min", "max-random"}:
        return refused(f"pf_ppo.reweight_method = {method!r} has no counterpart")
    settings: dict[str, object] = {"algo.data.resample": method}
    if method == "pow":
        settings["algo.data.resample_power"] = keys.number(
            "algorithm.pf_ppo.weight_pow", default=2.0
        )
    return Out(settings)


# ---- rewards -------------------------------------------------------------------


def reward_function(value: Value, keys: Keys) -> Out:
    """A function of one's own; without it verl's scores by data_source."""
    if value:
        name = keys.first("custom_reward_function.name", "reward.custom_reward_function.name")
        file = at_home(str(value), keys)
        return Out({"reward.function": f"{file}:{name or 'compute_score'}"})
    settings: dict[str, object] = {"reward.function": REWARDS + OTHER_SCORE}
    for source, function in DEFAULT_SCORES.items():
        settings[f"reward.sources.{source}.function"] = REWARDS + function
    return Out(
        settings,
        "changed",
        "verl chooses a score by data_source. Here openai/gsm8k is compared as a number, code is "
        "run in a sandbox, and everything else is compared as mathematics (math-verify)",
        "reward: slipstream reward test run.toml shows what the functions say to your rows",
    )


def reward_option(value: Value, keys: Keys) -> Out:
    """A keyword argument of the function."""
    name = keys.key.rpartition("reward_kwargs.")[2]
    if not has_function(keys):
        return nothing("an argument of verl's own score, and no function of one's own is named")
    if "." in name:
        return refused("an argument that is a table: write it into [reward.options]")
    return Out({f"reward.options.{name}": value})


def overlong_length(value: Value, keys: Keys) -> Out:
    """DAPO's buffer, as a share of the longest response."""
    if not has_overlong(keys):
        return nothing("the penalty is off")
    share = float(value) / response_tokens(keys) if isinstance(value, int | float) else 2.0
    if share > 1:
        return refused(f"{value!r} is longer than data.max_response_length")
    note = "a share of sampling.max_response_tokens; the penalty stops growing at the limit"
    return Out({"algo.data.overlong_buffer": share}, "changed", note)


def overlong_penalty(value: Value, keys: Keys) -> Out:
    """DAPO's penalty at the limit."""
    if not has_overlong(keys):
        return nothing("the penalty is off")
    return number("algo.data.overlong_penalty")(value, keys)


def reward_manager(value: Value, keys: Keys) -> Out:  # noqa: ARG001
    """How verl calls the function."""
    if value in {"batch", "batched"}:
        return Out(
            {},
            "changed",
            "verl's signature of lists is not called; a batch is asked for by the function itself",
            'reward.function: decorate it with @reward(takes="batch") (docs/rewards.md)',
        )
    return nothing("reward workers call the function in parallel, whatever its manager was")


def reward_model(value: Value, keys: Keys) -> Out:  # noqa: ARG001
    """A model that scores."""
    if value is not True:
        return nothing("off, as by default")
    return Out(
        {},
        "changed",
        "no role holds a reward model: a reward function asks a server that does",
        "reward.function: a function that asks your reward model's server, or "
        "slipstream.broker.rewards.judge:LlmJudge (docs/rewards.md)",
    )


# ---- sampling and evaluation ---------------------------------------------------


def top_k(setting: str) -> Rule:
    """Return the rule of top-k: any number that is not below the vocabulary is all tokens."""

    def rule(value: Value, keys: Keys) -> Out:
        if not isinstance(value, int) or isinstance(value, bool):
            return refused(f"expected a whole number, got {value!r}")
        if value in {-1, 0}:
            return Out({setting: -1}) if value else Out({setting: -1}, "changed", "0 is written -1")
        vocabulary = keys.vocab_size or _MORE_THAN_ANY_VOCABULARY
        if value >= vocabulary:
            return Out({setting: -1}, "changed", f"{value} is the whole vocabulary, written -1")
        if setting == "eval.top_k":
            return Out({setting: value})
        if value < 2:
            return refused("a token without an alternative has no gradient")
        return Out({setting: value, "sampling.kept_tokens": "drop"}, "changed", _KEPT)

    return rule


_KEPT = (
    "log-probabilities are over the whole vocabulary, as verl's are; "
    'sampling.kept_tokens = "replay" takes the tokens that were left, on both sides'
)


def top_p(value: Value, keys: Keys) -> Out:  # noqa: ARG001
    """The share of probability that is sampled from."""
    if not isinstance(value, int | float) or not 0 < value <= 1:
        return refused(f"expected a number above 0 and at most 1, got {value!r}")
    if value == 1:
        return Out({"sampling.top_p": 1.0})
    return Out({"sampling.top_p": float(value), "sampling.kept_tokens": "drop"}, "changed", _KEPT)


def temperature(value: Value, keys: Keys) -> Out:  # noqa: ARG001
    """The temperature of training, which cannot be 0."""
    if not isinstance(value, int | float) or value <= 0:
        return refused(f"expected a number above 0, got {value!r}")
    return Out({"sampling.temperature": float(value)})


def eval_temperature(value: Value, keys: Keys) -> Out:
    """The temperature of evaluation, unless it is greedy."""
    if keys.get(f"{ROLLOUT}.val_kwargs.do_sample") is False:
        return nothing("val_kwargs.do_sample=False is greedy")
    return number("eval.temperature")(value, keys)


def eval_samples(value: Value, keys: Keys) -> Out:
    """Answers per held-out problem."""
    is_greedy = keys.get(f"{ROLLOUT}.val_kwargs.do_sample") is False or not keys.number(
        f"{ROLLOUT}.val_kwargs.temperature"
    )
    if not isinstance(value, int) or value < 1:
        return refused(f"expected a whole number, got {value!r}")
    if is_greedy and value > 1:
        return Out({"eval.samples": 1}, "changed", f"{value} greedy answers are all the same")
    return Out({"eval.samples": value})


def memory_share(value: Value, keys: Keys) -> Out:  # noqa: ARG001
    """The engine's share of its GPU."""
    if not isinstance(value, int | float) or not 0 < value < 1:
        return refused(f"expected a share of 1, got {value!r}")
    if value < 0.7:
        return nothing(
            f"{value:g} leaves room for verl's learner; a generator has its GPU to itself, and "
            "SGLang chooses (generators.sglang.mem_fraction_static)"
        )
    return Out({"generators.sglang.mem_fraction_static": float(value)})


def flag(name: str, *, when: bool) -> Rule:
    """Return the rule of a flag of SGLang's, which can only be switched on."""

    def rule(value: Value, keys: Keys) -> Out:  # noqa: ARG001
        if value is not when:
            return nothing("as by default")
        return Out({f"generators.sglang.{name}": True})

    return rule


def sglang_option(value: Value, keys: Keys) -> Out:
    """An option of SGLang, as it is."""
    name = keys.key.rpartition("engine_kwargs.sglang.")[2].replace("-", "_")
    if "." in name or isinstance(value, dict):
        return refused("an option that is a table: write it into [generators.sglang]")
    if value is False:
        return nothing("SGLang's flags can only be switched on")
    return Out({f"generators.sglang.{name}": value})


def turns(value: Value, keys: Keys) -> Out:  # noqa: ARG001
    """Whether a policy acts over several turns."""
    if value is not True:
        return nothing("off: a prompt is answered in one turn")
    return Out(
        {},
        "changed",
        "tools and interactions are a class, not a YAML file",
        "environment.function: FILE.py:CLASS with your tools as typed functions "
        "(docs/environments.md)",
    )


def of_turns(setting: str) -> Rule:
    """Return the rule of a number that counts over several turns."""

    def rule(value: Value, keys: Keys) -> Out:
        if not keys.has_true(f"{ROLLOUT}.multi_turn.enable"):
            return nothing("it counts with multi_turn.enable=True alone")
        if not isinstance(value, int) or value < 1:
            return nothing("not set")
        return Out({setting: value})

    return rule


def tool_format(value: Value, keys: Keys) -> Out:
    """How a policy writes its calls of tools."""
    if not keys.has_true(f"{ROLLOUT}.multi_turn.enable"):
        return nothing("it counts with multi_turn.enable=True alone")
    names = {"hermes": "qwen25", "qwen3_coder": "qwen3_coder", "gpt-oss": "gpt-oss"}
    return Out(
        {"environment.tool_call_parser": names.get(str(value), str(value))},
        "changed",
        "SGLang's name",
    )


def left_to_write(what: str, todo: str) -> Rule:
    """Return the rule of code of one's own that has another form here."""

    def rule(value: Value, keys: Keys) -> Out:  # noqa: ARG001
        if not value:
            return nothing("not set")
        return Out({}, "changed", what, todo)

    return rule


# ---- the run -------------------------------------------------------------------


def only(value: Value, expected: Value, why: str) -> Out:
    """Return nothing for the one value that Slipstream has, else a refusal."""
    return nothing(why) if value == expected else refused(f"{value!r}: {why}")


def just(expected: Value, why: str) -> Rule:
    """Return the rule of a key that has one value here, and needs no setting."""

    def rule(value: Value, keys: Keys) -> Out:  # noqa: ARG001
        return only(value, expected, why)

    return rule


def decided_by(key: str) -> Rule:
    """Return the rule of a key that another one has written already, if it counts."""

    def rule(value: Value, keys: Keys) -> Out:  # noqa: ARG001
        return nothing(f"written with {key}, if that is on")

    return rule


def named(table: str) -> Rule:
    """Return the rule of a name in a table, as it is."""

    def rule(value: Value, keys: Keys) -> Out:
        return Out({f"{table}.{keys.key.rpartition('.')[2]}": value})

    return rule


def epochs_of_ppo(value: Value, keys: Keys) -> Out:  # noqa: ARG001
    """Passes over the same data."""
    return only(value, 1, "every batch is trained once")


def trackers(value: Value, keys: Keys) -> Out:  # noqa: ARG001
    """Where the curves go."""
    names = [str(one) for one in (value if isinstance(value, list) else [value])]
    known = [name for name in names if name in get_args(TrackerName)]
    others = [name for name in names if name not in {*known, "console", "file"}]
    notes = []
    if "console" in names:
        notes.append("the console is always written to")
    if "file" in names:
        notes.append("a run's figures are in its folder anyway")
    if others:
        notes.append(f"there is no {', '.join(others)}")
    return Out({"logging.trackers": known}, "changed" if notes else None, "; ".join(notes))


def run_name(value: Value, keys: Keys) -> Out:  # noqa: ARG001
    """The run's name, which is a folder's."""
    name = re.sub(r"[^\w.+=@ -]+", "-", str(value)).strip("-. ")
    name = name.encode()[:_LARGEST_NAME].decode("utf-8", "ignore") or "run"
    if name == value:
        return Out({"run.name": name})
    return Out({"run.name": name}, "changed", "it is the name of a folder")


def test_every(value: Value, keys: Keys) -> Out:  # noqa: ARG001
    """How often to evaluate; -1 is never, at the end neither."""
    if not isinstance(value, int):
        return refused(f"expected a whole number, got {value!r}")
    if value > 0:
        return Out({"eval.every_steps": value})
    note = f"{value} is written 0, and nothing is evaluated at the end either"
    return Out({"eval.every_steps": 0, "eval.at_end": False}, "changed", note)


def save_every(value: Value, keys: Keys) -> Out:  # noqa: ARG001
    """How often to save; -1 is never, but at the end."""
    if not isinstance(value, int):
        return refused(f"expected a whole number, got {value!r}")
    if value > 0:
        return Out({"checkpoint.every_steps": value})
    note = (
        f"{value} is written 0; a checkpoint is written at the end nevertheless (checkpoint.at_end)"
    )
    return Out({"checkpoint.every_steps": 0}, "changed", note)


def kept_checkpoints(value: Value, keys: Keys) -> Out:  # noqa: ARG001
    """How many checkpoints are kept; verl keeps all if this is not set."""
    if isinstance(value, int) and value > 0:
        return Out({"checkpoint.keep_last": value})
    return Out(
        {}, "changed", "verl keeps all checkpoints, Slipstream the newest checkpoint.keep_last = 2"
    )


def hosts(value: Value, keys: Keys) -> Out:  # noqa: ARG001
    """Hosts of the run."""
    if value == 1:
        return nothing("one host, as by default")
    return Out(
        {},
        "changed",
        "hosts are named, not counted, and learner and generators have GPUs of their own",
        f"deploy.hosts: the names of your {value} hosts; or --on ray, or slipstream render slurm "
        "(docs/clusters.md)",
    )


def resumes(value: Value, keys: Keys) -> Out:  # noqa: ARG001
    """Whether to go on with an earlier run, which is an argument here."""
    if value == "disable":
        return nothing("a new run is started unless --resume is given")
    if value == "auto":
        return nothing("an argument: slipstream run --resume auto")
    return nothing(
        "verl's checkpoints are not read: export them as a Hugging Face folder (run.model)"
    )


def profiled(value: Value, keys: Keys) -> Out:  # noqa: ARG001
    """Steps of which a trace is written."""
    steps = (
        [one for one in value if isinstance(one, int) and one >= 1]
        if isinstance(value, list)
        else []
    )
    if not steps:
        return nothing("no step is traced")
    note = "first and last step, and torch's profiler, whichever tool verl took"
    return Out({"profile.steps": [min(steps), max(steps)]}, "changed", note)


def filter_groups(value: Value, keys: Keys) -> Out:
    """Whether groups of equal rewards are left out."""
    if value is True and keys.integer(f"{ROLLOUT}.n", default=1) < 2:
        return refused("a group of one has no other reward to differ from (rollout.n)")
    return Out({"broker.drop_zero_variance": value})


def number_type(setting: str) -> Rule:
    """Return the rule of a type of weights."""

    def rule(value: Value, keys: Keys) -> Out:  # noqa: ARG001
        if str(value) in {"bfloat16", "bf16", "auto"}:
            return Out({setting: "bfloat16"})
        if str(value) in {"float32", "fp32"}:
            return Out({setting: "float32"})
        return Out({setting: "bfloat16"}, "changed", f"there is no {value}: bfloat16 or float32")

    return rule


def replay(value: Value, keys: Keys) -> Out:  # noqa: ARG001
    """Which experts the learner chooses again."""
    if isinstance(value, bool):
        return Out({"run.routing_replay": "R3"}) if value else nothing("off, as by default")
    if value == "disabled":
        return nothing("off, as by default")
    if value in {"R2", "R3"}:
        return Out({"run.routing_replay": value})
    return refused(f"{value!r} is none of disabled, R2, R3")


def megatron_option(value: Value, keys: Keys) -> Out:
    """A name of Megatron's TransformerConfig, as it is."""
    name = keys.key.rpartition("override_transformer_config.")[2]
    return Out({f"learner.megatron.{name}": value})
