"""One algorithm: rewards in, advantages, corrections and the loss of a microbatch out.

Everything that is summed over a minibatch is summed over all of its microbatches and ranks, so that
nothing here depends on how sequences were packed.

Shapes: T tokens of B sequences of one microbatch, N trajectories of a learner step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor, where

from slipstream.algos.advantages import Outcomes
from slipstream.algos.choice import AlgoChoice
from slipstream.algos.corrections import Correction, CorrectionInputs, combined
from slipstream.algos.diagnostics import Diagnosed, Sums, diagnostic_sums
from slipstream.algos.kl import kl_estimate
from slipstream.algos.packing import Packing
from slipstream.algos.presets import IMITATION
from slipstream.algos.ratios import log_ratio, upcast
from slipstream.algos.reduce import Denominators, masked_sum, reduced
from slipstream.algos.returns import TokenAdvantages, TokenOutcomes, at_end, at_turn_ends
from slipstream.algos.shaping import (
    normalized,
    overlong_filter,
    overlong_penalty,
    resampling,
    scaled,
    zero_variance,
)
from slipstream.algos.surrogates import SurrogateInputs, Terms, WholeMinibatch
from slipstream.algos.turns import TurnRewards


@dataclass(frozen=True, slots=True, kw_only=True)
class RightAnswers:
    """Marks the sequences of a microbatch that are right answers."""

    is_right: Tensor  # [B] bool
    num_tokens: float  # tokens of right answers in the whole minibatch, copies counted


class PolicyOutputs(NamedTuple):
    """A policy's figures for each token, in nats, 0.0 outside the loss mask. Shapes [T]."""

    logprobs: Tensor
    entropy: Tensor
    full_kl: Tensor | None = None  # KL(this || reference) over all tokens that could be chosen
    squares: Tensor | None = None  # sum of the squares of their probabilities


@dataclass(slots=True, kw_only=True)
class LossInputs:
    """Inputs of the loss of a microbatch. Logprobs are 0.0 outside the mask.

    A learner's own microbatch inherits from it, and fills it before the first update of its step.
    """

    proximal: Tensor | None = None  # [T]; None where the current policy still is the proximal one
    behavior: Tensor  # [T]
    advantages: Tensor  # [T]
    packing: Packing
    denominators: Denominators  # divisors of its minibatch
    kept: Denominators | None = None  # the surrogate's, where rejected tokens do not count
    reference: Tensor | None = None  # [T]
    teacher: Tensor | None = None  # [T] log teacher, without gradient: see advantages
    lags: Tensor | None = None  # [T] int
    copies: Tensor | None = None  # [B] how often each sequence is in the batch
    right: RightAnswers | None = None
    minibatch: WholeMinibatch | None = None  # set if the surrogate needs it
    correction: Correction | None = None  # set if it was needed before the first gradient

    def check(self) -> None:
        """Reject misaligned tensors here, so that no part has to."""
        want = self.packing.mask.shape
        for field in fields(LossInputs):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and field.name != "copies" and value.shape != want:
                raise ValueError(
                    f"{field.name} has shape {tuple(value.shape)}, expected {tuple(want)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The rewards to learn from, and the trained part of the batch. Shapes [N]."""

    rewards: Tensor  # float64
    copies: Tensor  # int64, 0 where a trajectory trains nothing
    turns: TurnRewards | None = None  # add up to the rewards; set if advantages need them


class Algorithm:
    """The parts of one run's algorithm, put together. Pure: holds settings, no state."""

    def __init__(self, choice: AlgoChoice, *, max_response_tokens: int) -> None:
        """Compose the choice of ``slipstream.algos.config.choice_of``.

        Args:
            choice: parts and their settings.
            max_response_tokens: the run's; overlong rules and Dr. GRPO's constant refer to it.
        """
        self.choice = choice
        self._max_response_tokens = max_response_tokens
        self._corrections = sorted(
            choice.corrections, key=lambda chosen: "first" not in chosen.part.needs
        )
        of_corrections = frozenset[str]().union(*(chosen.needs for chosen in choice.corrections))
        self.corrects_before = (
            "whole_minibatch" in of_corrections or choice.reduce.denominator == "kept"
        )
        """Whether a minibatch's correction must be known before its first gradient."""
        self.shows_minibatch = "whole_minibatch" in choice.surrogate.needs
        """Whether the surrogate is shown all of a minibatch."""
        self.imitates = choice.preset == IMITATION
        """Whether rewards are those of demonstrations, and the loss tells what is learned."""
        self.charges_kl = choice.has_kl and choice.kl.place == "reward"
        """Whether rewards are less a KL divergence."""
        self.needs_squares = "squares" in choice.advantage.needs
        """Whether advantages need the sum of squared probabilities at each token."""
        self.needs_whole_step = "whole_step" in choice.advantage.needs
        """Whether advantages of tokens are computed for all of a step at once."""
        self.needs_proximal = (
            self.corrects_before
            or self.shows_minibatch
            or self.charges_kl
            or choice.has_teacher
            or self.needs_squares
            or self.needs_whole_step
        )
        """Whether the proximal policy's log-probabilities must be known before training."""
        self.needs_full_kl = choice.has_kl and choice.kl.name == "full"
        """Whether the loss needs the KL divergence over all tokens that could be chosen."""
        estimates = choice.has_kl and choice.kl.to == "reference" and not self.needs_full_kl
        self.needs_reference_logprobs = estimates or "reference" in choice.needs_of_tokens
        """Whether the reference policy's log-probabilities must be known."""
        self.is_token_level = "tokens" in choice.advantage.needs
        """Whether advantages are of tokens and not of trajectories."""
        self.centers_rewards = "centered" in choice.advantage.needs
        """Whether rewards are less the mean of their group before they are put on a token."""
        self.needs_turn_rewards = "turn_rewards" in choice.advantage.needs
        """Whether advantages are of the rewards of turns."""

    def trains_policy(self, step: int) -> bool:
        """Return True if a learner step trains the policy, not its critic alone."""
        return not self.choice.needs_values or step >= self.choice.critic.warmup_steps

    def renews_reference(self, step: int) -> bool:
        """Return True if the reference policy becomes the policy after this learner step."""
        every = self.choice.kl.renew_every
        return every > 0 and step % every == 0

    def prepared(
        self, outcomes: Outcomes, is_truncated: Tensor, generator: torch.Generator
    ) -> Prepared:
        """Return shaped rewards, and how often each trajectory is trained. Shapes [N].

        ``is_truncated`` [N] are responses that ended at the length limit. ``generator``, equal on
        all ranks, draws trajectories again (PF-PPO).
        """
        data, groups, num_groups = self.choice.data, outcomes.groups, outcomes.num_groups
        rewards = scaled(outcomes.rewards, scale=data.scale, bias=data.bias, clip=data.clip)
        if data.overlong_buffer > 0:
            rewards = rewards + overlong_penalty(
                outcomes.lengths,
                max_tokens=self._max_response_tokens,
                buffer_tokens=max(1, round(data.overlong_buffer * self._max_response_tokens)),
                factor=data.overlong_penalty,
            )
        if data.normalize != "none":
            rewards = normalized(
                rewards, groups, num_groups, over=data.normalize, divide_by_std=True, epsilon=1e-6
            )
        copies = torch.ones_like(groups)
        if data.resample != "none":
            copies = resampling(
                rewards,
                generator,
                strategy=data.resample,
                power=data.resample_power,
                share=data.resample_share,
            )
        if data.overlong_filter:
            copies = copies * overlong_filter(is_truncated)
        if data.zero_variance == "mask":
            copies = copies * ~zero_variance(outcomes.rewards, groups, num_groups)
        turns = None
        if self.needs_turn_rewards and outcomes.turns is not None:
            turns = outcomes.turns.adding_up_to(rewards, scale=data.scale)
        return Prepared(rewards=rewards, copies=copies, turns=turns)

    def trajectory_advantages(self, outcomes: Outcomes) -> Tensor:
        """Return one advantage per trajectory, [N]; where turns have rewards per turn, [K].

        Only where not ``is_token_level``.
        """
        advantage = self.choice.advantage
        values: Tensor = advantage.part.function(outcomes, advantage.options)
        return values

    def token_advantages(self, given: TokenOutcomes) -> TokenAdvantages:
        """Return advantages of tokens and a critic's targets. Only where ``is_token_level``."""
        advantage = self.choice.advantage
        result: TokenAdvantages = advantage.part.function(given, advantage.options)
        return result

    def taught(self, proximal: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        """Return a teacher's term of the advantages: c (log teacher - log q). Shapes [T].

        On average over tokens of q it is the slope of -c KL(q || teacher) of each token where it
        is: its effect on later tokens is not included (on-policy distillation, arXiv
        2306.13649; https://thinkingmachines.ai/blog/on-policy-distillation).
        """
        options = self.choice.teacher
        difference = log_ratio(target=teacher.detach(), sampled_from=proximal, mask=mask)
        if options.clip is not None:
            difference = difference.clamp(-options.clip, options.clip)
        return options.coefficient * difference

    def token_rewards(self, rewards: Tensor, kl: Tensor | None, packing: Packing) -> Tensor:
        """Return each reward on the last token that it is for, less the KL penalty of every token.

        Args:
            rewards: [B], or of the turns of the microbatch where those have rewards.
            kl: [T] of ``reward_kl``, or None.
            packing: layout of the microbatch.
        """
        put = at_turn_ends if self.needs_turn_rewards else at_end
        per_token = put(rewards, packing)
        return per_token if kl is None else per_token - self.choice.kl.coefficient * kl

    def reward_kl(self, proximal: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
        """Return the divergence that the reward is charged with, by token. Shapes [T]."""
        return kl_estimate(
            self.choice.kl.name, current=proximal, reference=reference, mask=mask
        ).detach()

    def correct(
        self,
        *,
        proximal: Tensor,
        behavior: Tensor,
        advantages: Tensor,
        lags: Tensor | None,
        packing: Packing,
        entropy: Tensor | None = None,
        reference: Tensor | None = None,
        gather: Callable[[Tensor], Tensor] = lambda values: values,
    ) -> Correction:
        """Combine all corrections. Arguments as in ``CorrectionInputs``.

        A replacement of the proximal policy comes first: the others correct for the replaced one.
        """
        given = CorrectionInputs(
            proximal=proximal.detach(),
            behavior=behavior,
            advantages=advantages,
            lags=lags,
            packing=packing,
            entropy=None if entropy is None else entropy.detach(),
            reference=reference,
            gather=gather,
        )
        results = []
        for chosen in self._corrections:
            result: Correction = chosen.part.function(given, chosen.options)
            if result.proximal is not None:
                given = replace(given, proximal=result.proximal)
            results.append(result)
        return combined(results, packing)

    def denominators(
        self, num_tokens: float, num_sequences: float, group_mean: Tensor | None = None
    ) -> Denominators:
        """Return the divisors of a minibatch of these numbers of tokens and sequences.

        ``group_mean`` [N] is that of ``group_divisors``, for group-mean-token-mean alone.
        """
        return Denominators(
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            length=self.choice.reduce.length or float(self._max_response_tokens),
            group_mean=group_mean,
        )

    def loss(
        self, given: LossInputs, current: PolicyOutputs, *, num_lags: int = 0
    ) -> tuple[Tensor, Sums]:
        """Return this microbatch's share of the loss, and sums to log. Shapes [].

        loss = reduce(w L + p |log r|) + beta reduce(KL) - eta reduce(H) + lambda NLL, where L is
        the surrogate, w the corrections' weights (0 where they reject) and p their penalty, KL the
        divergence from the reference policy or the behavior policy, H the entropy and NLL the mean
        of -log pi over the tokens of right answers. Rejected tokens count in KL, H and NLL whatever
        ``kept`` selects.

        Args:
            given: inputs of the microbatch.
            current: the policy under training; its figures carry the gradient.
            num_lags: number of sums by version lag; 0 leaves them out.
        """
        given.check()
        choice, packing = self.choice, given.packing
        if current.logprobs.shape != packing.mask.shape:
            raise ValueError(
                f"the current logprobs have shape {tuple(current.logprobs.shape)}, expected "
                f"{tuple(packing.mask.shape)}"
            )
        proximal = current.logprobs.detach() if given.proximal is None else given.proximal
        correction = given.correction or self.correct(
            proximal=proximal,
            behavior=given.behavior,
            advantages=given.advantages,
            lags=given.lags,
            packing=packing,
            entropy=current.entropy,
            reference=given.reference,
        )
        proximal = proximal if correction.proximal is None else correction.proximal
        anchor = proximal if choice.anchor == "proximal" else given.behavior
        kept = packing.only(correction.keep)
        terms = self._surrogate_terms(given, current, anchor, kept)
        weighted = correction.weights.to(terms.per_token.dtype) * terms.per_token
        if correction.penalty is not None:
            distance = log_ratio(target=current.logprobs, sampled_from=anchor, mask=kept.mask).abs()
            weighted = weighted + correction.penalty * distance
        counted = packing if given.kept is None else kept
        divisors = given.denominators if given.kept is None else given.kept
        loss = reduced(weighted, counted, divisors, choice.reduce.name, given.copies)
        loss, kl = self._with_other_terms(loss, given, current)
        trained = packing.present(given.copies)
        seen = _diagnosed(given, current, proximal, correction, terms, trained)
        sums = diagnostic_sums(seen, given.lags, num_lags=num_lags)
        sums |= _own_sums(terms.figures, trained)
        if given.teacher is not None:
            gap = log_ratio(target=proximal, sampled_from=given.teacher, mask=trained)
            sums["policy/kl_teacher"] = gap.sum()
        if kl is not None:
            sums[f"policy/kl_{choice.kl.to}"] = masked_sum(kl.detach(), trained)
        return loss, sums

    def _surrogate_terms(
        self, given: LossInputs, current: PolicyOutputs, anchor: Tensor, kept: Packing
    ) -> Terms:
        """Return the surrogate at each token; a rejected token is in no sequence's ratio."""
        surrogate = self.choice.surrogate
        terms: Terms = surrogate.part.function(
            SurrogateInputs(
                current=current.logprobs,
                anchor=anchor,
                behavior=given.behavior,
                advantages=given.advantages,
                packing=kept,
                entropy=current.entropy,
                reference=given.reference,
                lags=given.lags,
                minibatch=given.minibatch,
            ),
            surrogate.options,
        )
        return terms

    def _with_other_terms(
        self, loss: Tensor, given: LossInputs, current: PolicyOutputs
    ) -> tuple[Tensor, Tensor | None]:
        """Return the loss with entropy, imitation and KL, and the KL at each token, if any."""
        choice, packing, rule = self.choice, given.packing, self.choice.reduce.name
        if choice.entropy_bonus > 0:
            entropy = where(packing.mask, current.entropy, torch.zeros_like(current.entropy))
            loss = loss - choice.entropy_bonus * reduced(
                entropy, packing, given.denominators, rule, given.copies
            )
        if given.right is not None:
            loss = loss + choice.likelihood.coefficient * self._nll(
                given, given.right, current.logprobs
            )
        kl = self._kl(given, current)
        if kl is not None and choice.kl.place == "loss":
            loss = loss + choice.kl.coefficient * reduced(
                kl, packing, given.denominators, rule, given.copies
            )
        return loss, kl

    @staticmethod
    def _nll(given: LossInputs, right: RightAnswers, logprobs: Tensor) -> Tensor:
        """Return this microbatch's share of the mean of -log pi over right answers. Shapes []."""
        packing = given.packing
        copies = right.is_right.long() if given.copies is None else right.is_right * given.copies
        return reduced(
            -where(packing.present(copies), logprobs, torch.zeros_like(logprobs)),
            packing,
            Denominators(num_tokens=right.num_tokens, num_sequences=1.0),
            "token-mean",
            copies,
        )

    def _kl(self, given: LossInputs, current: PolicyOutputs) -> Tensor | None:
        kl = self.choice.kl
        if not self.choice.has_kl:
            return None
        if kl.name == "full":
            if current.full_kl is None:
                raise ValueError('algo.kl.name = "full" needs PolicyOutputs.full_kl')
            return where(given.packing.mask, current.full_kl, torch.zeros_like(current.full_kl))
        other = given.behavior if kl.to == "behavior" else given.reference
        if other is None:
            raise ValueError("algo.kl.coefficient > 0 needs LossInputs.reference")
        return kl_estimate(
            kl.name,
            current=current.logprobs,
            reference=other,
            mask=given.packing.mask,
            sampled_from=given.behavior if kl.importance_weighted else None,
        )


def _diagnosed(
    given: LossInputs,
    current: PolicyOutputs,
    proximal: Tensor,
    correction: Correction,
    terms: Terms,
    trained: Tensor,
) -> Diagnosed:
    return Diagnosed(
        mask=trained,
        keep=correction.keep,
        proximal=proximal,
        behavior=given.behavior,
        entropy=current.entropy,
        ratio=terms.ratio,
        weights=correction.weights,
        clipped_up=terms.clipped_up,
        clipped_down=terms.clipped_down,
        clipped_dual=terms.clipped_dual,
    )


def _own_sums(figures: Mapping[str, Tensor], trained: Tensor) -> Sums:
    """Return sums over trained tokens of what a surrogate wants logged. Shapes [T] -> [].

    Raises:
        ValueError: one of them has another shape.
    """
    for name, values in figures.items():
        if values.shape != trained.shape:
            raise ValueError(
                f"Terms.figures[{name!r}] has shape {tuple(values.shape)}, expected "
                f"{tuple(trained.shape)}: a value for each token"
            )
    return {f"own/{name}": masked_sum(upcast(v.detach()), trained) for name, v in figures.items()}
