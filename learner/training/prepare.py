"""What a learner step must know before its first gradient: forward passes, advantages, corrections.

All of it is of the weights that the step starts from. Sums go over all microbatches and replicas.

Shapes: T tokens of B sequences of one microbatch, N trajectories of the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.algos.advantages import Outcomes
from slipstream.algos.compose import Algorithm, Prepared, RightAnswers
from slipstream.algos.corrections import Correction
from slipstream.algos.packing import Packing
from slipstream.algos.reduce import Denominators
from slipstream.algos.returns import Groups, TokenOutcomes, moments, whiten
from slipstream.algos.surrogates import WholeMinibatch
from slipstream.learner.batches.packing import PackedBatch
from slipstream.wire.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.learner.training.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """This rank's share of one optimizer update."""

    batches: Sequence[PackedBatch]
    indices: Sequence[Sequence[int]]  # trajectories of the step that each microbatch holds
    members: Sequence[int]  # trajectories of the whole minibatch, those of other ranks included


@dataclass(slots=True)
class Microbatch:
    """One microbatch with all that its loss needs, filled by ``ready`` in the order of fields."""

    batch: PackedBatch
    packing: Packing
    indices: Tensor  # [B] int64
    copies: Tensor | None  # [B] int64, None if every trajectory is trained once
    lags: Tensor | None  # [T]
    proximal: Tensor | None = None  # [T]; None until the forward pass of the training itself
    entropy: Tensor | None = None  # [T] of the proximal policy, where a correction needs it
    squares: Tensor | None = None  # [T] of the proximal policy, where advantages need it
    reference: Tensor | None = None  # [T]
    teacher: Tensor | None = None  # [T]
    values: Tensor | None = None  # [T]
    advantages: Tensor = field(default_factory=lambda: torch.empty(0))  # [T]
    returns: Tensor | None = None  # [T]
    right: RightAnswers | None = None
    correction: Correction | None = None

    @property
    def trained(self) -> Tensor:
        """Return the tokens that are in the batch at least once, [T] bool."""
        return self.packing.present(self.copies)


@dataclass(frozen=True, slots=True)
class Ready:
    """A minibatch that can be trained."""

    microbatches: Sequence[Microbatch]
    denominators: Denominators
    kept: Denominators | None  # of the surrogate, where rejected tokens do not count
    whole: WholeMinibatch | None = None  # where the surrogate is shown it

    @property
    def is_empty(self) -> bool:
        """Return whether no rank has a token of it to train."""
        return self.denominators.num_tokens == 0

    @property
    def batches(self) -> list[PackedBatch]:
        """Return what the models read."""
        return [one.batch for one in self.microbatches]


def ready(
    policy: "Policy",
    minibatches: Sequence[Minibatch],
    outcomes: Outcomes,
    prepared: Prepared,
    algorithm: Algorithm,
    *,
    step: int,
    trains_policy: bool,
) -> list[Ready]:
    """Do every forward pass that comes before training; return the minibatches with the results.

    The first minibatch is computed with the weights that the step starts from: unless something
    has to know them earlier, its proximal logprobs are those of its training pass, and cost none
    of their own.

    Raises:
        ConfigError: the advantage cannot be computed from such rewards.
    """
    needs_all = algorithm.needs_proximal or not trains_policy
    shares = [_laid_out(minibatch, prepared.copies, step) for minibatch in minibatches]
    for number, share in enumerate(shares):
        _do_forward_passes(policy, share, algorithm, needs_proximal=needs_all or number > 0)
    everything = [one for share in shares for one in share]
    try:
        _fill_advantages(policy, everything, outcomes, prepared, algorithm)
    except ValueError as error:  # of a part: these rewards are not for it
        name = algorithm.choice.advantage.part.name
        raise ConfigError(f"algo.advantage = {name!r} cannot be taken here: {error}") from error
    result = []
    for share, minibatch in zip(shares, minibatches, strict=True):
        members = list(minibatch.members)
        lengths, copies = outcomes.lengths[members], prepared.copies[members]
        denominators = algorithm.denominators(
            float((lengths * copies).sum()), float(((lengths > 0) * copies).sum())
        )
        _mark_right_answers(share, members, outcomes, prepared, algorithm)
        kept = whole = None
        if algorithm.corrects_before and trains_policy:
            counts = _correct(policy, share, algorithm)
            if algorithm.choice.reduce.denominator == "kept":
                kept = algorithm.denominators(*counts)
        if algorithm.shows_minibatch and trains_policy:
            whole = _whole(policy.replicas.gathered, share)
        result.append(Ready(share, denominators, kept, whole))
    return result


def _do_forward_passes(
    policy: "Policy", share: Sequence[Microbatch], algorithm: Algorithm, *, needs_proximal: bool
) -> None:
    """Ask every model that has a say about a minibatch."""
    batches = [one.batch for one in share]
    if needs_proximal:
        for one, said in zip(share, policy.proximal(batches), strict=True):
            one.proximal, one.entropy, one.squares = said.logprobs, said.entropy, said.squares
    if policy.reference is not None and algorithm.needs_reference_logprobs:
        _fill(share, "reference", policy.reference.logprobs(batches))
    if policy.teacher is not None:
        _fill(share, "teacher", policy.teacher.logprobs(batches))
    if policy.critic is not None:
        _fill(share, "values", policy.critic.values(batches))


def _mark_right_answers(
    share: Sequence[Microbatch],
    members: Sequence[int],
    outcomes: Outcomes,
    prepared: Prepared,
    algorithm: Algorithm,
) -> None:
    """Tell the microbatches of a minibatch which of their answers are imitated."""
    if algorithm.choice.likelihood.coefficient == 0:
        return
    is_right = outcomes.rewards >= algorithm.choice.likelihood.least_reward
    tokens = (outcomes.lengths * prepared.copies * is_right)[list(members)]
    for one in share:
        here = is_right[one.indices].to(one.batch.loss_mask.device)
        one.right = RightAnswers(is_right=here, num_tokens=float(tokens.sum()))


def _whole(gathered: Callable[[Tensor], Tensor], share: Sequence[Microbatch]) -> WholeMinibatch:
    def everywhere(values: Callable[[Microbatch], Tensor]) -> Tensor:
        return gathered(torch.cat([values(one)[one.trained] for one in share]))

    return WholeMinibatch(
        proximal=everywhere(lambda one: _known(one.proximal, "proximal")),
        behavior=everywhere(lambda one: one.batch.behavior_logprobs),
        advantages=everywhere(lambda one: one.advantages),
    )


def _laid_out(minibatch: Minibatch, copies: Tensor, step: int) -> list[Microbatch]:
    everyone_once = bool((copies == 1).all())
    share = []
    for batch, indices in zip(minibatch.batches, minibatch.indices, strict=True):
        index = torch.tensor(list(indices), dtype=torch.int64)
        device = batch.loss_mask.device
        share.append(
            Microbatch(
                batch=batch,
                packing=Packing.of(batch.loss_mask, batch.cu_seqlens),
                indices=index,
                copies=None if everyone_once else copies[index].to(device),
                lags=None if batch.version_steps is None else step - batch.version_steps,
            )
        )
    return share


def _fill(share: Sequence[Microbatch], name: str, values: Sequence[Tensor]) -> None:
    for one, value in zip(share, values, strict=True):
        setattr(one, name, value)


def _fill_advantages(
    policy: "Policy",
    everything: Sequence[Microbatch],
    outcomes: Outcomes,
    prepared: Prepared,
    algorithm: Algorithm,
) -> None:
    """Give every token its advantage, and the critic its targets."""
    shaped = replace(outcomes, rewards=prepared.rewards)
    charges = [_kl_charge(one, algorithm) for one in everything]
    if algorithm.is_token_level:
        rewards = shaped.centered() if algorithm.centers_rewards else shaped.rewards
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
        total = torch.zeros_like(shaped.rewards)
        for one, charge in zip(everything, charges, strict=True):
            if charge is not None:
                total[one.indices] = one.packing.sums(charge).to(total)
        if algorithm.charges_kl:
            total = algorithm.choice.kl.coefficient * policy.replicas.summed(total)
        charged = replace(shaped, rewards=shaped.rewards - total)
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
    everything: Sequence[Microbatch],
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


def _joined(several: Sequence[Microbatch], masks: Sequence[Tensor]) -> Packing:
    """Return the layout of several microbatches laid end to end, with these masks."""
    starts = torch.tensor([0, *(one.packing.num_sequences for one in several)]).cumsum(0).tolist()
    sequence = [one.packing.sequence + at for one, at in zip(several, starts, strict=False)]
    return Packing(torch.cat(list(masks)), torch.cat(sequence), starts[-1])


def _here(values: Tensor, one: Microbatch) -> Tensor:
    return values.to(one.batch.loss_mask.device, torch.float32)


def _kl_charge(one: Microbatch, algorithm: Algorithm) -> Tensor | None:
    if not algorithm.charges_kl:
        return None
    other = one.batch.behavior_logprobs
    if algorithm.choice.kl.to == "reference":
        other = _known(one.reference, "reference")
    return algorithm.reward_kl(_known(one.proximal, "proximal"), other, one.packing.mask)


def _known(values: Tensor | None, what: str) -> Tensor:
    if values is None:
        raise ValueError(f"the {what} logprobs were not computed before they were needed")
    return values


def _whiten(
    summed: Callable[[Tensor], Tensor],
    everything: Sequence[Microbatch],
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
    policy: "Policy", share: Sequence[Microbatch], algorithm: Algorithm
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
