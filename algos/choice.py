"""Parts of an algorithm, and the settings of the tables in the section [algo]."""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from slipstream.algos.kl import Kind as KlKind
from slipstream.algos.parts import AnyPart, Options
from slipstream.algos.reduce import Rule
from slipstream.algos.section import Whiten

NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class ReduceOptions(Options, frozen=True, kw_only=True):
    """[algo.reduce]: how losses of tokens become one number."""

    name: Rule = "token-mean"
    """Mean over all tokens of a minibatch, or over sequences first."""
    length: NotNegative = 0.0
    """Constant of sequence-mean-token-sum-norm; 0 is sampling.max_response_tokens."""
    denominator: Literal["original", "kept"] = "original"
    """Whether tokens that a correction rejected still count in the denominator."""


class KlOptions(Options, frozen=True, kw_only=True):
    """[algo.kl]: the KL term that holds the policy near a reference policy."""

    coefficient: NotNegative = 0.0
    """Weight of the KL divergence; 0 needs no reference policy."""
    to: Literal["reference", "behavior"] = "reference"
    """The other policy: a frozen one, or the policy that chose the token."""
    name: KlKind = "k3"
    """Estimator; k1+ and k3+ have the gradient of k2, full takes all logits."""
    place: Literal["loss", "reward"] = "loss"
    """Added to the loss, or taken from the reward of each token."""
    importance_weighted: bool = False
    """Weigh the estimate of a token by current / behavior: unbiased for stale tokens."""
    reference: str = ""
    """Hugging Face folder of the reference policy, its URL or its name on the Hugging Face hub;
    empty is run.model."""
    renew_every: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Copy the policy into the reference every N learner steps; 0 is never."""


class TeacherOptions(Options, frozen=True, kw_only=True):
    """[algo.teacher]: a policy to distill from; log teacher - log proximal is added to advantages.

    It needs `model` or `endpoint`, and the same token ids as this run.
    """

    coefficient: NotNegative = 0.0
    """Weight of the teacher's part of the advantage, added after whitening; 0 has no teacher."""
    model: str = ""
    """Hugging Face folder of a teacher that the learner holds itself, its URL or its name on the
    Hugging Face hub."""
    endpoint: str = ""
    """URL of an SGLang server that serves the teacher, such as http://10.0.0.7:30000."""
    api_key_file: str = ""
    """File with the bearer token of the endpoint, readable by its owner only."""
    concurrency: Annotated[int, msgspec.Meta(ge=1)] = 32
    """Concurrent requests to the endpoint from each requesting rank of the learner."""
    clip: Positive | None = None
    """The difference counts as this many nats at most; not set for no limit."""


class LikelihoodOptions(Options, frozen=True, kw_only=True):
    """[algo.likelihood]: also imitate right answers: VAPO's positive example loss."""

    coefficient: NotNegative = 0.0
    """Weight of the mean of -log pi over the tokens of right answers."""
    least_reward: float = 1.0
    """An answer is right from this reward on, as it was scored."""


class CriticOptions(Options, frozen=True, kw_only=True):
    """[algo.critic]: the value model, for advantages that need one."""

    lr: Positive = 1e-5
    """Learning rate of the critic; its schedule is the learner's."""
    clip: Positive = 0.2
    """Values move at most this far within a learner step; inf for no limit."""
    huber: Positive | None = None
    """Errors beyond this count linearly (Huber) instead of squared; not set squares all."""
    warmup_steps: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Learner steps that train the critic alone; the policy's learning rate starts after them."""


class DataOptions(Options, frozen=True, kw_only=True):
    """[algo.data]: changes to rewards and to the batch before advantages."""

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
        """Inputs that it needs with these settings; of ``NEEDS``."""
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
        """True if there is a critic."""
        return "values" in self.advantage.needs

    @property
    def needs_of_tokens(self) -> frozenset[str]:
        """Inputs that the surrogate and the corrections need."""
        return self.surrogate.needs.union(*(chosen.needs for chosen in self.corrections))

    @property
    def has_kl(self) -> bool:
        """True if a KL divergence is in the loss or in the reward."""
        return self.kl.coefficient > 0

    @property
    def needs_reference(self) -> bool:
        """True if there is a reference policy."""
        of_kl = self.has_kl and self.kl.to == "reference"
        return of_kl or "reference" in self.needs_of_tokens

    @property
    def has_teacher(self) -> bool:
        """True if there is a teacher."""
        return self.teacher.coefficient > 0

    @property
    def learns_from_equal_rewards(self) -> bool:
        """True if a group of equal rewards teaches something."""
        if self.has_teacher or self.likelihood.coefficient > 0:
            return True
        if {"reward_parts", "turn_rewards"} & self.advantage.needs:
            return True
        return not self.is_group_relative and self.data.normalize != "group"

    @property
    def is_group_relative(self) -> bool:
        """True if a trajectory is compared with its siblings."""
        return "siblings" in self.advantage.needs
