"""Finds settings of [algo] that contradict each other or have no effect. Pure."""

from slipstream.algos import advantages, returns
from slipstream.algos.choice import AlgoChoice, DataOptions
from slipstream.algos.parts import NEEDS, PartError
from slipstream.algos.section import AlgoSection

_WITHOUT_RATIO = frozenset({"policy-gradient"})
_KEEPING_ALL = frozenset(
    {"importance-sampling", "staleness-decay", "approximate-proximal", "kl-cov"}
)


def refuse_conflicts(choice: AlgoChoice, section: AlgoSection) -> None:
    """Refuse contradictory settings, and settings without effect, with the reason.

    Raises:
        PartError: naming the settings, and why.
    """
    for refusals in (_contradictions(choice), _without_effect(choice, section)):
        for reason, is_so in refusals.items():
            if is_so:
                raise PartError(reason)


def _contradictions(choice: AlgoChoice) -> dict[str, bool]:
    """Return contradictions between settings, and whether each applies."""
    names = {chosen.part.name for chosen in choice.corrections}
    advantage, kl, data = choice.advantage.part, choice.kl, choice.data
    has_ratio = choice.surrogate.part.name not in _WITHOUT_RATIO
    needs = choice.needs_of_tokens
    reads_parts = "reward_parts" in choice.advantage.needs
    reads_turns = "turn_rewards" in choice.advantage.needs
    options = choice.advantage.options
    has_kl_reward = choice.has_kl and kl.place == "reward"
    return {
        f"algo.advantage = {advantage.name!r} needs {NEEDS['greedy']}": (
            "greedy" in advantage.needs
        ),
        'algo.kl.name = "full" has no meaning in the reward: it is a sum over all tokens that '
        "could have been chosen, and the reward is of the one that was": (
            kl.name == "full" and kl.place == "reward"
        ),
        f"algo.kl.name = {kl.name!r} differs from its estimator in the gradient only, and a "
        "reward has none: use k1 or k3": kl.name in {"k1+", "k3+"} and kl.place == "reward",
        'algo.kl.name = "full" is a sum over all tokens, of which the behavior policy reports one '
        "(algo.kl.to)": kl.name == "full" and kl.to == "behavior",
        "algo.kl.importance_weighted weighs an estimate in the loss: neither a reward nor the full "
        "divergence": kl.importance_weighted and (kl.place == "reward" or kl.name == "full"),
        f"algo.advantage = {advantage.name!r} reads the parts of the reward, and algo.data (scale, "
        "bias, clip, normalize, overlong_buffer) or a KL in the reward would change the reward "
        "alone": reads_parts and (_shapes_rewards(data) or has_kl_reward),
        f"algo.advantage = {advantage.name!r} is given the rewards of turns, and algo.data.clip "
        "and normalize are of whole rewards": reads_turns
        and (data.clip is not None or data.normalize != "none"),
        f"algo.advantage = {advantage.name!r} compares rewards of turns, and a KL in the reward is "
        'of whole trajectories: algo.kl.place = "loss"': (
            reads_turns and "tokens" not in choice.advantage.needs and has_kl_reward
        ),
        'algo.advantage.over = "turns" takes a turn for one action, and length_adaptive takes '
        "lambda from the number of tokens": (
            isinstance(options, returns.GaeOptions)
            and options.over == "turns"
            and options.length_adaptive
        ),
        "algo.advantage = 'gdpo' needs algo.advantage.weights: the parts of the reward that are "
        "learned from, by name, and their weights": (
            isinstance(choice.advantage.options, advantages.GdpoOptions)
            and not choice.advantage.options.weights
        ),
        "algo.advantage = 'zero' learns nothing without algo.teacher or algo.likelihood": (
            advantage.name == "zero"
            and not choice.has_teacher
            and choice.likelihood.coefficient == 0
        ),
        "algo.advantage = 'maxrl' needs rewards >= 0: algo.data.overlong_buffer, normalize and "
        "negative scales, and a KL in the reward, make them negative": (
            advantage.name == "maxrl"
            and (
                data.overlong_buffer > 0
                or data.normalize != "none"
                or data.scale < 0
                or has_kl_reward
            )
        ),
        'algo.data.zero_variance = "mask" leaves out groups of equal rewards, which teach here '
        "(algo.teacher, algo.likelihood, parts or turns of rewards)": (
            data.zero_variance == "mask"
            and choice.learns_from_equal_rewards
            and choice.is_group_relative
        ),
        "algo.teacher takes a model or an endpoint, not both": (
            bool(choice.teacher.model) and bool(choice.teacher.endpoint)
        ),
        'algo.anchor = "behavior" already divides by the behavior policy; importance-sampling '
        'would correct for the same difference once more (algo.preset = "decoupled-ppo" anchors at '
        "the proximal policy)": (
            choice.anchor == "behavior" and has_ratio and "importance-sampling" in names
        ),
        "algo.correction.approximate-proximal replaces the proximal policy, which "
        'algo.anchor = "behavior" without importance-sampling does not use': (
            "approximate-proximal" in names
            and choice.anchor == "behavior"
            and "importance-sampling" not in names
        ),
        f'algo.whiten = {choice.whiten!r} after algo.data.normalize = "group" does the same '
        "twice": choice.whiten.startswith("group") and data.normalize == "group",
        "algo.data.normalize already centers and scales rewards as algo.advantage does": (
            data.normalize == "group" and advantage.name == "grpo"
        ),
        "algo.data.resample counts a trajectory several times, and a correction that decides over "
        "a whole minibatch (m2po, clip-cov, kl-cov, normalized weights) would count it once": (
            data.resample != "none" and "whole_minibatch" in needs
        ),
        "algo.data.resample counts a trajectory several times, and algo.advantage = "
        f"{advantage.name!r} compares tokens of siblings": (
            data.resample != "none" and "whole_step" in choice.advantage.needs
        ),
    }


def _shapes_rewards(data: DataOptions) -> bool:
    plain = DataOptions()
    names = ("scale", "bias", "clip", "normalize", "overlong_buffer")
    return any(getattr(data, name) != getattr(plain, name) for name in names)


def _without_effect(choice: AlgoChoice, section: AlgoSection) -> dict[str, bool]:
    """Return reasons why a setting has no effect, and whether each applies."""
    names = {chosen.part.name for chosen in choice.corrections}
    data, options = choice.data, choice.advantage.options
    given = set(section.advantage) if isinstance(section.advantage, dict) else set()
    adaptive = isinstance(options, returns.GaeOptions) and options.length_adaptive
    over_turns = isinstance(options, returns.GaeOptions) and options.over == "turns"
    return {
        'algo.advantage.discount has no effect without algo.advantage.over = "turns"': (
            isinstance(options, advantages.SiblingOptions)
            and "discount" in given
            and options.over != "turns"
        ),
        'algo.advantage.discount_by has no effect with algo.advantage.over = "turns", which '
        "discounts by turn": "discount_by" in given and over_turns,
        "algo.advantage.discount_by has no effect as long as algo.advantage.discount is 1": (
            isinstance(options, returns.TimeOptions)
            and "discount_by" in given
            and options.discount == 1
        ),
        "algo.critic has no meaning without an advantage that needs values, such as gae": (
            bool(section.critic) and not choice.needs_values
        ),
        "algo.kl has no effect as long as algo.kl.coefficient is 0": (
            bool(section.kl)
            and "coefficient" not in section.kl
            and not choice.has_kl
            and not (set(section.kl) <= {"reference", "renew_every"} and choice.needs_reference)
        ),
        "algo.kl.reference and algo.kl.renew_every have no effect without a reference policy "
        '(algo.kl.to = "behavior")': (
            choice.has_kl
            and not choice.needs_reference
            and bool({"reference", "renew_every"} & set(section.kl))
        ),
        "algo.teacher has no effect as long as algo.teacher.coefficient is 0": (
            bool(section.teacher)
            and not choice.has_teacher
            and "coefficient" not in section.teacher
        ),
        "algo.likelihood has no effect as long as algo.likelihood.coefficient is 0": (
            bool(section.likelihood)
            and choice.likelihood.coefficient == 0
            and "coefficient" not in section.likelihood
        ),
        "algo.teacher.api_key_file and algo.teacher.concurrency are of algo.teacher.endpoint": (
            bool({"api_key_file", "concurrency"} & set(section.teacher))
            and not choice.teacher.endpoint
        ),
        "algo.anchor has no effect: policy-gradient has no ratio": (
            bool(section.anchor)
            and choice.surrogate.part.name in _WITHOUT_RATIO
            and "kl-cov" not in names
        ),
        "algo.advantage.std_over and epsilon have no effect without divide_by_std": (
            isinstance(options, advantages.GrpoOptions)
            and bool(given & {"std_over", "epsilon"})
            and not options.divide_by_std
        ),
        "algo.advantage.decay has no effect with length_adaptive, which computes its own": (
            "decay" in given and adaptive
        ),
        "algo.advantage.length_alpha has no effect without length_adaptive": (
            "length_alpha" in given and not adaptive
        ),
        "algo.reduce.length is the constant of sequence-mean-token-sum-norm alone": (
            choice.reduce.length > 0 and choice.reduce.name != "sequence-mean-token-sum-norm"
        ),
        'algo.reduce.denominator = "kept" has no meaning without a correction that rejects '
        "(rejection, veto, opsm, m2po, clip-cov)": (
            choice.reduce.denominator == "kept" and names <= _KEEPING_ALL
        ),
        'algo.data.resample_power has no effect without algo.data.resample = "pow"': (
            "resample_power" in section.data and data.resample != "pow"
        ),
        'algo.data.resample_share has no effect without algo.data.resample = "max-random"': (
            "resample_share" in section.data and data.resample != "max-random"
        ),
        "algo.data.overlong_penalty needs algo.data.overlong_buffer": (
            "overlong_penalty" in section.data and data.overlong_buffer == 0
        ),
    }
