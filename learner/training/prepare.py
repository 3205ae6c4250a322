"""Forward passes, advantages and corrections computed before the first update of a learner step.

All use the weights that the step starts from. Sums go over all microbatches and replicas.

Shapes: T tokens of B sequences of one microbatch, N trajectories of the step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from slipstream.algos.advantages import Outcomes
from slipstream.algos.compose import Algorithm, Prepared, RightAnswers
from slipstream.algos.corrections import Correction
from slipstream.algos.reduce import Denominators, group_divisors
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
    """This rank's share of one optimizer update, with all inputs of its losses."""

    microbatches: Sequence[Microbatch]  # microbatches with tokens
    batches: Sequence[PackedBatch]  # input of the model: these, then microbatches without tokens
    denominators: Denominators  # sums over all ranks
    is_at_start: bool
    """True if its training pass computes the proximal logprobs: no update comes before it."""

    def matched(self, outputs: Sequence[T]) -> Iterator[tuple[Microbatch, T]]:
        """Yield each of ``microbatches`` with its output, of those for ``batches``."""
        return zip(self.microbatches, outputs[: len(self.microbatches)], strict=True)

    @property
    def is_empty(self) -> bool:
        """True if no rank has a token to train in it."""
        return self.denominators.num_tokens == 0

    @property
    def proximal(self) -> list[Tensor]:
        """Proximal logprobs [T]; empty if the training pass computes them."""
        return [
            microbatch.proximal
            for microbatch in self.microbatches
            if microbatch.proximal is not None
        ]


def prepare(
    policy: "Policy",
    batches: Sequence[Sequence[PackedBatch]],
    plans: Sequence[MinibatchPlan],
    data: StepData,
    shaped: Prepared,
    algorithm: Algorithm,
) -> list[PreparedMinibatch]:
    """Compute everything that comes before training; return the minibatches with the results.

    The first minibatch is trained with the weights that the step starts from: unless they are
    needed earlier, its proximal logprobs come from its training pass, without a forward pass of
    their own. ``batches`` are this rank's microbatches, by minibatch; all other arguments are equal
    on all ranks.

    Raises:
        ConfigError: the advantage cannot be computed from such rewards.
    """
    trains_policy = algorithm.trains_policy(data.step)
    minibatches = _begun(policy, batches, plans, data, shaped, algorithm)
    for minibatch in minibatches:
        _run_forward_passes(policy, minibatch, algorithm)
    everything = [microbatch for part in minibatches for microbatch in part.microbatches]
    try:
        fill_advantages(policy, everything, data.outcomes, shaped, algorithm)
    except ValueError as error:  # raised by a part that cannot use these rewards
        name = algorithm.choice.advantage.part.name
        raise ConfigError(f"algo.advantage = {name!r} cannot be taken here: {error}") from error
    for minibatch, plan in zip(minibatches, plans, strict=True):
        share = minibatch.microbatches
        _mark_right_answers(share, plan.members, data.outcomes, shaped, algorithm)
        if algorithm.corrects_before and trains_policy:
            tokens = _correct(policy, share, algorithm, like=shaped.rewards)
            if algorithm.choice.reduce.denominator == "kept":
                kept = _denominators(tokens, shaped.copies, data.outcomes, algorithm)
                for microbatch in share:
                    microbatch.kept = kept.of(microbatch.indices)
        if algorithm.shows_minibatch and trains_policy:
            whole = _whole(policy.replicas.gathered, share)
            for microbatch in share:
                microbatch.minibatch = whole
    return minibatches


def _begun(
    policy: "Policy",
    batches: Sequence[Sequence[PackedBatch]],
    plans: Sequence[MinibatchPlan],
    data: StepData,
    shaped: Prepared,
    algorithm: Algorithm,
) -> list[PreparedMinibatch]:
    """Return the minibatches with what their trajectories' headers tell."""
    needs_all = algorithm.needs_proximal or not algorithm.trains_policy(data.step)
    everyone_once = bool((shaped.copies == 1).all())
    copies = None if everyone_once else shaped.copies
    minibatches = []
    for number, (of_minibatch, plan) in enumerate(zip(batches, plans, strict=True)):
        for batch in of_minibatch:
            batch.chosen_before.clear()
        tokens = torch.zeros_like(data.outcomes.lengths)
        tokens[plan.members] = data.outcomes.lengths[plan.members]
        denominators = _denominators(tokens, shaped.copies, data.outcomes, algorithm)
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
    return minibatches


def _denominators(
    tokens: Tensor, copies: Tensor, outcomes: Outcomes, algorithm: Algorithm
) -> Denominators:
    """Return the divisors of a minibatch from the tokens [N] that each trajectory has in it."""
    counted, group_mean = tokens * copies, None
    if algorithm.choice.reduce.name == "group-mean-token-mean":
        group_mean = group_divisors(counted, outcomes.groups, outcomes.num_groups)
    num_sequences = float(((tokens > 0) * copies).sum())
    return algorithm.denominators(float(counted.sum()), num_sequences, group_mean)


def _run_forward_passes(
    policy: "Policy", minibatch: PreparedMinibatch, algorithm: Algorithm
) -> None:
    """Run every model whose outputs a minibatch needs."""
    batches, matched = minibatch.batches, minibatch.matched
    if not minibatch.is_at_start:
        for microbatch, outputs in matched(policy.proximal(batches)):
            microbatch.proximal, microbatch.entropy = outputs.logprobs, outputs.entropy
            microbatch.squares = outputs.squares
    if policy.reference is not None and algorithm.needs_reference_logprobs:
        for microbatch, logprobs in matched(policy.reference.logprobs(batches)):
            microbatch.reference = logprobs
    if policy.teacher is not None:
        for microbatch, logprobs in matched(policy.teacher.logprobs(batches)):
            microbatch.teacher = logprobs
    if policy.critic is not None:
        for microbatch, values in matched(policy.critic.values(batches)):
            microbatch.values = values


def _mark_right_answers(
    share: Sequence[Microbatch],
    members: Sequence[int],
    outcomes: Outcomes,
    shaped: Prepared,
    algorithm: Algorithm,
) -> None:
    """Mark the answers of each microbatch to imitate, if any."""
    if algorithm.choice.likelihood.coefficient == 0:
        return
    is_right = outcomes.rewards >= algorithm.choice.likelihood.least_reward
    num_tokens = float((outcomes.lengths * shaped.copies * is_right)[list(members)].sum())
    for microbatch in share:
        microbatch.right = RightAnswers(
            is_right=is_right[microbatch.indices].to(microbatch.batch.loss_mask.device),
            num_tokens=num_tokens,
        )


def _whole(gathered: Callable[[Tensor], Tensor], share: Sequence[Microbatch]) -> WholeMinibatch:
    def everywhere(values: Callable[[Microbatch], Tensor]) -> Tensor:
        return gathered(torch.cat([values(microbatch)[microbatch.trained] for microbatch in share]))

    return WholeMinibatch(
        proximal=everywhere(lambda microbatch: known(microbatch.proximal, "proximal")),
        behavior=everywhere(lambda microbatch: microbatch.behavior),
        advantages=everywhere(lambda microbatch: microbatch.advantages),
    )


def _correct(
    policy: "Policy", share: Sequence[Microbatch], algorithm: Algorithm, *, like: Tensor
) -> Tensor:
    """Correct a whole minibatch at once; return each trajectory's number of kept tokens.

    ``like`` [N] float64 is of the step's trajectories, as is the result.
    """
    sizes = [len(microbatch.packing.mask) for microbatch in share]
    packing = joined(share, [microbatch.trained for microbatch in share])
    lags = [microbatch.lags for microbatch in share if microbatch.lags is not None]
    entropies = [microbatch.entropy for microbatch in share if microbatch.entropy is not None]
    references = [microbatch.reference for microbatch in share if microbatch.reference is not None]
    correction = algorithm.correct(
        proximal=torch.cat([known(microbatch.proximal, "proximal") for microbatch in share]),
        behavior=torch.cat([microbatch.behavior for microbatch in share]),
        advantages=torch.cat([microbatch.advantages for microbatch in share]),
        lags=torch.cat(lags) if len(lags) == len(share) else None,
        packing=packing,
        entropy=torch.cat(entropies) if entropies else None,
        reference=torch.cat(references) if references else None,
        gather=policy.replicas.gathered,
    )
    weights, keep = torch.split(correction.weights, sizes), torch.split(correction.keep, sizes)
    moved = None if correction.proximal is None else torch.split(correction.proximal, sizes)
    penalties = None if correction.penalty is None else torch.split(correction.penalty, sizes)
    kept = torch.zeros_like(like)
    for i, microbatch in enumerate(share):
        microbatch.correction = Correction(
            weights=weights[i],
            keep=keep[i],
            proximal=None if moved is None else moved[i],
            penalty=None if penalties is None else penalties[i],
        )
        kept[microbatch.indices] = microbatch.packing.sums(keep[i].double()).to(kept)
    return policy.replicas.summed(kept)
