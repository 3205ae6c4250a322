"""Advantages, the KL in the reward, filters of groups, and corrections of stale answers."""

import math
import re

from slipstream.deploy.interop.verl import rules
from slipstream.deploy.interop.verl.hydra import Value
from slipstream.deploy.interop.verl.keys import ROLLOUT, VerlKeys, below
from slipstream.deploy.interop.verl.rows import (
    OFF,
    Counterpart,
    Settings,
    Topic,
    nothing,
    refused,
    unlike,
)
from slipstream.deploy.interop.verl.topics.critic import without_critic
from slipstream.deploy.interop.verl.topics.loss import RATIO_FREE, add_kl

TOPIC = Topic("Algorithm")
_ROLLOUT_CORRECTION = "algorithm.rollout_correction"
_algorithm, _correction = TOPIC.below("algorithm"), TOPIC.below(_ROLLOUT_CORRECTION)
_SAMPLING, _REJECTION = (f"algo.correction.{part}" for part in ("importance-sampling", "rejection"))
_PARTS = {
    "gae": "gae",
    **dict.fromkeys(("grpo", "grpo_vectorized"), "grpo"),
    "grpo_passk": "pass-at-k",
    **dict.fromkeys(("rloo", "rloo_vectorized"), "rloo"),
    "opo": "opo",
    "gdpo": "gdpo",
    "reinforce_plus_plus": "discounted-returns",
    "reinforce_plus_plus_baseline": "reinforce++-baseline",
    "optimal_token_baseline": "optimal-token-baseline",
}
_WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
_DISCOUNTED = (*_WHITENED, "optimal_token_baseline")
ADVANTAGES: dict[str, Settings] = {
    name: {"algo.advantage.name": part, **({"algo.whiten": "batch"} if name in _WHITENED else {})}
    for name, part in _PARTS.items()
}


# ---- advantage -----------------------------------------------------------------


@_algorithm.rule(
    "adv_estimator",
    "algo.advantage.name algo.whiten",
    "[names below](#names-of-algorithms), as parts: the preset of a paper's name brings its KL "
    "and reduction along",
    kind="changed",
    default="gae",
)
def _advantage(value: Value, _: VerlKeys) -> Counterpart:
    if value == "remax":
        return refused("no role generates greedy answers for training")
    if str(value) not in ADVANTAGES:
        return unlike(value, ADVANTAGES)
    note = "as parts: a preset of this name would bring the paper's KL and reduction along"
    todo = "algo.advantage.weights: the parts of the reward and their weights"
    settings = dict(ADVANTAGES[str(value)])
    return Counterpart(settings, "changed", note, todo if value == "gdpo" else "")


def _not_of_grpo(keys: VerlKeys) -> str:
    return "" if keys.estimator.startswith("grpo") else f"{keys.estimator} does not"


def _undiscounted(keys: VerlKeys) -> str:
    return "" if keys.estimator in _DISCOUNTED else f"{keys.estimator} discounts nothing"


_algorithm.setting(
    "norm_adv_by_std_in_grpo",
    "algo.advantage.divide_by_std",
    rules.unless(_not_of_grpo, rules.as_it_is),
)
_algorithm.setting("gamma", "algo.advantage.discount", rules.unless(_undiscounted, rules.number))
_algorithm.setting(
    "lam",
    "algo.advantage.decay",
    rules.unless(without_critic, rules.number),
    "of gae; 0.95 by default, verl has 1",
    default=1.0,
)

# ---- KL in the reward ----------------------------------------------------------

_USE_KL = "algorithm.use_kl_in_reward"
add_kl(
    TOPIC,
    "reward",
    "kl",
    {
        _USE_KL: "True is a KL in the reward",
        "algorithm.kl_ctrl.kl_coef": "with `use_kl_in_reward=True`; 0.001 unless given, as in verl",
        "algorithm.kl_penalty": "with `use_kl_in_reward=True`",
    },
)


@_algorithm.rule(
    "kl_ctrl.type",
    "",
    "the coefficient is constant: there is no controller that adapts it",
    kind="dropped",
)
def _controller(value: Value, keys: VerlKeys) -> Counterpart:
    if value == "adaptive" and keys.has_true(_USE_KL):
        return Counterpart({}, "changed", "the coefficient is constant: nothing adapts it")
    return nothing("the coefficient is constant")


_algorithm.dropped("kl_ctrl.horizon kl_ctrl.target_kl", "of the adaptive controller")

# ---- filters -------------------------------------------------------------------


@_algorithm.rule(
    "filter_groups.enable",
    "broker.drop_zero_variance",
    "on by default, verl has it off; another prompt is issued",
    default=False,
)
def _filter_groups(value: Value, keys: VerlKeys) -> Counterpart:
    if value is True and keys.integer(f"{ROLLOUT}.n", default=1) < 2:
        return refused("a group of one has no other reward to differ from (rollout.n)")
    return Counterpart({"broker.drop_zero_variance": value})


_algorithm.dropped(
    "filter_groups.metric",
    "groups are compared by the reward before it is shaped; `broker.zero_variance_of` names a "
    "part of it instead",
)
_algorithm.dropped("filter_groups.*", "prompts are issued until a step is full")

# ---- corrections ---------------------------------------------------------------


def _bypassed(keys: VerlKeys) -> str:
    is_bypassed = keys.has_true(f"{_ROLLOUT_CORRECTION}.bypass_mode")
    return "in bypass mode the ratio itself corrects" if is_bypassed else ""


TOPIC.setting(
    f"{_ROLLOUT_CORRECTION}.rollout_is algorithm.rollout_is",
    f"{_SAMPLING}.level",
    rules.unless(_bypassed, rules.choice(("token", "sequence"))),
    "`token`, `sequence`",
)


@TOPIC.rule(
    f"{_ROLLOUT_CORRECTION}.rollout_is_threshold algorithm.rollout_is_threshold",
    below(_SAMPLING, "high low"),
    kind="renamed",
)
def _importance_bounds(value: Value, keys: VerlKeys) -> Counterpart:
    level = keys.get(f"{_ROLLOUT_CORRECTION}.rollout_is algorithm.rollout_is")
    if not level or _bypassed(keys):
        return nothing("it counts with rollout_is alone")
    bounds = _bounds(value)
    if bounds is None:
        return refused(f"expected a number or LOW_HIGH, got {value!r}")
    low, high = bounds
    lower: Settings = {} if low is None else {f"{_SAMPLING}.low": low}
    return Counterpart({f"{_SAMPLING}.high": high, **lower})


def _bounds(value: Value) -> tuple[float | None, float] | None:
    """Return the lower (if given) and the upper bound."""
    try:
        numbers = [float(part) for part in str(value).split("_")]
    except ValueError:
        return None
    if len(numbers) > 2 or not all(0 < number < math.inf for number in numbers):
        return None
    return (numbers[0] if len(numbers) == 2 else None), numbers[-1]


@_correction.rule("rollout_is_batch_normalize", f"{_SAMPLING}.normalize")
def _normalized(value: Value, keys: VerlKeys) -> Counterpart:
    if value is not True or not keys.get(f"{_ROLLOUT_CORRECTION}.rollout_is"):
        return nothing(OFF)
    return Counterpart({f"{_SAMPLING}.normalize": True})


@_correction.rule(
    "rollout_rs",
    below(_REJECTION, "measure level low high") + " algo.reduce.denominator",
    "[algorithms.md](algorithms.md#rejection) has verl's names; with "
    '`algo.reduce.denominator = "kept"`, as verl divides by what is kept',
    kind="renamed",
)
def _rejection(value: Value, keys: VerlKeys) -> Counterpart:
    place = _ROLLOUT_CORRECTION
    threshold = keys.get(below(place, "rollout_rs_threshold rollout_is_threshold"))
    bounds = _bounds(threshold if threshold is not None else 2.0)
    if bounds is None:
        return refused(f"rollout_rs_threshold: expected a number or LOW_HIGH, got {threshold!r}")
    low, high = bounds
    lower = keys.get(f"{place}.rollout_rs_threshold_lower")
    low = float(lower) if isinstance(lower, int | float) and 0 < lower < math.inf else low
    options = _rejection_options(str(value), low if low is not None else 1 / high, high)
    if options is None:
        return refused(f"{value!r} has no counterpart, such as token_k1 or seq_mean_k3")
    settings = {f"{_REJECTION}.{name}": option for name, option in options.items()}
    return Counterpart({**settings, "algo.reduce.denominator": "kept"})


_LEVELS = {
    "token": "token",
    "seq_sum": "sequence",
    "seq_mean": "sequence-mean",
    "seq_max": "sequence-max",
}
_RATIO_LEVELS = {
    "seq_sum": "sequence",
    "seq_mean": "geometric",
}  # levels of a ratio; k1 is its logarithm


def _rejection_options(name: str, low: float, high: float) -> Settings | None:
    """Return the options of a rejection by verl's name; bounds are of the ratio pi / mu."""
    if name in {"token", "sequence", "geometric"}:
        return {"measure": "ratio", "level": name, "high": high, "low": low}
    match = re.fullmatch(r"(token|seq_sum|seq_mean|seq_max)_(k[123])", name)
    if match is None:
        return None
    level, measure = match[1], match[2]
    if measure != "k1":
        return {"measure": measure, "level": _LEVELS[level], "high": high}
    if level in _RATIO_LEVELS:
        ratio = {"measure": "ratio", "level": _RATIO_LEVELS[level]}
        return {**ratio, "high": 1 / low, "low": 1 / high}
    bounds = {"high": math.log(high), "low": math.log(low)}
    return {"measure": measure, "level": _LEVELS[level], **bounds}


_correction.written_with(
    "rollout_rs", "rollout_rs_threshold rollout_rs_threshold_lower", below(_REJECTION, "low high")
)
TOPIC.setting(
    f"{_ROLLOUT_CORRECTION}.rollout_token_veto_threshold algorithm.rollout_is_veto_threshold",
    "algo.correction.veto.threshold",
    rules.number,
)


@_correction.rule(
    "bypass_mode bypass_old_logprob_for_rollout",
    "algo.anchor",
    '`"behavior"` with True; verl\'s default, False, is `"proximal"`. The default '
    'here is `"behavior"`',
    default=False,
)
def _anchor(value: Value, keys: VerlKeys) -> Counterpart:
    if keys.loss_mode in RATIO_FREE:
        return nothing(f"{keys.loss_mode} has no ratio")
    if value is True:
        return Counterpart({"algo.anchor": "behavior"})
    return Counterpart(
        {"algo.anchor": "proximal"},
        "changed",
        "log-probabilities of the old policy are computed again when a step begins, as in verl; "
        '"behavior" takes those of the engine and saves a pass',
    )


_correction.rule("loss_type", "", "`ppo_clip` alone", kind="dropped")(
    rules.just("ppo_clip", "of the bypass losses there is ppo_clip")
)
_correction.dropped("**", "of older releases; `algo.correction` has what is here")

# ---- the rest ------------------------------------------------------------------

_RESAMPLE = below("algo.data", "resample resample_power")


@_algorithm.rule("use_pf_ppo", _RESAMPLE, kind="renamed")
def _resampled(value: Value, keys: VerlKeys) -> Counterpart:
    if value is not True:
        return nothing(OFF)
    name = str(keys.get("algorithm.pf_ppo.reweight_method", default="pow"))
    method = name.replace("_", "-")
    if method not in {"pow", "max-min", "max-random"}:
        return refused(f"pf_ppo.reweight_method = {method!r} has no counterpart")
    settings: Settings = {"algo.data.resample": method}
    if method == "pow":
        power = keys.number("algorithm.pf_ppo.weight_pow", default=2.0)
        settings["algo.data.resample_power"] = power
    return Counterpart(settings)


TOPIC.written_with("use_pf_ppo", "algorithm.pf_ppo.*", _RESAMPLE)
_algorithm.dropped("filter_sample.**", "GFPO chooses among siblings; there is no such rule")
TOPIC.left_to_write(
    "distillation.enabled",
    "algo.teacher.model",
    "a teacher is a model of the learner's or a server's",
    "a teacher is named anew",
    "algo.teacher: model or endpoint, and coefficient (docs/algorithms.md)",
)
TOPIC.dropped("distillation.**", "`algo.teacher` names the teacher")
