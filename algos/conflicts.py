"""Finds settings of [algo] that contradict each other or have no effect. Pure."""

from collections.abc import Callable
from typing import TypeAlias

from slipstream.algos import advantages, returns
from slipstream.algos.choice import AlgoChoice, DataOptions
from slipstream.algos.parts import NEEDS, PartError
from slipstream.algos.section import AlgoSection

_WITHOUT_RATIO = frozenset({"policy-gradient"})
_KEEPING_ALL = frozenset(
    {"importance-sampling", "staleness-decay", "approximate-proximal", "kl-cov"}
)


class _Settings:
    """A choice, the section that it was made from, and what rules ask of them."""

    def __init__(self, choice: AlgoChoice, section: AlgoSection) -> None:
        self.choice, self.section, self.kl, self.data = choice, section, choice.kl, choice.data
        self.advantage, self.needs = choice.advantage.part.name, choice.advantage.needs
        self.options = options = choice.advantage.options
        table = section.advantage
        self.named = frozenset(table if isinstance(table, dict) else ())
        self.corrections = frozenset(chosen.part.name for chosen in choice.corrections)
        self.has_ratio = choice.surrogate.part.name not in _WITHOUT_RATIO
        self.has_kl_reward = choice.has_kl and choice.kl.place == "reward"
        gae = options if isinstance(options, returns.GaeOptions) else None
        self.is_adaptive = gae is not None and gae.length_adaptive
        self.is_bi_level = gae is not None and gae.over == "both"
        self.is_gae_over_turns = gae is not None and gae.over != "tokens"


_Rules: TypeAlias = dict[str, Callable[[_Settings], bool]]
_CONTRADICTIONS: _Rules = {
    "algo.advantage = {advantage!r} needs {greedy}": lambda s: "greedy" in s.needs,
    'algo.kl.name = "full" has no meaning in the reward: it is a sum over all tokens that '
    "could have been chosen, and the reward is of the one that was": lambda s: (
        s.kl.name == "full" and s.kl.place == "reward"
    ),
    "algo.kl.name = {kl!r} differs from its estimator in the gradient only, and a reward has "
    "none: use k1 or k3": lambda s: s.kl.name in {"k1+", "k3+"} and s.kl.place == "reward",
    'algo.kl.name = "full" is a sum over all tokens, of which the behavior policy reports one '
    "(algo.kl.to)": lambda s: s.kl.name == "full" and s.kl.to == "behavior",
    "algo.kl.importance_weighted weighs an estimate in the loss: neither a reward nor the full "
    "divergence": lambda s: (
        s.kl.importance_weighted and (s.kl.place == "reward" or s.kl.name == "full")
    ),
    "algo.advantage = {advantage!r} reads the parts of the reward, and algo.data (scale, bias, "
    "clip, normalize, overlong_buffer) or a KL in the reward would change the reward "
    "alone": lambda s: "reward_parts" in s.needs and (_shapes_rewards(s.data) or s.has_kl_reward),
    "algo.advantage = {advantage!r} is given the rewards of turns, and algo.data.clip and "
    "normalize are of whole rewards": lambda s: (
        "turn_rewards" in s.needs and (s.data.clip is not None or s.data.normalize != "none")
    ),
    "algo.advantage = {advantage!r} compares rewards of turns, and a KL in the reward is of "
    'whole trajectories: algo.kl.place = "loss"': lambda s: (
        "turn_rewards" in s.needs and "tokens" not in s.needs and s.has_kl_reward
    ),
    "algo.advantage.over counts the steps of turns, and length_adaptive takes lambda from the "
    "number of tokens": lambda s: s.is_gae_over_turns and s.is_adaptive,
    'algo.advantage.over = "both" knows rewards at ends of turns, and a KL in the reward is of all '
    'tokens: algo.kl.place = "loss"': lambda s: s.is_bi_level and s.has_kl_reward,
    "algo.advantage = 'gdpo' needs algo.advantage.weights: the parts of the reward that are "
    "learned from, by name, and their weights": lambda s: (
        isinstance(s.options, advantages.GdpoOptions) and not s.options.weights
    ),
    "algo.advantage = 'zero' learns nothing without algo.teacher or algo.likelihood": lambda s: (
        s.advantage == "zero" and not s.choice.has_teacher and s.choice.likelihood.coefficient == 0
    ),
    "algo.advantage = 'maxrl' needs rewards >= 0: algo.data.overlong_buffer, normalize and "
    "negative scales, and a KL in the reward, make them negative": lambda s: (
        s.advantage == "maxrl"
        and (
            s.data.overlong_buffer > 0
            or s.data.normalize != "none"
            or s.data.scale < 0
            or s.has_kl_reward
        )
    ),
    'algo.data.zero_variance = "mask" leaves out groups of equal rewards, which teach here '
    "(algo.teacher, algo.likelihood, parts or turns of rewards)": lambda s: (
        s.data.zero_variance == "mask"
        and s.choice.learns_from_equal_rewards
        and s.choice.is_group_relative
    ),
    "algo.teacher takes a model or an endpoint, not both": lambda s: (
        bool(s.choice.teacher.model) and bool(s.choice.teacher.endpoint)
    ),
    'algo.anchor = "behavior" already divides by the behavior policy; importance-sampling '
    'would correct for the same difference once more (algo.preset = "decoupled-ppo" anchors at '
    "the proximal policy)": lambda s: (
        s.choice.anchor == "behavior" and s.has_ratio and "importance-sampling" in s.corrections
    ),
    "algo.correction.approximate-proximal replaces the proximal policy, which "
    'algo.anchor = "behavior" without importance-sampling does not use': lambda s: (
        "approximate-proximal" in s.corrections
        and s.choice.anchor == "behavior"
        and "importance-sampling" not in s.corrections
    ),
    'algo.whiten = {whiten!r} after algo.data.normalize = "group" does the same twice': lambda s: (
        s.choice.whiten.startswith("group") and s.data.normalize == "group"
    ),
    "algo.data.normalize already centers and scales rewards as algo.advantage does": lambda s: (
        s.data.normalize == "group" and s.advantage == "grpo"
    ),
    "algo.data.resample counts a trajectory several times, and a correction that decides over "
    "a whole minibatch (m2po, clip-cov, kl-cov, normalized weights) would count it "
    "once": lambda s: s.data.resample != "none" and "whole_minibatch" in s.choice.needs_of_tokens,
    "algo.data.resample counts a trajectory several times, and algo.advantage = {advantage!r} "
    "compares tokens of siblings": lambda s: s.data.resample != "none" and "whole_step" in s.needs,
}
_WITHOUT_EFFECT: _Rules = {
    'algo.advantage.discount has no effect without algo.advantage.over = "turns"': lambda s: (
        isinstance(s.options, advantages.SiblingOptions)
        and "discount" in s.named
        and s.options.over != "turns"
    ),
    "algo.advantage.discount_by has no effect with algo.advantage.over, which discounts by "
    "turn": lambda s: "discount_by" in s.named and s.is_gae_over_turns,
    "algo.advantage.discount_by has no effect as long as algo.advantage.discount is 1": lambda s: (
        isinstance(s.options, returns.TimeOptions)
        and "discount_by" in s.named
        and s.options.discount == 1
    ),
    "algo.critic has no meaning without an advantage that needs values, such as gae": lambda s: (
        bool(s.section.critic) and not s.choice.needs_values
    ),
    "algo.kl has no effect as long as algo.kl.coefficient is 0": lambda s: (
        bool(s.section.kl)
        and "coefficient" not in s.section.kl
        and not s.choice.has_kl
        and not (set(s.section.kl) <= {"reference", "renew_every"} and s.choice.needs_reference)
    ),
    "algo.kl.reference and algo.kl.renew_every have no effect without a reference policy "
    '(algo.kl.to = "behavior")': lambda s: (
        s.choice.has_kl
        and not s.choice.needs_reference
        and bool({"reference", "renew_every"} & set(s.section.kl))
    ),
    "algo.teacher has no effect as long as algo.teacher.coefficient is 0": lambda s: (
        bool(s.section.teacher)
        and not s.choice.has_teacher
        and "coefficient" not in s.section.teacher
    ),
    "algo.likelihood has no effect as long as algo.likelihood.coefficient is 0": lambda s: (
        bool(s.section.likelihood)
        and s.choice.likelihood.coefficient == 0
        and "coefficient" not in s.section.likelihood
    ),
    "algo.teacher.api_key_file and algo.teacher.concurrency are of "
    "algo.teacher.endpoint": lambda s: (
        bool({"api_key_file", "concurrency"} & set(s.section.teacher))
        and not s.choice.teacher.endpoint
    ),
    "algo.anchor has no effect: policy-gradient has no ratio": lambda s: (
        bool(s.section.anchor) and not s.has_ratio and "kl-cov" not in s.corrections
    ),
    "algo.advantage.std_over and epsilon have no effect without divide_by_std": lambda s: (
        isinstance(s.options, advantages.GrpoOptions)
        and bool(s.named & {"std_over", "epsilon"})
        and not s.options.divide_by_std
    ),
    "algo.advantage.decay has no effect with length_adaptive, which computes its own": lambda s: (
        "decay" in s.named and s.is_adaptive
    ),
    "algo.advantage.length_alpha has no effect without length_adaptive": lambda s: (
        "length_alpha" in s.named and not s.is_adaptive
    ),
    "algo.reduce.length is the constant of sequence-mean-token-sum-norm alone": lambda s: (
        s.choice.reduce.length > 0 and s.choice.reduce.name != "sequence-mean-token-sum-norm"
    ),
    'algo.reduce.denominator = "kept" has no meaning without a correction that rejects '
    "(rejection, veto, opsm, m2po, clip-cov)": lambda s: (
        s.choice.reduce.denominator == "kept" and s.corrections <= _KEEPING_ALL
    ),
    'algo.data.resample_power has no effect without algo.data.resample = "pow"': lambda s: (
        "resample_power" in s.section.data and s.data.resample != "pow"
    ),
    'algo.data.resample_share has no effect without algo.data.resample = "max-random"': lambda s: (
        "resample_share" in s.section.data and s.data.resample != "max-random"
    ),
    "algo.data.overlong_penalty needs algo.data.overlong_buffer": lambda s: (
        "overlong_penalty" in s.section.data and s.data.overlong_buffer == 0
    ),
}


def refuse_conflicts(choice: AlgoChoice, section: AlgoSection) -> None:
    """Refuse contradictory settings, and settings without effect, with the reason.

    Raises:
        PartError: naming the settings, and why.
    """
    settings = _Settings(choice, section)
    for reason, applies in (_CONTRADICTIONS | _WITHOUT_EFFECT).items():
        if applies(settings):
            raise PartError(
                reason.format(
                    advantage=settings.advantage,
                    kl=choice.kl.name,
                    whiten=choice.whiten,
                    greedy=NEEDS["greedy"],
                )
            )


def _shapes_rewards(data: DataOptions) -> bool:
    plain = DataOptions()
    names = ("scale", "bias", "clip", "normalize", "overlong_buffer")
    return any(getattr(data, name) != getattr(plain, name) for name in names)
