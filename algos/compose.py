"""One algorithm: rewards in, advantages, corrections and the loss of a microbatch out.

Everything that is summed over a minibatch is summed over all of its microbatches and ranks, so that
nothing here depends on how sequences were packed.

Shapes: T tokens of B sequences of one microbatch, N trajectories of a learner step.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, where

from algos.advantages import Outcomes
from algos.config import AlgoChoice
from algos.corrections import Correction, CorrectionInputs, combined
from algos.diagnostics import Diagnosed, Sums, diagnostic_sums
from algos.kl import kl_estimate
from algos.packing import Packing
from algos.reduce import Denominators, reduced
from algos.returns import TokenAdvantages, TokenOutcomes, at_end
from algos.shaping import (
    normalized,
    overlong_filter,
    overlong_penalty,
    resampling,
    scaled,
    zero_variance,
)
from algos.surrogates import SurrogateInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What the loss of one microbatch is made of. Log-probabilities are 0.0 outside the mask."""

    current: Tensor  # [T] carries gradient
    proximal: Tensor  # [T]
    behavior: Tensor  # [T]
    advantages: Tensor  # [T]
    entropy: Tensor  # [T] carries gradient
    packing: Packing
    denominators: Denominators
    kept: Denominators | None = None  # of the surrogate, where rejected tokens do not count
    reference: Tensor | None = None  # [T]
    full_kl: Tensor | None = None  # [T] carries gradient, KL(current || reference)
    lags: Tensor | None = None  # [T] int
    copies: Tensor | None = None  # [B] how often each sequence is in the batch
    correction: Correction | None = None  # where it had to be known before the first gradient

    def __post_init__(self) -> None:
        """Reject misaligned tensors here, so that no part has to."""
        want = self.packing.mask.shape
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and field.name != "copies" and value.shape != want:
                raise ValueError(
                    f"{field.name} has shape {tuple(value.shape)}, expected {tuple(want)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The rewards that are learned from, and what of the batch is trained. Shapes [N]."""

    rewards: Tensor  # float64
    copies: Tensor  # int64, 0 where a trajectory trains nothing


class Algorithm:
    """The parts of one run's algorithm, put together. Pure: holds settings, no state."""

    def __init__(self, choice: AlgoChoice, *, max_response_tokens: int) -> None:
        """Compose what ``algos.config.choice_of`` chose.

        Args:
            choice: parts and their settings.
            max_response_tokens: of the run; overlong rules and Dr. GRPO's constant refer to it.
        """
        self.choice = choice
        self._max_response_tokens = max_response_tokens
        self._corrections = sorted(
            choice.corrections, key=lambda one: "first" not in one.part.needs
        )
        needs = set().union(*(chosen.part.needs for chosen in choice.corrections))
        self.corrects_before = "whole_minibatch" in needs or choice.reduce.denominator == "kept"
        """Whether a minibatch's correction must be known before its first gradient."""
        self.needs_full_kl = choice.needs_reference and choice.kl.name == "full"
        self.needs_reference_logprobs = choice.needs_reference and not self.needs_full_kl
        self.is_token_level = "tokens" in choice.advantage.part.needs
        self.centers_rewards = "centered" in choice.advantage.part.needs

    def trains_policy(self, step: int) -> bool:
        """Return whether a learner step trains the policy, or its critic alone."""
        return not self.choice.needs_values or step >= self.choice.critic.warmup_steps

    def prepared(
        self, outcomes: Outcomes, is_truncated: Tensor, generator: torch.Generator
    ) -> Prepared:
        """Return shaped rewards, and how often each trajectory is trained. Shapes [N].

        Args:
            outcomes: of the step.
            is_truncated: [N] bool, responses that ended at the length limit.
            generator: decides what is drawn again (PF-PPO); equal on all ranks.
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
        return Prepared(rewards=rewards, copies=copies)

    def trajectory_advantages(self, outcomes: Outcomes) -> Tensor:
        """Return one advantage per trajectory. Shapes [N]. Only where not ``is_token_level``."""
        advantage = self.choice.advantage
        values: Tensor = advantage.part.function(outcomes, advantage.options)
        return values

    def token_advantages(
        self, rewards: Tensor, values: Tensor | None, packing: Packing
    ) -> TokenAdvantages:
        """Return advantages of tokens and what a critic learns. Only where ``is_token_level``.

        Args:
            rewards: [T], 0.0 where nothing was rewarded.
            values: [T], of the state in which each token was chosen.
            packing: of the microbatch.
        """
        advantage = self.choice.advantage
        given = TokenOutcomes(rewards=rewards, values=values, packing=packing)
        result: TokenAdvantages = advantage.part.function(given, advantage.options)
        return result

    def token_rewards(self, rewards: Tensor, kl: Tensor | None, packing: Packing) -> Tensor:
        """Return each trajectory's reward on its last token, less the KL penalty of every token.

        Args:
            rewards: [B].
            kl: [T] of ``reward_kl``, or None.
            packing: of the microbatch.
        """
        per_token = at_end(rewards, packing)
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
        gather: Callable[[Tensor], Tensor] = lambda values: values,
    ) -> Correction:
        """Return what all corrections together do. Arguments as in ``CorrectionInputs``.

        What replaces the proximal policy comes first: the others correct for the replaced one.
        """
        given = CorrectionInputs(
            proximal=proximal.detach(),
            behavior=behavior,
            advantages=advantages,
            lags=lags,
            packing=packing,
            gather=gather,
        )
        results = []
        for chosen in self._corrections:
            result: Correction = chosen.part.function(given, chosen.options)
            if result.proximal is not None:
                given = replace(given, proximal=result.proximal)
            results.append(result)
        return combined(results, packing)

    def denominators(self, num_tokens: float, num_sequences: float) -> Denominators:
        """Return what a minibatch of so many tokens and sequences is divided by."""
        return Denominators(
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            length=self.choice.reduce.length or float(self._max_response_tokens),
        )

    def loss(self, given: LossInputs, *, num_lags: int = 0) -> tuple[Tensor, Sums]:
        """Return this microbatch's share of the loss, and sums to log. Shapes [].

        loss = reduce(w L) + beta reduce(KL) - eta reduce(H), where L is the surrogate, w the
        corrections' weights (0 where they reject), KL the divergence from the reference policy and
        H the entropy. Rejected tokens count in KL and H whatever ``kept`` says.
        """
        choice, packing, rule = self.choice, given.packing, self.choice.reduce.name
        correction = given.correction or self.correct(
            proximal=given.proximal,
            behavior=given.behavior,
            advantages=given.advantages,
            lags=given.lags,
            packing=packing,
        )
        proximal = given.proximal if correction.proximal is None else correction.proximal
        terms = choice.surrogate.part.function(
            SurrogateInputs(
                current=given.current,
                anchor=proximal if choice.anchor == "proximal" else given.behavior,
                behavior=given.behavior,
                advantages=given.advantages,
                packing=packing.only(correction.keep),  # a rejected token is in no sequence's ratio
            ),
            choice.surrogate.options,
        )
        weighted = correction.weights.to(terms.per_token.dtype) * terms.per_token
        counted = packing if given.kept is None else packing.only(correction.keep)
        divisors = given.denominators if given.kept is None else given.kept
        loss = reduced(weighted, counted, divisors, rule, given.copies)
        trained = packing.present(given.copies)
        sums = diagnostic_sums(
            Diagnosed(
                mask=trained,
                keep=correction.keep,
                proximal=proximal,
                behavior=given.behavior,
                entropy=given.entropy,
                ratio=terms.ratio,
                weights=correction.weights,
                clipped_up=terms.clipped_up,
                clipped_down=terms.clipped_down,
                clipped_dual=terms.clipped_dual,
            ),
            given.lags,
            num_lags=num_lags,
        )
        if choice.entropy_bonus > 0:
            entropy = where(packing.mask, given.entropy, torch.zeros_like(given.entropy))
            loss = loss - choice.entropy_bonus * reduced(
                entropy, packing, given.denominators, rule, given.copies
            )
        kl = self._kl(given)
        if kl is not None:
            sums["policy/kl_reference"] = where(trained, kl.detach(), torch.zeros_like(kl)).sum()
            if choice.kl.place == "loss":
                loss = loss + choice.kl.coefficient * reduced(
                    kl, packing, given.denominators, rule, given.copies
                )
        return loss, sums

    def _kl(self, given: LossInputs) -> Tensor | None:
        if not self.choice.needs_reference:
            return None
        name = self.choice.kl.name
        if name == "full":
            if given.full_kl is None:
                raise ValueError('algo.kl.name = "full" needs LossInputs.full_kl')
            return where(given.packing.mask, given.full_kl, torch.zeros_like(given.full_kl))
        if given.reference is None:
            raise ValueError("algo.kl.coefficient > 0 needs LossInputs.reference")
        return kl_estimate(
            name, current=given.current, reference=given.reference, mask=given.packing.mask
        )
