"""Forward passes, advantages and corrections computed before the first update of a learner step.

All of it is of the weights that the step starts from. Sums go over all microbatches and replicas.

Shapes: T tokens of B sequences of one microbatch, N trajectories of the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from slipstream.algos.advantages import Outcomes
from slipstream.algos.compose import Algorithm, Prepared, RightAnswers
from slipstream.algos.corrections import Correction
from slipstream.algos.reduce import Denominators
from slipstream.algos.surrogates import WholeMinibatch
from slipstream.learner.batches.packing import PackedBatch
from slipstream.learner.batches.plan import MinibatchPlan
from slipstream.learner.training.advantages import fill_advantages
from slipstream.learner.training.microbatch import Microbatch, joined, known
from slipstream.learner.training.step_data import StepData
from slipstream.wire.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.learner.training.policy import Policy


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedMinibatch:
    """This rank's share of one optimizer update, with all that its losses need."""

    microbatches: Sequence[Microbatch]  # those with a token
    batches: Sequence[PackedBatch]  # input of the model: these, then those without one
    denominators: Denominators  # of all ranks together
    is_at_start: bool
    """True if its own training pass computes the proximal logprobs: no update comes before it."""

    def with_tokens(self, outputs: Sequence[T]) -> Sequence[T]:
        """Return the outputs for ``microbatches`` among those for ``batches``."""
        return outputs[: len(self.microbatches)]

    @property
    def is_empty(self) -> bool:
        """True if no rank has a token of it to train."""
        return self.denominators.num_tokens == 0

    @property
    def proximal(self) -> list[Tensor]:
        """The proximal logprobs [T]; empty where the training pass computes them."""
        return [one.proximal for one in self.microbatches if one.proximal is not None]


def prepare(
    policy: "Policy",
    batches: Sequence[Sequence[PackedBatch]],
    plans: Sequence[MinibatchPlan],
    data: StepData,
    shaped: Prepared,
    algorithm: Algorithm,
) -> list[PreparedMinibatch]:
    """Compute everything that comes before training; return the minibatches with the results.

    The first minibatch is trained with the weights that the step starts from: unless something
    needs them earlier, its proximal logprobs are those of its training pass, without a forward pass
    of their own. ``batches`` are this rank's microbatches, by minibatch; all else is equal on all
    ranks.

    Raises:
        ConfigError: the advantage cannot be computed from such rewards.
    """
    trains_policy = algorithm.trains_policy(data.step)
    needs_all = algorithm.needs_proximal or not trains_policy
    everyone_once = bool((shaped.copies == 1).all())
    copies = None if everyone_once else shaped.copies
    minibatches = []
    for number, (of_minibatch, plan) in enumerate(zip(batches, plans, strict=True)):
        for batch in of_minibatch:
            batch.chosen_before.clear()
        lengths, times = data.outcomes.lengths[plan.members], shaped.copies[plan.members]
        denominators = algorithm.denominators(
            float((lengths * times).sum()), float(((lengths > 0) * times).sum())
        )
        mine = plan.microbatches[policy.replicas.rank]
        minibatches.append(
            PreparedMinibatch(
                microbatches=[
                    Microbatch.of(batch, indices, copies, data.step, denominators)
                    for batch, indices in zip(of_minibatch, mine, strict=True)
                    if indices
                ],
                batches=of_minibatch,
                denominators=denominators,
                is_at_start=not needs_all and number == 0,
            )
        )
    for minibatch in minibatches:
        _run_forward_passes(policy, minibatch, algorithm)
    everything = [one for part in minibatches for one in part.microbatches]
    try:
        fill_advantages(policy, everything, data.outcomes, shaped, algorithm)
    except ValueError as error:  # of a part: these rewards are not for it
        name = algorithm.choice.advantage.part.name
        raise ConfigError(f"algo.advantage = {name!r} cannot be taken here: {error}") from error
    for minibatch, plan in zip(minibatches, plans, strict=True):
        share = minibatch.microbatches
        _mark_right_answers(share, plan.members, data.outcomes, shaped, algorithm)
        if algorithm.corrects_before and trains_policy:
            kept = algorithm.denominators(*_correct(policy, share, algorithm))
            if algorithm.choice.reduce.denominator == "kept":
                for one in share:
                    one.kept = kept
        if algorithm.shows_minibatch and trains_policy:
            whole = _whole(policy.replicas.gathered, share)
            for one in share:
                one.minibatch = whole
    return minibatches


def _run_forward_passes(
    policy: "Policy", minibatch: PreparedMinibatch, algorithm: Algorithm
) -> None:
    """Run every model whose outputs a minibatch needs."""
    share, batches = minibatch.microbatches, minibatch.batches
    if not minibatch.is_at_start:
        for one, outputs in zip(
            share, minibatch.with_tokens(policy.proximal(batches)), strict=True
        ):
            one.proximal, one.entropy = outputs.logprobs, outputs.entropy
            one.squares = outputs.squares
    if policy.reference is not None and algorithm.needs_reference_logprobs:
        for one, logprobs in zip(
            share, minibatch.with_tokens(policy.reference.logprobs(batches)), strict=True
        ):
            one.reference = logprobs
    if policy.teacher is not None:
        for one, logprobs in zip(
            share, minibatch.with_tokens(policy.teacher.logprobs(batches)), strict=True
        ):
            one.teacher = logprobs
    if policy.critic is not None:
        for one, values in zip(
            share, minibatch.with_tokens(policy.critic.values(batches)), strict=True
        ):
            one.values = values


def _mark_right_answers(
    share: Sequence[Microbatch],
    members: Sequence[int],
    outcomes: Outcomes,
    shaped: Prepared,
    algorithm: Algorithm,
) -> None:
    """State which answers of each microbatch are imitated, if any are."""
    if algorithm.choice.likelihood.coefficient == 0:
        return
    is_right = outcomes.rewards >= algorithm.choice.likelihood.least_reward
    num_tokens = float((outcomes.lengths * shaped.copies * is_right)[list(members)].sum())
    for one in share:
        one.right = RightAnswers(
            is_right=is_right[one.indices].to(one.batch.loss_mask.device), num_tokens=num_tokens
        )


def _whole(gathered: Callable[[Tensor], Tensor], share: Sequence[Microbatch]) -> WholeMinibatch:
    def everywhere(values: Callable[[Microbatch], Tensor]) -> Tensor:
        return gathered(torch.cat([values(one)[one.trained] for one in share]))

    return WholeMinibatch(
        proximal=everywhere(lambda one: known(one.proximal, "proximal")),
        behavior=everywhere(lambda one: one.behavior),
        advantages=everywhere(lambda one: one.advantages),
    )


def _correct(
    policy: "Policy", share: Sequence[Microbatch], algorithm: Algorithm
) -> tuple[float, float]:
    """Correct a whole minibatch at once; return how many tokens and sequences are kept."""
    sizes = [len(one.packing.mask) for one in share]
    packing = joined(share, [one.trained for one in share])
    lags = [one.lags for one in share if one.lags is not None]
    entropies = [one.entropy for one in share if one.entropy is not None]
    references = [one.reference for one in share if one.reference is not None]
    correction = algorithm.correct(
        proximal=torch.cat([known(one.proximal, "proximal") for one in share]),
        behavior=torch.cat([one.behavior for one in share]),
        advantages=torch.cat([one.advantages for one in share]),
        lags=torch.cat(lags) if len(lags) == len(share) else None,
        packing=packing,
        entropy=torch.cat(entropies) if entropies else None,
        reference=torch.cat(references) if references else None,
        gather=policy.replicas.gathered,
    )
    weights, keep = torch.split(correction.weights, sizes), torch.split(correction.keep, sizes)
    moved = None if correction.proximal is None else torch.split(correction.proximal, sizes)
    penalties = None if correction.penalty is None else torch.split(correction.penalty, sizes)
    kept = torch.zeros(2, dtype=torch.float64, device=packing.mask.device)
    for i, one in enumerate(share):
        one.correction = Correction(
            weights=weights[i],
            keep=keep[i],
            proximal=None if moved is None else moved[i],
            penalty=None if penalties is None else penalties[i],
        )
        tokens = one.packing.sums(keep[i].double())
        copies = torch.ones_like(tokens) if one.copies is None else one.copies.double()
        kept += torch.stack([(tokens * copies).sum(), ((tokens > 0) * copies).sum()])
    num_tokens, num_sequences = policy.replicas.summed(kept).tolist()
    return num_tokens, num_sequences
