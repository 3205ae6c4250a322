"""The loss: surrogate, bounds of the ratio, reduction, KL and reference policy."""

from collections.abc import Mapping

from slipstream.deploy.interop.verl import rules
from slipstream.deploy.interop.verl.hydra import Value
from slipstream.deploy.interop.verl.keys import ACTOR, REF, VerlKeys, below
from slipstream.deploy.interop.verl.rows import (
    OFF,
    Counterpart,
    Settings,
    Topic,
    expected,
    nothing,
    refused,
    unlike,
)

TOPIC = Topic("Loss")
_actor, _ref = TOPIC.below(ACTOR), TOPIC.below(REF)
RATIO_FREE = frozenset({"gpg", "dro"})  # surrogates without a ratio
_OF_SEQUENCES = frozenset({"gspo", "sapo", "geo_mean"})  # always with the mean over sequences
_SEQUENCE_MEAN = "sequence-mean-token-mean"
_REDUCE = {
    "token-mean": "token-mean",
    "seq-mean-token-sum": "sequence-mean-token-sum",
    "seq-mean-token-mean": _SEQUENCE_MEAN,
    "seq-mean-token-sum-norm": "sequence-mean-token-sum-norm",
}
_CLIPPED = ("vanilla", "clip_cov", "kl_cov")
SURROGATES = {
    **dict.fromkeys(_CLIPPED, "ppo-clip"),
    "gspo": "gspo",
    "sapo": "sapo",
    "cispo": "cispo",
    "geo_mean": "gmpo",
    "dppo_tv": "dppo-tv",
    "dppo_kl": "dppo-kl",
    **dict.fromkeys(("gpg", "dro"), "policy-gradient"),
}
ESTIMATORS = {
    **dict.fromkeys(("kl", "k1"), "k1"),
    **dict.fromkeys(("mse", "k2"), "k2"),
    **dict.fromkeys(("low_var_kl", "k3"), "low-var"),
    **dict.fromkeys(("low_var_kl+", "k3+"), "k3+"),
    **dict.fromkeys(("kl+", "k1+"), "k1+"),
    "abs": "abs",
    "full": "full",
}
# Options of surrogates: verl's names below policy_loss and defaults, by the settings that they are.
_OPTIONS: dict[str, dict[str, tuple[str, float]]] = {
    "clip_cov": {
        "algo.correction.clip-cov.share": ("clip_cov_ratio", 2e-4),
        "algo.correction.clip-cov.low": ("clip_cov_lb", 1.0),
        "algo.correction.clip-cov.high": ("clip_cov_ub", 5.0),
    },
    "kl_cov": {
        "algo.correction.kl-cov.share": ("kl_cov_ratio", 2e-4),
        "algo.correction.kl-cov.coefficient": ("ppo_kl_coef", 0.1),
    },
}
_NAMES = "[names below](#names-of-algorithms)"


# ---- surrogate -----------------------------------------------------------------


@_actor.rule(
    "policy_loss.loss_mode",
    f"algo.surrogate.name algo.reduce.name {' '.join(_OPTIONS['clip_cov'])} "
    f"{' '.join(_OPTIONS['kl_cov'])} " + below("algo.kl", "coefficient name to"),
    _NAMES,
    kind="renamed",
    default="vanilla",
)
def surrogate(value: Value, keys: VerlKeys) -> Counterpart:
    """Take the function to differentiate, with its options."""
    mode, place = str(value), f"{ACTOR}.policy_loss"
    if mode not in SURROGATES:
        return unlike(value, SURROGATES)
    settings: Settings = {"algo.surrogate.name": SURROGATES[mode]}
    if mode in _OF_SEQUENCES:
        settings["algo.reduce.name"] = _SEQUENCE_MEAN
    for setting, (name, default) in _OPTIONS.get(mode, {}).items():
        settings[setting] = keys.number(f"{place}.{name}", default=default)
    if mode == "dro":
        beta = keys.number(f"{place}.dro_beta")
        if beta <= 0:
            return refused("dro needs policy_loss.dro_beta above 0")
        settings |= {"algo.kl.coefficient": beta, "algo.kl.name": "k2", "algo.kl.to": "behavior"}
    return Counterpart(settings)


_actor.below("policy_loss").written_with(
    "loss_mode",
    "clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef dro_beta",
    "algo.correction.clip-cov.* algo.correction.kl-cov.*",
)


# ---- bounds --------------------------------------------------------------------


def _unclipped(keys: VerlKeys) -> str:
    mode = keys.loss_mode
    return f"{mode} clips nothing" if mode in RATIO_FREE or mode == "sapo" else ""


for _bound in ("low", "high"):
    TOPIC.setting(
        f"{ACTOR}.clip_ratio_{_bound}",
        f"algo.surrogate.clip_{_bound}",
        rules.unless(_unclipped, rules.number),
        "verl has 0.2 for every surrogate; here `gspo`, `cispo` and others have their papers'",
        default=0.2,
    )


@_actor.rule(
    "clip_ratio",
    "algo.surrogate.clip_low algo.surrogate.clip_high",
    "where `clip_ratio_low` and `clip_ratio_high` are not given",
    kind="renamed",
)
def _clip_both(value: Value, keys: VerlKeys) -> Counterpart:
    settings: Settings = {}
    for bound in ("low", "high"):
        if f"{ACTOR}.clip_ratio_{bound}" not in keys:
            rule = rules.unless(_unclipped, rules.number)(f"algo.surrogate.clip_{bound}")
            settings |= rule(value, keys).settings
    if settings:
        return Counterpart(settings)
    return nothing("clip_ratio_low and clip_ratio_high are given")


@_actor.rule("clip_ratio_c", "algo.surrogate.clip_dual", "off by default; verl has 3", default=3.0)
def _clip_dual(value: Value, keys: VerlKeys) -> Counterpart:
    if keys.loss_mode not in _CLIPPED:
        return nothing(f"{keys.loss_mode} has no such bound")
    if not isinstance(value, int | float) or value <= 1:
        return expected("a number above 1", value)
    return Counterpart({"algo.surrogate.clip_dual": float(value)})


def _without_sapo(keys: VerlKeys) -> str:
    return "" if keys.loss_mode == "sapo" else "it counts with loss_mode=sapo alone"


_of_sapo = rules.unless(_without_sapo, rules.number)
_actor.setting("tau_pos", "algo.surrogate.tau_positive", _of_sapo)
_actor.setting("tau_neg", "algo.surrogate.tau_negative", _of_sapo)


# ---- reduction -----------------------------------------------------------------


def _of_sequences(keys: VerlKeys) -> str:
    mode = keys.loss_mode
    return f"{mode} takes {_SEQUENCE_MEAN}, whatever this says" if mode in _OF_SEQUENCES else ""


_actor.setting(
    "loss_agg_mode",
    "algo.reduce.name",
    rules.unless(_of_sequences, rules.choice(_REDUCE)),
    "the same names with `sequence-` for `seq-`; always over the global minibatch",
)


@_actor.rule("use_token_level_loss", "algo.reduce.name", "the older name: True is `token-mean`")
def _token_level(value: Value, keys: VerlKeys) -> Counterpart:
    if f"{ACTOR}.loss_agg_mode" in keys or keys.loss_mode in _OF_SEQUENCES:
        return nothing("loss_agg_mode or loss_mode decides")
    return Counterpart({"algo.reduce.name": "token-mean" if value is True else _SEQUENCE_MEAN})


def _without_length(keys: VerlKeys) -> str:
    mode = "seq-mean-token-sum-norm"
    if keys.get(f"{ACTOR}.loss_agg_mode") == mode:
        return ""
    return f"it counts with loss_agg_mode={mode} alone"


_actor.setting(
    "loss_scale_factor",
    "algo.reduce.length",
    rules.unless(_without_length, rules.number),
    "for `sequence-mean-token-sum-norm`",
)
_actor.setting("entropy_coeff", "algo.entropy_bonus", rules.number)

# ---- KL ------------------------------------------------------------------------


def add_kl(topic: Topic, place: str, default: str, remarks: Mapping[str, str]) -> None:
    """Add the rows of a KL.

    Args:
        topic: Topic of the rows.
        place: Loss or reward.
        default: verl's estimator where none is given.
        remarks: Remarks by verl's keys of the switch, the coefficient and the estimator.
    """
    switch, coefficient, name = remarks

    def rule(value: Value, keys: VerlKeys) -> Counterpart:
        if value is not True:
            return nothing("no KL, as by default")
        if place == "reward" and keys.has_true(_USE_KL):
            return refused("there is one KL: in the loss (use_kl_loss) or in the reward")
        factor = keys.number(coefficient, default=0.001)
        if factor == 0:
            return nothing("its coefficient is 0, and no reference policy is loaded")
        estimator = str(keys.get(name, default=default))
        if estimator not in ESTIMATORS:
            return unlike(estimator, ESTIMATORS)
        options = {"place": place, "coefficient": float(factor), "name": ESTIMATORS[estimator]}
        return Counterpart({f"algo.kl.{option}": chosen for option, chosen in options.items()})

    def idle(keys: VerlKeys) -> str:
        return "" if keys.has_true(switch) else f"it counts with {switch}=True alone"

    ours = below("algo.kl", "place coefficient name")
    topic.rule(switch, ours, remarks[switch], kind="renamed")(rule)
    for key, setting, rule_of in (
        (coefficient, "algo.kl.coefficient", rules.present("0 is no KL")),
        (name, "algo.kl.name", rules.choice(ESTIMATORS)),
    ):
        topic.setting(key, setting, rules.unless(idle, rule_of), remarks[key])


_USE_KL = f"{ACTOR}.use_kl_loss"
add_kl(
    TOPIC,
    "loss",
    "low_var_kl",
    {
        _USE_KL: "True is a KL in the loss, and loads the reference policy; coefficient 0.001 and "
        "`low-var` as in verl unless given",
        f"{ACTOR}.kl_loss_coef": "with `use_kl_loss=True`",
        f"{ACTOR}.kl_loss_type": _NAMES,
    },
)


@_actor.rule(
    "tis_imp_ratio_cap",
    below("algo.correction.importance-sampling", "level high"),
    "the older name of `rollout_is=token`",
    kind="renamed",
)
def _ratio_cap(value: Value, _: VerlKeys) -> Counterpart:
    if not isinstance(value, int | float) or value <= 0:
        return nothing(OFF)
    place = "algo.correction.importance-sampling"
    return Counterpart({f"{place}.level": "token", f"{place}.high": float(value)})


def _unrenewed(keys: VerlKeys) -> str:
    if not keys.has_true(f"{REF}.sync_ref_model") or not keys.has_true(_USE_KL):
        return "it counts with sync_ref_model=True and a KL"
    return "with adapters the reference policy is the model without them" if keys.adapters else ""


_ref.setting(
    "ref_model_sync_steps",
    "algo.kl.renew_every",
    rules.unless(_unrenewed, rules.integer),
    "a copy: weights are not mixed",
    kind="changed",
)
_ref.dropped(
    "sync_ref_model ref_model_mixup_alpha",
    "`algo.kl.renew_every` copies the policy into the reference",
)


def _without_kl(keys: VerlKeys) -> str:
    return "" if keys.has_kl else "no KL, no reference policy"


_ref.setting(
    "model model.path",
    "algo.kl.reference",
    rules.unless(_without_kl, rules.path),
    "where there is a KL",
)

# ---- the rest ------------------------------------------------------------------

_actor.setting("checkpoint.async_save", "checkpoint.asynchronous", rules.switch, "on by default")
_actor.dropped(
    "checkpoint.**",
    "a checkpoint has everything that a resumed run needs; `checkpoint.export_at_end` and "
    "`slipstream export` write a Hugging Face folder",
)
TOPIC.dropped(
    f"{ACTOR}.use_torch_compile {REF}.use_torch_compile "
    + below(
        ACTOR,
        "use_fused_kernels use_prefix_grouper calculate_entropy calculate_sum_pi_squared "
        "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing "
        "pad_to_length load_weight rollout_n freeze_vision_tower qat.**",
    ),
    "how the loss is computed, not what it is: the learner has its own way, and logs the entropy "
    "always",
)
_ref.dropped("**", "the reference policy is divided and packed as the policy is, on the same GPUs")
