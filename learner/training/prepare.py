"""Forward passes, advantages and corrections computed before the first update of a learner step.

All of it is of the weights that the step starts from. Sums go over all microbatches and replicas.

Shapes: T tokens of B sequences of one microbatch, N trajectories of the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.algos.advantages import Outcomes
from slipstream.algos.compose import Algorithm, LossInputs, Prepared, RightAnswers
from slipstream.algos.corrections import Correction
from slipstream.algos.packing import Packing
from slipstream.algos.reduce import Denominators
from slipstream.algos.returns import Groups, TokenOutcomes, moments, whiten
from slipstream.algos.surrogates import WholeMinibatch
from slipstream.learner.batches.packing import PackedBatch
from slipstream.learner.batches.plan import Indices, MinibatchPlan
from slipstream.learner.training.step_data import StepData
from slipstream.wire.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.learner.training.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedMinibatch:
    """This rank's share of one optimizer update, with all that its losses need."""

    batches: Sequence[PackedBatch]  # by microbatch, as all below
    inputs: Sequence[LossInputs]
    values: Sequence[Tensor | None]  # [T] of the critic, where there is one
    returns: Sequence[Tensor | None]  # [T] that the critic learns
    denominators: Denominators  # of all ranks together
    is_at_start: bool
    """True if its own training pass computes the proximal logprobs: no update comes before it."""

    @property
    def is_empty(self) -> bool:
        """True if no rank has a token of it to train."""
        return self.denominators.num_tokens == 0

    @property
    def proximal(self) -> list[Tensor]:
        """The proximal logprobs [T]; empty where the training pass computes them."""
        return [one.proximal for one in self.inputs if one.proximal is not None]


@dataclass(slots=True)
class _Microbatch:
    """What is known of a microbatch, filled by ``prepare`` in the order of fields."""

    batch: PackedBatch
    packing: Packing
    indices: Tensor  # [B] int64, trajectories of the step
    copies: Tensor | None  # [B] int64, None if every trajectory is trained once
    lags: Tensor | None  # [T]
    proximal: Tensor | None = None  # [T]; None if the training pass computes them
    entropy: Tensor | None = None  # [T] of the proximal policy, where a correction needs it
    squares: Tensor | None = None  # [T] of the proximal policy, where advantages need it
    reference: Tensor | None = None  # [T]
    teacher: Tensor | None = None  # [T]
    values: Tensor | None = None  # [T]
    advantages: Tensor = field(default_factory=lambda: torch.empty(0))  # [T]
    returns: Tensor | None = None  # [T]
    correction: Correction | None = None

    @property
    def trained(self) -> Tensor:
        """The tokens that are in the batch at least once, [T] bool."""
        return self.packing.present(self.copies)


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
    of their own.

    Args:
        policy: computes the forward passes; does not change.
        batches: this rank's microbatches, by minibatch.
        plans: of the minibatches, equal on all ranks.
        data: of the step.
        shaped: the rewards to learn from, and how often each trajectory is trained.
        algorithm: of the run.

    Raises:
        ConfigError: the advantage cannot be computed from such rewards.
    """
    trains_policy = algorithm.trains_policy(data.step)
    needs_all = algorithm.needs_proximal or not trains_policy
    shares = [
        _lay_out(of_minibatch, plan.microbatches[policy.replicas.rank], shaped.copies, data.step)
        for of_minibatch, plan in zip(batches, plans, strict=True)
    ]
    for number, share in enumerate(shares):
        _run_forward_passes(policy, share, algorithm, needs_proximal=needs_all or number > 0)
    everything = [one for share in shares for one in share]
    try:
        _fill_advantages(policy, everything, data.outcomes, shaped, algorithm)
    except ValueError as error:  # of a part: these rewards are not for it
        name = algorithm.choice.advantage.part.name
        raise ConfigError(f"algo.advantage = {name!r} cannot be taken here: {error}") from error
    minibatches = []
    for number, (share, plan) in enumerate(zip(shares, plans, strict=True)):
        members = plan.members
        lengths, copies = data.outcomes.lengths[members], shaped.copies[members]
        denominators = algorithm.denominators(
            float((lengths * copies).sum()), float(((lengths > 0) * copies).sum())
        )
        right = _right_answers(share, members, data.outcomes, shaped, algorithm)
        kept = whole = None
        if algorithm.corrects_before and trains_policy:
            counts = _correct(policy, share, algorithm)
            if algorithm.choice.reduce.denominator == "kept":
                kept = algorithm.denominators(*counts)
        if algorithm.shows_minibatch and trains_policy:
            whole = _whole(policy.replicas.gathered, share)
        minibatches.append(
            PreparedMinibatch(
                batches=[one.batch for one in share],
                inputs=[
                    LossInputs(
                        proximal=one.proximal,
                        behavior=one.batch.behavior_logprobs,
                        advantages=one.advantages,
                        packing=one.packing,
                        denominators=denominators,
                        kept=kept,
                        reference=one.reference,
                        teacher=one.teacher,
                        lags=one.lags,
                        copies=one.copies,
                        right=answers,
                        minibatch=whole,
                        correction=one.correction,
                    )
                    for one, answers in zip(share, right, strict=True)
                ],
                values=[one.values for one in share],
                returns=[one.returns for one in share],
                denominators=denominators,
                is_at_start=not needs_all and number == 0,
            )
        )
    return minibatches


def _lay_out(
    batches: Sequence[PackedBatch], indices: Sequence[Indices], copies: Tensor, step: int
) -> list[_Microbatch]:
    everyone_once = bool((copies == 1).all())
    share = []
    for batch, of_batch in zip(batches, indices, strict=True):
        index = torch.tensor(list(of_batch), dtype=torch.int64)
        device = batch.loss_mask.device
        share.append(
            _Microbatch(
                batch=batch,
                packing=Packing.of(batch.loss_mask, batch.cu_seqlens),
                indices=index,
                copies=None if everyone_once else copies[index].to(device),
                lags=None if batch.version_steps is None else step - batch.version_steps,
            )
        )
    return share


def _run_forward_passes(
    policy: "Policy", share: Sequence[_Microbatch], algorithm: Algorithm, *, needs_proximal: bool
) -> None:
    """Run every model whose outputs a minibatch needs."""
    batches = [one.batch for one in share]
    if needs_proximal:
        for one, outputs in zip(share, policy.proximal(batches), strict=True):
            one.proximal, one.entropy = outputs.logprobs, outputs.entropy
            one.squares = outputs.squares
    if policy.reference is not None and algorithm.needs_reference_logprobs:
        for one, logprobs in zip(share, policy.reference.logprobs(batches), strict=True):
            one.reference = logprobs
    if policy.teacher is not None:
        for one, logprobs in zip(share, policy.teacher.logprobs(batches), strict=True):
            one.teacher = logprobs
    if policy.critic is not None:
        for one, values in zip(share, policy.critic.values(batches), strict=True):
            one.values = values


def _right_answers(
    share: Sequence[_Microbatch],
    members: Sequence[int],
    outcomes: Outcomes,
    shaped: Prepared,
    algorithm: Algorithm,
) -> list[RightAnswers | None]:
    """Return which answers of each microbatch are imitated."""
    if algorithm.choice.likelihood.coefficient == 0:
        return [None] * len(share)
    is_right = outcomes.rewards >= algorithm.choice.likelihood.least_reward
    tokens = (outcomes.lengths * shaped.copies * is_right)[list(members)]
    return [
        RightAnswers(
            is_right=is_right[one.indices].to(one.batch.loss_mask.device),
            num_tokens=float(tokens.sum()),
        )
        for one in share
    ]


def _whole(gathered: Callable[[Tensor], Tensor], share: Sequence[_Microbatch]) -> WholeMinibatch:
    def everywhere(values: Callable[[_Microbatch], Tensor]) -> Tensor:
        return gathered(torch.cat([values(one)[one.trained] for one in share]))

    return WholeMinibatch(
        proximal=everywhere(lambda one: _known(one.proximal, "proximal")),
        behavior=everywhere(lambda one: one.batch.behavior_logprobs),
        advantages=everywhere(lambda one: one.advantages),
    )


def _fill_advantages(
    policy: "Policy",
    everything: Sequence[_Microbatch],
    outcomes: Outcomes,
    shaped: Prepared,
    algorithm: Algorithm,
) -> None:
    """Give every token its advantage, and the critic its targets."""
    outcomes = replace(outcomes, rewards=shaped.rewards)
    charges: list[Tensor | None] = [None] * len(everything)
    if algorithm.charges_kl:
        to_reference = algorithm.choice.kl.to == "reference"
        charges = [
            algorithm.reward_kl(
                _known(one.proximal, "proximal"),
                _known(one.reference, "reference") if to_reference else one.batch.behavior_logprobs,
                one.packing.mask,
            )
            for one in everything
        ]
    if algorithm.is_token_level:
        rewards = outcomes.centered() if algorithm.centers_rewards else outcomes.rewards
        rewarded = [
            algorithm.token_rewards(_here(rewards[one.indices], one), charge, one.packing)
            for one, charge in zip(everything, charges, strict=True)
        ]
        if algorithm.needs_whole_step:
            _fill_from_whole_step(policy, everything, rewarded, outcomes, algorithm)
        else:
            for one, per_token in zip(everything, rewarded, strict=True):
                result = algorithm.token_advantages(
                    TokenOutcomes(
                        rewards=per_token,
                        values=one.values,
                        packing=one.packing,
                        proximal=one.proximal,
                        squares=one.squares,
                    )
                )
                one.advantages, one.returns = result.advantages, result.returns
    else:
        total = torch.zeros_like(outcomes.rewards)
        for one, charge in zip(everything, charges, strict=True):
            if charge is not None:
                total[one.indices] = one.packing.sums(charge).to(total)
        if algorithm.charges_kl:
            total = algorithm.choice.kl.coefficient * policy.replicas.summed(total)
        charged = replace(outcomes, rewards=outcomes.rewards - total)
        advantages = algorithm.trajectory_advantages(charged)
        for one in everything:
            one.advantages = one.packing.spread(_here(advantages[one.indices], one))
    _whiten(policy.replicas.summed, everything, outcomes, algorithm)
    for one in everything:
        if one.teacher is not None:
            proximal = _known(one.proximal, "proximal")
            one.advantages = one.advantages + algorithm.taught(
                proximal, one.teacher, one.packing.mask
            )


def _fill_from_whole_step(
    policy: "Policy",
    everything: Sequence[_Microbatch],
    rewarded: Sequence[Tensor],
    outcomes: Outcomes,
    algorithm: Algorithm,
) -> None:
    """Give every token its advantage where that depends on tokens of other microbatches."""
    device = everything[0].packing.mask.device
    numbers = torch.cat([one.indices for one in everything])
    values = [one.values for one in everything if one.values is not None]
    squares = [one.squares for one in everything if one.squares is not None]
    result = algorithm.token_advantages(
        TokenOutcomes(
            rewards=torch.cat(list(rewarded)),
            values=torch.cat(values) if values else None,
            packing=_joined(everything, [one.packing.mask for one in everything]),
            proximal=torch.cat([_known(one.proximal, "proximal") for one in everything]),
            squares=torch.cat(squares) if squares else None,
            groups=Groups(
                of_sequence=outcomes.groups[numbers].to(device),
                num_groups=outcomes.num_groups,
                longest=max(1, int(outcomes.lengths.max())),
                summed=policy.replicas.summed,
            ),
        )
    )
    sizes = [len(one.packing.mask) for one in everything]
    for one, mine in zip(everything, torch.split(result.advantages, sizes), strict=True):
        one.advantages = mine
    if result.returns is not None:
        for one, mine in zip(everything, torch.split(result.returns, sizes), strict=True):
            one.returns = mine


def _joined(several: Sequence[_Microbatch], masks: Sequence[Tensor]) -> Packing:
    """Return the layout of several microbatches laid end to end, with these masks."""
    starts = torch.tensor([0, *(one.packing.num_sequences for one in several)]).cumsum(0).tolist()
    sequence = [one.packing.sequence + at for one, at in zip(several, starts, strict=False)]
    return Packing(torch.cat(list(masks)), torch.cat(sequence), starts[-1])


def _here(values: Tensor, one: _Microbatch) -> Tensor:
    return values.to(one.batch.loss_mask.device, torch.float32)


def _known(values: Tensor | None, what: str) -> Tensor:
    if values is None:
        raise ValueError(f"the {what} logprobs were not computed before they were needed")
    return values


def _whiten(
    summed: Callable[[Tensor], Tensor],
    everything: Sequence[_Microbatch],
    outcomes: Outcomes,
    algorithm: Algorithm,
) -> None:
    """Whiten or center advantages over the whole step, or over each of its groups."""
    over, _, how = algorithm.choice.whiten.partition("-")
    if over == "none":
        return
    by_group = over == "group"
    number = outcomes.groups if by_group else torch.zeros_like(outcomes.groups)
    count = outcomes.num_groups if by_group else 1
    total: Tensor | None = None
    spread = []
    for one in everything:
        index = one.packing.spread(number[one.indices].to(one.batch.loss_mask.device))
        spread.append(index)
        copies = None if one.copies is None else one.packing.spread(one.copies)
        mine = moments(one.advantages, one.packing.mask, index, count, copies)
        total = mine if total is None else total + mine
    if total is None:
        return
    total = summed(total)
    for one, index in zip(everything, spread, strict=True):
        one.advantages = whiten(
            one.advantages,
            one.packing.mask,
            index,
            total,
            divide_by_std=not how,
            leave_one_out=how == "leave-one-out",
        )


def _correct(
    policy: "Policy", share: Sequence[_Microbatch], algorithm: Algorithm
) -> tuple[float, float]:
    """Correct a whole minibatch at once; return how many tokens and sequences are kept."""
    sizes = [len(one.packing.mask) for one in share]
    packing = _joined(share, [one.trained for one in share])
    lags = [one.lags for one in share if one.lags is not None]
    entropies = [one.entropy for one in share if one.entropy is not None]
    references = [one.reference for one in share if one.reference is not None]
    correction = algorithm.correct(
        proximal=torch.cat([_known(one.proximal, "proximal") for one in share]),
        behavior=torch.cat([one.batch.behavior_logprobs for one in share]),
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
