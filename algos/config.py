"""What the section [algo] comes to: the parts of a preset with a user's changes.

Every part and its settings are known here, so this needs torch; ``algos.section`` does not.
"""

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from slipstream.algos import advantages, corrections, returns, surrogates
from slipstream.algos.kl import Kind as KlKind
from slipstream.algos.parts import NEEDS, AnyPart, Kind, Options, PartError, check_needs, find_part
from slipstream.algos.presets import PRESETS
from slipstream.algos.reduce import Rule
from slipstream.algos.section import AlgoSection, Table, Whiten

T = TypeVar("T", bound=Options)
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


def _by_name(*parts: AnyPart) -> dict[str, AnyPart]:
    return {part.name: part for part in parts}


ADVANTAGES: dict[str, AnyPart] = _by_name(
    advantages.grpo,
    advantages.rloo,
    advantages.opo,
    advantages.pass_at_k,
    advantages.maxrl,
    advantages.gdpo,
    advantages.remax,
    advantages.plain,
    advantages.zero,
    returns.discounted_returns,
    returns.centered_returns,
    returns.gae,
    returns.optimal_token_baseline,
)
SURROGATES: dict[str, AnyPart] = _by_name(
    surrogates.policy_gradient,
    surrogates.reinforce_is,
    surrogates.ppo_clip,
    surrogates.gspo,
    surrogates.cispo,
    surrogates.sapo,
    surrogates.gmpo,
    surrogates.dppo_tv,
    surrogates.dppo_kl,
    surrogates.drpo,
    surrogates.topr,
)
CORRECTIONS: dict[str, AnyPart] = _by_name(
    corrections.importance_sampling,
    corrections.rejection,
    corrections.veto,
    corrections.opsm,
    corrections.m2po,
    corrections.clip_cov,
    corrections.kl_cov,
    corrections.staleness_decay,
    corrections.approximate_proximal,
)
PARTS: dict[Kind, dict[str, AnyPart]] = {
    "advantage": ADVANTAGES,
    "surrogate": SURROGATES,
    "correction": CORRECTIONS,
}
# What is multiplied or divided by. Other settings are limits, and inf is no limit.
_FACTORS = frozenset(
    {"coefficient", "scale", "bias", "weights", "lr", "length", "least_reward", "entropy_bonus"}
)
_WITHOUT_RATIO = frozenset({"policy-gradient"})
_KEEPING_ALL = frozenset(
    {"importance-sampling", "staleness-decay", "approximate-proximal", "kl-cov"}
)


class ReduceOptions(Options, frozen=True, kw_only=True):
    """[algo.reduce]: how losses of tokens become one number."""

    name: Rule = "token-mean"
    """Mean over all tokens of a minibatch, or over sequences first."""
    length: NotNegative = 0.0
    """Constant of sequence-mean-token-sum-norm; 0 is sampling.max_response_tokens."""
    denominator: Literal["original", "kept"] = "original"
    """Whether tokens that a correction rejected still count in the denominator."""


class KlOptions(Options, frozen=True, kw_only=True):
    """[algo.kl]: what holds the policy near a reference policy."""

    coefficient: NotNegative = 0.0
    """Weight of the KL divergence; 0 needs no reference policy."""
    to: Literal["reference", "behavior"] = "reference"
    """What it is taken from: a frozen policy, or the policy that chose the token."""
    name: KlKind = "k3"
    """Estimator; k1+ and k3+ have the gradient of k2, full takes all logits."""
    place: Literal["loss", "reward"] = "loss"
    """Added to the loss, or taken from the reward of each token."""
    importance_weighted: bool = False
    """Weigh the estimate of a token by current / behavior: unbiased for stale tokens."""
    reference: str = ""
    """Hugging Face folder of the reference policy; empty is run.model."""
    renew_every: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The reference becomes the policy itself after every so many learner steps; 0 is never."""


class TeacherOptions(Options, frozen=True, kw_only=True):
    """[algo.teacher]: a policy to distill from; log teacher - log proximal is added to advantages.

    It needs `model` or `endpoint`, and the same token ids as this run.
    """

    coefficient: NotNegative = 0.0
    """Weight of the teacher's part of the advantage, added after whitening; 0 has no teacher."""
    model: str = ""
    """Hugging Face folder of a teacher that the learner holds itself."""
    endpoint: str = ""
    """URL of an SGLang server that serves the teacher, such as http://10.0.0.7:30000."""
    api_key_file: str = ""
    """File with the bearer token of the endpoint, readable by its owner only."""
    concurrency: Annotated[int, msgspec.Meta(ge=1)] = 32
    """Requests to the endpoint at a time, of each rank of the learner that asks."""
    clip: Positive | None = None
    """The difference counts as this many nats at most; not set for no limit."""


class LikelihoodOptions(Options, frozen=True, kw_only=True):
    """[algo.likelihood]: right answers are imitated besides: VAPO's positive example loss."""

    coefficient: NotNegative = 0.0
    """Weight of the mean of -log pi over the tokens of right answers."""
    least_reward: float = 1.0
    """An answer is right from this reward on, as it was scored."""


class CriticOptions(Options, frozen=True, kw_only=True):
    """[algo.critic]: the value model, for advantages that need one."""

    lr: Positive = 1e-5
    """Learning rate of the critic; its schedule is the learner's."""
    clip: Positive = 0.2
    """Values move at most so far from what they were at the start of the step; inf for no limit."""
    huber: Positive | None = None
    """Errors beyond this count linearly (Huber) instead of squared; not set squares all."""
    warmup_steps: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Learner steps that train the critic alone; the policy's learning rate starts after them."""


class DataOptions(Options, frozen=True, kw_only=True):
    """[algo.data]: what is done to rewards and to the batch before advantages."""

    scale: float = 1.0
    """Rewards are multiplied by this, after bias was added."""
    bias: float = 0.0
    """Added to every reward."""
    clip: Positive | None = None
    """Scaled rewards are limited to this magnitude."""
    normalize: Literal["none", "group", "batch"] = "none"
    """Center rewards and divide them by their deviation within this."""
    overlong_buffer: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Last share of sampling.max_response_tokens in which a soft penalty grows; 0 is none."""
    overlong_penalty: Positive = 1.0
    """The penalty at the limit."""
    overlong_filter: bool = False
    """Responses that were cut off at the limit train nothing; their reward still counts."""
    zero_variance: Literal["keep", "mask"] = "keep"
    """Whether groups of equal rewards count in the loss; see broker.drop_zero_variance as well."""
    resample: Literal["none", "pow", "max-min", "max-random"] = "none"
    """PF-PPO: draw the batch again, with a chance that grows with the reward."""
    resample_power: Positive = 1.0
    """Chance is the reward's magnitude to this power (pow)."""
    resample_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    """Chance of all but the best, as a share of the best one's (max-random)."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A part with its settings."""

    part: AnyPart
    options: Options

    @property
    def needs(self) -> frozenset[str]:
        """Return what it needs, as it is set; of ``NEEDS``."""
        return self.part.needs | self.options.needs


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgoChoice:
    """All that an algorithm is made of."""

    preset: str
    advantage: Chosen
    surrogate: Chosen
    anchor: Literal["proximal", "behavior"]
    corrections: tuple[Chosen, ...]
    reduce: ReduceOptions
    whiten: Whiten
    entropy_bonus: float
    kl: KlOptions
    teacher: TeacherOptions
    likelihood: LikelihoodOptions
    critic: CriticOptions
    data: DataOptions

    @property
    def needs_values(self) -> bool:
        """Return whether there is a critic."""
        return "values" in self.advantage.needs

    @property
    def needs_of_tokens(self) -> frozenset[str]:
        """Return what the surrogate and the corrections need."""
        return self.surrogate.needs.union(*(chosen.needs for chosen in self.corrections))

    @property
    def has_kl(self) -> bool:
        """Return whether a KL divergence is in the loss or in the reward."""
        return self.kl.coefficient > 0

    @property
    def needs_reference(self) -> bool:
        """Return whether there is a reference policy."""
        of_kl = self.has_kl and self.kl.to == "reference"
        return of_kl or "reference" in self.needs_of_tokens

    @property
    def has_teacher(self) -> bool:
        """Return whether there is a teacher."""
        return self.teacher.coefficient > 0

    @property
    def learns_from_equal_rewards(self) -> bool:
        """Return whether a group of equal rewards teaches something."""
        if self.has_teacher or self.likelihood.coefficient > 0:
            return True
        if "reward_parts" in self.advantage.needs:
            return True
        return not self.is_group_relative and self.data.normalize != "group"

    @property
    def is_group_relative(self) -> bool:
        """Return whether a trajectory is compared with its siblings."""
        return "siblings" in self.advantage.needs


def choice_of(
    section: AlgoSection, module_named: Callable[[str], ModuleType] = importlib.import_module
) -> AlgoChoice:
    """Return the parts that a section chooses.

    Args:
        section: [algo].
        module_named: imports the module of a part of one's own, or its file if it knows how.

    Raises:
        PartError: an unknown name or setting, or parts that make no sense together.
    """
    if section.preset not in PRESETS:
        raise PartError(
            f"algo.preset = {section.preset!r} is not known; there are {', '.join(PRESETS)}"
        )
    preset = PRESETS[section.preset]
    _refuse_no_number("algo", {"entropy_bonus": section.entropy_bonus})
    choice = AlgoChoice(
        preset=section.preset,
        advantage=_chosen("advantage", preset, section.advantage, module_named),
        surrogate=_chosen("surrogate", preset, section.surrogate, module_named),
        anchor=section.anchor or preset.get("anchor", "proximal"),
        corrections=_corrections(preset.get("correction", {}), section.correction, module_named),
        reduce=_options("algo.reduce", ReduceOptions, _merged(preset, "reduce", section.reduce)),
        whiten=section.whiten or preset.get("whiten", "none"),
        entropy_bonus=(
            preset.get("entropy_bonus", 0.0)
            if section.entropy_bonus is None
            else section.entropy_bonus
        ),
        kl=_table("kl", KlOptions, preset, section.kl),
        teacher=_table("teacher", TeacherOptions, preset, section.teacher),
        likelihood=_table("likelihood", LikelihoodOptions, preset, section.likelihood),
        critic=_table("critic", CriticOptions, preset, section.critic),
        data=_table("data", DataOptions, preset, section.data),
    )
    _refuse(choice, section)
    return choice


def _merged(preset: Mapping[str, Any], kind: str, given: str | Table) -> Table:
    """Return name and settings: the preset's settings hold as long as its part is not replaced."""
    base: Table = {**preset.get(kind, {})}
    if not given:
        return base
    table: Table = {"name": given} if isinstance(given, str) else given
    if table.get("name", base.get("name")) != base.get("name"):
        return dict(table)
    return {**base, **table}


def _chosen(
    kind: Kind,
    preset: Mapping[str, Any],
    given: str | Table,
    module_named: Callable[[str], ModuleType],
) -> Chosen:
    table = _merged(preset, kind, given)
    name = table.pop("name", "")
    if not isinstance(name, str):
        raise PartError(f"algo.{kind}.name must be the name of a part, got {name!r}")
    part = find_part(kind, name, PARTS[kind], f"algo.{kind}", module_named)
    return _checked(Chosen(part, _options(f"algo.{kind}", part.options, table)))


def _checked(chosen: Chosen) -> Chosen:
    """Return a part whose options need what there is.

    Raises:
        PartError: they need something else.
    """
    check_needs(chosen.part.kind, chosen.part.name, chosen.needs)
    return chosen


def _corrections(
    preset: Mapping[str, Table],
    given: str | Table,
    module_named: Callable[[str], ModuleType],
) -> tuple[Chosen, ...]:
    tables: dict[str, Table] = {name: dict(table) for name, table in preset.items()}
    if given == "none":
        tables = {}
    elif isinstance(given, str) and given:
        tables = {given: {**tables.get(given, {})}}
    elif isinstance(given, dict):
        for name, table in given.items():
            if table is False:
                tables.pop(name, None)
            elif isinstance(table, dict):
                tables[name] = {**tables.get(name, {}), **table}
            else:
                raise PartError(
                    f"algo.correction.{name} must be a table of settings or false, got {table!r}"
                )
    chosen = []
    for name, table in tables.items():
        part = find_part("correction", name, CORRECTIONS, "algo.correction", module_named)
        options = _options(f"algo.correction.{name}", part.options, table)
        chosen.append(_checked(Chosen(part, options)))
    return tuple(chosen)


def _table(name: str, kind: type[T], preset: Mapping[str, Any], given: Table) -> T:
    return _options(f"algo.{name}", kind, {**preset.get(name, {}), **given})


def _options(where: str, kind: type[T], table: Table) -> T:
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    for key in table:
        if key not in known:
            raise PartError(
                f"unknown setting {where}.{key}; known are {', '.join(known) or 'none'}"
            )
    try:
        options = msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise PartError(f"{where}: {error}") from error
    _refuse_no_number(where, msgspec.structs.asdict(options))
    return options


def _refuse_no_number(where: str, settings: Table) -> None:
    """Refuse nan, and infinite factors: they would make every batch one that cannot be trained.

    Raises:
        PartError: naming the setting.
    """
    for name, value in settings.items():
        table = value if isinstance(value, dict) else {"": value}
        for key, number in table.items():
            if isinstance(number, float) and (
                math.isnan(number) or (math.isinf(number) and name in _FACTORS)
            ):
                setting = ".".join(filter(None, (where, name, key)))
                raise PartError(f"{setting} must be a finite number, got {number}")


def _refuse(choice: AlgoChoice, section: AlgoSection) -> None:
    """Refuse what makes no sense together, and settings without effect, with the reason.

    Raises:
        PartError: naming the settings, and why.
    """
    for refusals in (_contradictions(choice), _without_effect(choice, section)):
        for reason, is_so in refusals.items():
            if is_so:
                raise PartError(reason)


def _contradictions(choice: AlgoChoice) -> dict[str, bool]:
    """Return what cannot be together, and whether it is."""
    names = {chosen.part.name for chosen in choice.corrections}
    advantage, kl, data = choice.advantage.part, choice.kl, choice.data
    has_ratio = choice.surrogate.part.name not in _WITHOUT_RATIO
    needs = choice.needs_of_tokens
    reads_parts = "reward_parts" in choice.advantage.needs
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
        "alone": reads_parts
        and (_shapes_rewards(data) or (choice.has_kl and kl.place == "reward")),
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
                or (choice.has_kl and kl.place == "reward")
            )
        ),
        'algo.data.zero_variance = "mask" leaves out groups of equal rewards, which teach here '
        "(algo.teacher, algo.likelihood, parts of rewards)": (
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
    """Return what is set and nothing reads, and whether it is."""
    names = {chosen.part.name for chosen in choice.corrections}
    data, options = choice.data, choice.advantage.options
    given = set(section.advantage) if isinstance(section.advantage, dict) else set()
    adaptive = isinstance(options, returns.GaeOptions) and options.length_adaptive
    return {
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
            not choice.needs_reference and bool({"reference", "renew_every"} & set(section.kl))
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
