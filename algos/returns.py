"""Advantages of tokens: discounted returns, generalized advantage estimation, whitening.

A token outside the mask was not chosen by the policy. It is passed over: the state that follows a
chosen token is the one in which the next token is chosen, and only chosen tokens are discounted.

Shapes: T tokens of B sequences laid end to end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import torch
from torch import Tensor, where
from torch.nn.functional import pad
from typing_extensions import override

from slipstream.algos.packing import Packing
from slipstream.algos.parts import Options, advantage
from slipstream.algos.ratios import upcast
from slipstream.algos.reduce import cumulated
from slipstream.algos.scans import scan_backward


def _alone(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Group of each sequence, and the sum over ranks. Shapes: B sequences."""

    of_sequence: Tensor  # [B] int64
    num_groups: int  # groups of the step
    longest: int  # most masked-in tokens of a sequence of the step
    summed: Callable[[Tensor], Tensor] = _alone  # any shape -> the sum over ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutcomes:
    """Reward of each token, and its critic's value.

    Optional fields are set for advantages that need them (``needs``).

    Raises:
        ValueError: a tensor does not fit the packing.
    """

    rewards: Tensor  # [T], 0.0 where nothing was rewarded
    packing: Packing
    values: Tensor | None = None  # [T], V of the state in which token t is chosen
    proximal: Tensor | None = None  # [T] log q
    squares: Tensor | None = None  # [T] sum over the vocabulary of q^2
    groups: Groups | None = None  # set if the packing is that of the whole step on this rank

    def __post_init__(self) -> None:
        """Reject tensors of other tokens."""
        for name in ("rewards", "values", "proximal", "squares"):
            found: Tensor | None = getattr(self, name)
            if found is not None and found.shape != self.packing.mask.shape:
                raise ValueError(
                    f"{name} has shape {tuple(found.shape)}, expected "
                    f"{tuple(self.packing.mask.shape)} as the mask"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAdvantages:
    """Advantages of tokens and the critic's targets, both 0.0 outside the mask."""

    advantages: Tensor  # [T]
    returns: Tensor | None  # [T], targets of a critic


def at_end(per_sequence: Tensor, packing: Packing) -> Tensor:
    """Return each sequence's value at its last masked-in token, 0 elsewhere. Shapes [B] -> [T]."""
    per_token = packing.spread(per_sequence)
    return where(packing.is_last, per_token, torch.zeros_like(per_token))


def at_turn_ends(per_turn: Tensor, packing: Packing) -> Tensor:
    """Return each turn's value at its last token, 0 elsewhere. Shapes [number of turns] -> [T].

    Raises:
        ValueError: there are not as many values as turns.
    """
    ends = packing.ends_turn
    if len(per_turn) != int(ends.sum()):
        raise ValueError(f"{len(per_turn)} values of turns came with {int(ends.sum())} turns")
    per_token = torch.zeros(len(ends), dtype=per_turn.dtype, device=ends.device)
    per_token[ends] = per_turn
    return per_token


class TimeOptions(Options, frozen=True, kw_only=True):
    """Settings of reinforce++-baseline."""

    discount: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    """Worth of a reward one step later (gamma)."""
    discount_by: Literal["token", "turn"] = "token"
    """A step is from a chosen token to the next, or from a turn to the next."""

    def factors(self, packing: Packing, like: Tensor) -> Tensor:
        """Return the worth at each token of what comes after it, of the dtype of ``like``. [T]."""
        factors = torch.full_like(like, self.discount)
        if self.discount_by == "token":
            return factors
        return where(packing.ends_turn, factors, torch.ones_like(like))


class DiscountOptions(TimeOptions, frozen=True, kw_only=True):
    """Settings of discounted-returns."""

    rewards: Literal["trajectory", "turns"] = "trajectory"
    """Where rewards are: all of it on a trajectory's last token, or each on that of its turn."""

    @property
    @override
    def needs(self) -> frozenset[str]:
        return frozenset({"turn_rewards"} if self.rewards == "turns" else ())


@advantage("discounted-returns", DiscountOptions, needs=("tokens",))
def discounted_returns(outcomes: TokenOutcomes, options: DiscountOptions) -> TokenAdvantages:
    """A_t = G_t = r_t + discount * G_(t+1): the rewards from here to the end of the sequence.

    With ``discount_by = "turn"`` the discount is 1 within a turn. With rewards of ``at_end``, a KL
    penalty in them and ``whiten`` after it, this is REINFORCE++ (arXiv 2501.03262).
    """
    return _returns(outcomes, options)


@advantage("reinforce++-baseline", TimeOptions, needs=("tokens", "centered", "siblings"))
def centered_returns(outcomes: TokenOutcomes, options: TimeOptions) -> TokenAdvantages:
    """A_t = G_t as in discounted-returns, of rewards less the mean of their group.

    With ``whiten`` after it, this is REINFORCE++ with a baseline (arXiv 2501.03262). The mean is
    taken before the reward is put on a token, by the caller, which knows the group.
    """
    return _returns(outcomes, options)


def _returns(outcomes: TokenOutcomes, options: TimeOptions) -> TokenAdvantages:
    packing = outcomes.packing
    rewards = _masked(outcomes.rewards, packing)
    returns = _discounted_sums(rewards, packing, options.factors(packing, rewards))
    return TokenAdvantages(advantages=returns, returns=returns)


class GaeOptions(DiscountOptions, frozen=True, kw_only=True):
    """Settings of gae."""

    over: Literal["tokens", "turns", "both"] = "tokens"
    """Temporal differences of tokens; of turns, each a single action, discounted by turn; or of
    turns, then of the tokens of each toward what its turn is worth (bi-level)."""
    decay: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.95
    """Weight of later temporal differences (lambda): 0 trusts the critic, 1 the rewards."""
    critic_decay: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """Lambda of the critic's targets; not set takes that of the advantages. VAPO has 1.0."""
    length_adaptive: bool = False
    """Take lambda = max(0, 1 - 1 / (length_alpha * length)) for each sequence, not decay."""
    length_alpha: Annotated[float, msgspec.Meta(gt=0)] = 0.05
    """How slowly lambda falls as sequences get shorter."""

    @property
    def decays(self) -> tuple[float, float]:
        """Lambda of the advantages, and of the critic's targets."""
        return self.decay, self.decay if self.critic_decay is None else self.critic_decay


@advantage("gae", GaeOptions, needs=("tokens", "values"))
def gae(outcomes: TokenOutcomes, options: GaeOptions) -> TokenAdvantages:
    """A_t = d_t + discount * lambda * A_(t+1), with d_t = r_t + discount * V_(t+1) - V_t.

    GAE (arXiv 1506.02438); the value after the last chosen token of a sequence is 0. The critic's
    targets are R_t = A_t + V_t. VAPO (arXiv 2504.05118) takes another lambda for the targets
    (``critic_decay``) and one that grows with the length for the advantages
    (``length_adaptive``); a length is the number of chosen tokens.

    With ``over = "turns"`` it is the same of turns, each one action (Turn-PPO, arXiv 2512.17008):
    r is the sum over a turn, V that of the state in which its first token is chosen, and all
    tokens of a turn have its A and its R.

    With ``over = "both"`` (VAGEN, arXiv 2510.16907) the same of turns, with the values at their
    last tokens, gives what each turn is worth: R_k = A_k + V_k. It is the reward of the turn's last
    token in GAE over its tokens, which are not discounted.

    Raises:
        ValueError: there are no values.
    """
    if outcomes.values is None:
        raise ValueError("gae needs the values of a critic, got None")
    packing = outcomes.packing
    values = _masked(outcomes.values, packing)
    rewards = _masked(outcomes.rewards, packing)
    if options.over != "tokens":
        over_turns = _gae_over_turns if options.over == "turns" else _bi_level_gae
        return over_turns(rewards, values, packing, options)
    factors = options.factors(packing, rewards)
    differences = rewards + factors * _next_chosen(values, packing) - values

    decay: float | Tensor = options.decay
    if options.length_adaptive:
        lengths = packing.counts.to(values.dtype).clamp(min=1)
        decay = packing.spread((1 - 1 / (options.length_alpha * lengths)).clamp(min=0))
    advantages = _discounted_sums(differences, packing, factors * decay)
    targets = advantages
    if options.critic_decay is not None:
        targets = _discounted_sums(differences, packing, factors * options.critic_decay)
    return TokenAdvantages(advantages=advantages, returns=targets + values)


def _gae_over_turns(
    rewards: Tensor, values: Tensor, packing: Packing, options: GaeOptions
) -> TokenAdvantages:
    """Return GAE in which a turn is one step. Shapes [T], 0.0 outside the mask."""
    starts, turns = packing.starts_turn, packing.turns
    firsts = values[starts]  # [number of turns], as all below
    earned = turns.sums(rewards)[: len(firsts)]
    of_trajectory = packing.sequence[starts]
    advantages, targets = (
        _gae_of_turns(earned, firsts, of_trajectory, options.discount, decay)
        for decay in options.decays
    )

    def at_tokens(per_turn: Tensor) -> Tensor:
        per_token = turns.spread(pad(per_turn, (0, turns.num_sequences - len(per_turn))))
        return where(packing.mask, per_token, 0.0)

    return TokenAdvantages(advantages=at_tokens(advantages), returns=at_tokens(targets + firsts))


def _bi_level_gae(
    rewards: Tensor, values: Tensor, packing: Packing, options: GaeOptions
) -> TokenAdvantages:
    """Return GAE over turns, and within each over its tokens. Shapes [T], 0.0 outside the mask."""
    ends, turns = packing.ends_turn, packing.turns
    lasts, of_trajectory = values[ends], packing.sequence[ends]

    def toward_worth(decay: float) -> Tensor:
        worth = rewards.clone()
        worth[ends] = lasts + _gae_of_turns(
            rewards[ends], lasts, of_trajectory, options.discount, decay
        )
        differences = worth + _next_chosen(values, turns) - values
        return _discounted_sums(differences, turns, torch.full_like(values, decay))

    advantages, targets = (toward_worth(decay) for decay in options.decays)
    return TokenAdvantages(
        advantages=advantages, returns=where(packing.mask, targets + values, 0.0)
    )


def _gae_of_turns(
    earned: Tensor, values: Tensor, of_trajectory: Tensor, discount: float, decay: float
) -> Tensor:
    """Return A_k = d_k + discount * decay * A_(k+1) of the turns of trajectories. All [K]."""
    goes_on = (pad(of_trajectory, (0, 1), value=-1)[1:] == of_trajectory).to(values.dtype)
    differences = earned + discount * goes_on * pad(values, (0, 1))[1:] - values
    return scan_backward(differences, goes_on * discount * decay)


class OptimalTokenBaselineOptions(DiscountOptions, frozen=True, kw_only=True):
    """Settings of optimal-token-baseline."""

    tail: Literal["own", "zero"] = "own"
    """Baseline where no sibling is as long: the sequence's own return (it learns nothing), or 0."""


@advantage(
    "optimal-token-baseline",
    OptimalTokenBaselineOptions,
    needs=("tokens", "siblings", "whole_step", "squares"),
)
def optimal_token_baseline(
    outcomes: TokenOutcomes, options: OptimalTokenBaselineOptions
) -> TokenAdvantages:
    """A_t = G_t - sum_i W_it G_it / sum_i W_it over the siblings that have a token t.

    G as in discounted-returns; W_t = sum_(j <= t) (1 - 2 q_j + sum_v q_j(v)^2): the squared
    norm of the gradient of log q by the logits, added up to t, so that the baseline has the least
    variance where gradients of tokens are orthogonal (verl's optimal_token_baseline). In a group of
    one the baseline is 0.

    Raises:
        ValueError: the groups, log-probabilities or squares are missing.
    """
    groups, proximal, squares = outcomes.groups, outcomes.proximal, outcomes.squares
    if groups is None or proximal is None or squares is None:
        raise ValueError("optimal-token-baseline needs groups, proximal and squares, got None")
    packing = outcomes.packing
    mask = packing.mask
    rewards = _masked(outcomes.rewards, packing)
    returns = _discounted_sums(rewards, packing, options.factors(packing, rewards))
    chosen = _masked(proximal, packing).double().exp()
    energy = where(mask, 1.0 - 2.0 * chosen + _masked(squares, packing).double(), 0.0)
    weights = _from_start(energy.clamp(min=0.0), packing)
    position = (_from_start(mask.double(), packing).long() - 1).clamp(min=0)
    group = packing.spread(groups.of_sequence)
    place = (group * groups.longest + position)[mask]
    there = torch.stack([torch.ones_like(weights), weights, weights * returns], 1)[mask]
    sums = there.new_zeros(groups.num_groups * groups.longest, 3).index_add(0, place, there)
    sums = groups.summed(sums)
    first = sums[:: groups.longest, 0]  # siblings that have a first token
    siblings, total, weighted = sums[place].unbind(1)
    is_single = first[group[mask]] <= 1
    baseline = where(total > 0, weighted / where(total > 0, total, 1.0), 0.0)
    has_none = is_single if options.tail == "own" else is_single | (siblings <= 1)
    baselines = torch.zeros_like(weights)
    baselines[mask] = where(has_none, 0.0, baseline)
    advantages = where(mask, returns - baselines, 0.0).to(returns.dtype)
    return TokenAdvantages(advantages=advantages, returns=returns)


def moments(
    per_token: Tensor, mask: Tensor, index: Tensor, num: int, copies: Tensor | None = None
) -> Tensor:
    """Return count, sum and sum of squares over the mask. Shapes [T] -> [num, 3] float64.

    Those of the parts of a batch add up to those of the batch.

    Args:
        per_token: [T].
        mask: [T] bool.
        index: [T] int64, the bin of each token: zeros for the batch, or its group.
        num: how many there are.
        copies: [T], how often each token is in the batch; once if None.
    """
    values = where(mask, per_token, torch.zeros_like(per_token)).double()
    terms = torch.stack([mask.double(), values, values.square()], dim=1)
    if copies is not None:
        terms = terms * copies.unsqueeze(1)
    return torch.zeros(num, 3, dtype=torch.float64, device=mask.device).index_add(0, index, terms)


def whiten(
    per_token: Tensor,
    mask: Tensor,
    index: Tensor,
    moments: Tensor,
    *,
    shift_mean: bool = True,
    divide_by_std: bool = True,
    leave_one_out: bool = False,
    epsilon: float = 1e-8,
    unbiased: bool = True,
) -> Tensor:
    """Return (x - mean) / sqrt(var + epsilon), 0.0 outside the mask. Shapes [T] -> [T].

    Args:
        per_token: [T].
        mask: [T] bool.
        index: [T] int64, as it was for the moments.
        moments: [num, 3], of ``moments``, added over all parts of the batch.
        shift_mean: False keeps the mean and changes the spread about it alone.
        divide_by_std: False leaves x - mean.
        leave_one_out: take the mean of all but the token itself, 0 where it is the only one.
        epsilon: added to the variance.
        unbiased: divide the variance by count - 1; a count of 1 has variance 0.
    """
    count, total, squares = moments.unbind(dim=1)
    mean = total / count.clamp(min=1)
    variance = (squares - total * mean) / (count - int(unbiased)).clamp(min=1)
    scale = torch.ones_like(variance)
    if divide_by_std:
        scale = (variance.clamp(min=0) + epsilon).rsqrt()
    if leave_one_out:
        scale = scale * where(count > 1, count / (count - 1).clamp(min=1), 1.0)
        mean = where(count > 1, mean, 0.0)
    values = upcast(where(mask, per_token, torch.zeros_like(per_token)))
    whitened = (values - mean[index]) * scale[index]
    if not shift_mean:
        whitened = whitened + mean[index]
    return where(mask, whitened, torch.zeros_like(whitened)).to(values.dtype)


def _masked(per_token: Tensor, packing: Packing) -> Tensor:
    return upcast(where(packing.mask, per_token.detach(), torch.zeros_like(per_token)))


def _discounted_sums(per_token: Tensor, packing: Packing, factors: Tensor) -> Tensor:
    """Return y_t = x_t + f_t * y of the next chosen token, 0.0 outside the mask. [T] -> [T]."""
    chosen = where(packing.mask, per_token, 0.0)
    factors = where(packing.mask, factors, torch.ones_like(per_token))
    sums = scan_backward(chosen, where(_has_next(packing), factors, 0.0))
    return where(packing.mask, sums, 0.0)


def _next_chosen(values: Tensor, packing: Packing) -> Tensor:
    """Return the value at the next chosen token of the sequence, 0.0 if none. Shapes [T]."""
    has_next = _has_next(packing)
    here_or_later = scan_backward(values, (has_next & ~packing.mask).to(values.dtype))
    return where(has_next, pad(here_or_later, (0, 1))[1:], 0.0)


def _from_start(per_token: Tensor, packing: Packing) -> Tensor:
    """Return the sum over the masked-in tokens of the sequence up to each token. Shapes [T]."""
    upto = cumulated(where(packing.mask, per_token, 0.0))
    totals = packing.sums(per_token)
    return upto - packing.spread(cumulated(totals) - totals)


def _has_next(packing: Packing) -> Tensor:
    """Return True where the token to the right is of the same sequence. Shapes [T]."""
    return pad(packing.sequence, (0, 1), value=-1)[1:] == packing.sequence
