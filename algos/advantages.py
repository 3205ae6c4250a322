"""Advantages of whole trajectories, from their rewards and those of their siblings.

Every part takes the outcomes of a step and returns one float64 per trajectory, or if it needs
``turn_rewards`` per turn. A group of one has
no siblings to compare with: unless the docstring gives another, its baseline is 0.

Shapes: N trajectories of a step, K turns of theirs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
import torch
from torch import Tensor, where
from typing_extensions import override

from slipstream.algos.parts import NoOptions, Options, advantage
from slipstream.algos.shaping import (
    group_centered,
    group_deviations,
    group_extremes,
    group_sums,
    sibling_deviations,
)
from slipstream.algos.turns import TurnRewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Rewards and lengths of the trajectories of one step.

    Raises:
        ValueError: the tensors do not fit together, or a group is not below num_groups.
    """

    rewards: Tensor  # [N], held as float64
    groups: Tensor  # [N] int64, the group of each trajectory, in any order
    num_groups: int
    lengths: Tensor  # [N], response tokens
    greedy_rewards: Tensor | None = None  # [N], of a greedy answer to the same prompt
    parts: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [N] float64, NaN: none
    turns: TurnRewards | None = None  # None: no trajectory has rewards of turns

    def __post_init__(self) -> None:
        """Reject outcomes that no part could use."""
        if self.rewards.dim() != 1:
            raise ValueError(f"rewards must be [N], got {tuple(self.rewards.shape)}")
        for name in ("groups", "lengths", "greedy_rewards"):
            found: Tensor | None = getattr(self, name)
            if found is not None and found.shape != self.rewards.shape:
                raise ValueError(
                    f"{name} has shape {tuple(found.shape)}, expected "
                    f"{tuple(self.rewards.shape)} as the rewards"
                )
        for name, values in self.parts.items():
            if values.shape != self.rewards.shape:
                raise ValueError(
                    f"part {name!r} has shape {tuple(values.shape)}, expected "
                    f"{tuple(self.rewards.shape)} as the rewards"
                )
        if self.turns is not None and self.turns.counts.shape != self.rewards.shape:
            raise ValueError(
                f"turns of {len(self.turns.counts)} trajectories came with {len(self.rewards)} "
                "rewards"
            )
        if bool(((self.groups < 0) | (self.groups >= self.num_groups)).any()):
            raise ValueError(
                f"groups must be 0 to {self.num_groups - 1} (num_groups = {self.num_groups}), "
                f"got {int(self.groups.min())} to {int(self.groups.max())}"
            )
        object.__setattr__(self, "rewards", self.rewards.double())

    @property
    def siblings(self) -> Tensor:
        """Size of each trajectory's group, [N] float64."""
        return group_sums(torch.ones_like(self.rewards), self.groups, self.num_groups)

    def centered(self, weights: Tensor | None = None) -> Tensor:
        """Return r minus the (weighted) mean of the group, r itself in a group of one. [N]."""
        centered = group_centered(self.rewards, self.groups, self.num_groups, weights)
        return where(self.siblings > 1, centered, self.rewards)

    def against_others(self) -> Tensor:
        """Return r minus the mean of the other siblings, r itself in a group of one. [N]."""
        siblings = self.siblings
        return self.centered() * where(siblings > 1, siblings / (siblings - 1), 1.0)

    def deviations(self) -> Tensor:
        """Return the unbiased standard deviation of the group, 1.0 in a group of one. [N]."""
        return group_deviations(self.rewards, self.groups, self.num_groups)

    def largest(self, values: Tensor) -> Tensor:
        """Return the maximum over the group. Shapes [N] -> [N]."""
        return group_extremes(values, self.groups, self.num_groups, "amax")

    @property
    def known_turns(self) -> TurnRewards:
        """The rewards of turns.

        Raises:
            ValueError: there are none.
        """
        if self.turns is None:
            raise ValueError(
                "no trajectory of this step has rewards of turns: the Step.reward of an "
                "environment and the turn_rewards of a reward function are some"
            )
        return self.turns

    def by_turn(self, discount: float) -> "Outcomes":
        """Return the K turns as if they were trajectories, in groups of one number of turn each.

        Their rewards are G_k = r_k + discount * G_(k+1). A turn that no sibling has is in a group
        of one.

        Raises:
            ValueError: there are no rewards of turns.
        """
        turns = self.known_turns
        longest = int(turns.counts.max())
        return Outcomes(
            rewards=turns.returns(discount),
            groups=self.groups[turns.trajectory] * longest + turns.number,
            num_groups=self.num_groups * longest,
            lengths=turns.tokens,
        )


class SiblingOptions(Options, frozen=True, kw_only=True):
    """Settings of rloo."""

    over: Literal["trajectories", "turns"] = "trajectories"
    """Compare rewards of siblings; or turn by turn what was still earned from there on."""
    discount: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    """Worth of a reward one turn later (gamma), over turns."""

    @property
    @override
    def needs(self) -> frozenset[str]:
        return frozenset({"turn_rewards"} if self.over == "turns" else ())


def _compared(
    formula: Callable[[Outcomes], Tensor], outcomes: Outcomes, options: SiblingOptions
) -> Tensor:
    """Return a formula's advantages of trajectories [N], or of turns [K]."""
    if options.over == "trajectories":
        return formula(outcomes)
    by_turn = outcomes.by_turn(options.discount)
    has_siblings = outcomes.siblings[outcomes.known_turns.trajectory] > 1
    return where(has_siblings & (by_turn.siblings == 1), 0.0, formula(by_turn))


class GrpoOptions(SiblingOptions, frozen=True, kw_only=True):
    """Settings of grpo."""

    divide_by_std: bool = True
    """Divide by the standard deviation; without it, this is Dr. GRPO."""
    epsilon: Annotated[float, msgspec.Meta(ge=0)] = 1e-6
    """Added to the standard deviation."""
    std_over: Literal["group", "siblings", "batch", "advantages"] = "group"
    """Whose standard deviation: the rewards' of the group, or of its others (NeMo-RL); of all
    rewards of the step (Lite PPO), or of all its advantages (ScaleRL)."""
    leave_one_out: bool = False
    """Take the mean of the other siblings alone, as rloo does."""


@advantage("grpo", GrpoOptions, needs=("siblings",))
def grpo(outcomes: Outcomes, options: GrpoOptions) -> Tensor:
    """A = (r - mean(r)) / (std(r) + epsilon) over the group.

    DeepSeekMath (arXiv 2402.03300) section 4.1.2, with the unbiased standard deviation. Without
    ``divide_by_std`` it is A = r - mean(r), Dr. GRPO (arXiv 2503.20783); with the standard
    deviation of all rewards of the step, Lite PPO (arXiv 2508.08221), and with that of all r -
    mean(r), ScaleRL (arXiv 2510.13786). A group of equal rewards has advantage 0.0; one of a single
    trajectory has mean 0 and std 1.

    With ``std_over = "siblings"``, std is that of the other siblings, and A is not divided where
    their rewards are equal. Together with ``leave_one_out`` it is NeMo-RL's default.

    With ``over = "turns"``, A_k is the same of G_k = r_k + discount * G_(k+1), over the siblings
    that have a turn k; a turn that no sibling has learns nothing.
    """

    def formula(given: Outcomes) -> Tensor:
        centered = given.against_others() if options.leave_one_out else given.centered()
        if not options.divide_by_std:
            return centered
        if options.std_over == "siblings":
            others = sibling_deviations(given.rewards, given.groups, given.num_groups)
            return centered / where(others > 0, others + options.epsilon, 1.0)
        deviations = given.deviations()
        if options.std_over != "group":
            compared = where(given.siblings > 1, centered, 0.0)
            of_step = given.rewards if options.std_over == "batch" else compared
            deviations = group_deviations(of_step, torch.zeros_like(given.groups), 1)
        return _divided(centered, deviations + options.epsilon)

    return _compared(formula, outcomes, options)


@advantage("rloo", SiblingOptions, needs=("siblings",))
def rloo(outcomes: Outcomes, options: SiblingOptions) -> Tensor:
    """A = r - the mean reward of the other siblings.

    RLOO (arXiv 2402.14740), computed as n / (n - 1) (r - mean(r)) in a group of n. Over turns as
    in ``grpo``.
    """
    return _compared(Outcomes.against_others, outcomes, options)


@advantage("opo", needs=("siblings",))
def opo(outcomes: Outcomes, _: NoOptions) -> Tensor:
    """A = r - the mean reward of the group, weighted by the lengths of the responses.

    OPO (arXiv 2505.23585): the baseline of least variance if a gradient's square grows with length.
    """
    return outcomes.centered(outcomes.lengths)


@advantage("maxrl", needs=("siblings",))
def maxrl(outcomes: Outcomes, _: NoOptions) -> Tensor:
    """A = (r - mean(r)) / mean(r) over the group, 0 where the mean is 0.

    MaxRL (arXiv 2602.02710): with rewards of 0 and 1, in expectation the gradient of the likelihood
    of a right answer, so that hard prompts weigh 1 / p. A group of one has advantage 0.

    Raises:
        ValueError: a reward is negative, so that the mean is no success rate.
    """
    if bool((outcomes.rewards < 0).any()):
        raise ValueError(
            f"maxrl needs rewards >= 0, got {float(outcomes.rewards.min()):g} (algo.data.bias)"
        )
    groups, num_groups = outcomes.groups, outcomes.num_groups
    centered = group_centered(outcomes.rewards, groups, num_groups)
    means = group_sums(outcomes.rewards, groups, num_groups) / outcomes.siblings
    return where(means > 0, centered / where(means > 0, means, 1.0), 0.0)


class GdpoOptions(Options, frozen=True, kw_only=True):
    """Settings of gdpo."""

    weights: dict[str, float] = msgspec.field(default_factory=dict)
    """Weight of each part of the reward by its name; needed. Other parts are figures only."""
    epsilon: Annotated[float, msgspec.Meta(ge=0)] = 1e-6
    """Added to each standard deviation."""


@advantage("gdpo", GdpoOptions, needs=("siblings", "reward_parts"))
def gdpo(outcomes: Outcomes, options: GdpoOptions) -> Tensor:
    """A = the parts of the reward normalized each within the group, added, normalized in the batch.

    GDPO (arXiv 2601.05242). With S = sum over parts k of weight_k (r_k - mean(r_k)) / (std(r_k) +
    epsilon), means and deviations over the group, A = (S - mean(S)) / (std(S) + epsilon) over all
    trajectories of the step. A trajectory without a part has 0 for it, and is in neither its mean
    nor its deviation; a step may hold none with that property.

    Raises:
        ValueError: no reward of the step has a part that is weighed.
    """
    weights = options.weights
    known = sorted(weights.keys() & outcomes.parts.keys())
    if not known:
        raise ValueError(
            f"algo.advantage.weights names {', '.join(sorted(weights)) or 'nothing'}; the parts of "
            f"these rewards are {', '.join(sorted(outcomes.parts)) or 'none'}"
        )
    total = torch.zeros_like(outcomes.rewards)
    for name in known:
        values = outcomes.parts[name].double()
        there = ~values.isnan()
        groups = outcomes.groups[there]
        centered = group_centered(values[there], groups, outcomes.num_groups)
        deviations = group_deviations(values[there], groups, outcomes.num_groups)
        total[there] += weights[name] * _divided(centered, deviations + options.epsilon)
    one_group = torch.zeros_like(outcomes.groups)
    centered = group_centered(total, one_group, 1)
    return _divided(centered, group_deviations(total, one_group, 1) + options.epsilon)


@advantage("zero")
def zero(outcomes: Outcomes, _: NoOptions) -> Tensor:
    """A = 0: the policy learns from elsewhere, such as a teacher (algo.teacher)."""
    return torch.zeros_like(outcomes.rewards)


class PassAtKOptions(Options, frozen=True, kw_only=True):
    """Settings of pass-at-k."""

    divide_by_std: bool = True
    """Divide by the standard deviation of the group."""
    epsilon: Annotated[float, msgspec.Meta(ge=0)] = 1e-6
    """Added to the standard deviation."""


@advantage("pass-at-k", PassAtKOptions, needs=("siblings",))
def pass_at_k(outcomes: Outcomes, options: PassAtKOptions) -> Tensor:
    """A = the lead of the best over the second best for the best, 0 for its siblings.

    The gradient of the expected best of k (arXiv 2503.19595). Where two share the best reward,
    there is no leader.

    Raises:
        ValueError: a group has one trajectory, so that there is no second best.
    """
    if bool((outcomes.siblings < 2).any()):
        raise ValueError("pass-at-k needs at least 2 siblings in every group, got a group of 1")
    rewards = outcomes.rewards
    is_best = rewards == outcomes.largest(rewards)
    second = outcomes.largest(where(is_best, -torch.inf, rewards))
    num_best = group_sums(is_best.double(), outcomes.groups, outcomes.num_groups)
    lead = where(is_best & (num_best == 1), rewards - second, 0.0)
    if not options.divide_by_std:
        return lead
    return _divided(lead, outcomes.deviations() + options.epsilon)


@advantage("remax", needs=("greedy",))
def remax(outcomes: Outcomes, _: NoOptions) -> Tensor:
    """A = r - the reward of the greedy answer to the same prompt.

    ReMax (arXiv 2310.10505).

    Raises:
        ValueError: there are no greedy rewards.
    """
    if outcomes.greedy_rewards is None:
        raise ValueError("remax needs greedy_rewards, got None")
    return outcomes.rewards - outcomes.greedy_rewards.double()


@advantage("reinforce")
def plain(outcomes: Outcomes, _: NoOptions) -> Tensor:
    """A = r.

    REINFORCE (Williams, 1992) without a baseline.
    """
    return outcomes.rewards


def _divided(values: Tensor, deviations: Tensor) -> Tensor:
    """Return values by their deviations, 0 where nothing deviates; NaN stays NaN. Shapes [N]."""
    return where(deviations == 0, 0.0, values / where(deviations == 0, 1.0, deviations))
