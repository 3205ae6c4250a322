"""Advantages of all tokens of a learner step, and the targets of its critic.

Sums go over all microbatches and replicas. Shapes: T tokens of one microbatch, N trajectories.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.algos.advantages import Outcomes
from slipstream.algos.compose import Algorithm, Prepared
from slipstream.algos.returns import Groups, TokenOutcomes, moments, whiten
from slipstream.learner.training.microbatch import Microbatch, joined, known

if TYPE_CHECKING:
    from slipstream.learner.training.policy import Policy


def fill_advantages(
    policy: "Policy",
    everything: Sequence[Microbatch],
    outcomes: Outcomes,
    shaped: Prepared,
    algorithm: Algorithm,
) -> None:
    """Give every token its advantage, and the critic its targets."""
    outcomes = replace(outcomes, rewards=shaped.rewards, turns=shaped.turns)
    charges: list[Tensor | None] = [None] * len(everything)
    if algorithm.charges_kl:
        to_reference = algorithm.choice.kl.to == "reference"
        charges = [
            algorithm.reward_kl(
                known(one.proximal, "proximal"),
                known(one.reference, "reference") if to_reference else one.behavior,
                one.packing.mask,
            )
            for one in everything
        ]
    fill = _fill_by_tokens if algorithm.is_token_level else _fill_by_trajectories
    fill(policy, everything, charges, outcomes, algorithm)
    _whiten(policy.replicas.summed, everything, outcomes, algorithm)
    for one in everything:
        if one.teacher is not None:
            proximal = known(one.proximal, "proximal")
            one.advantages = one.advantages + algorithm.taught(
                proximal, one.teacher, one.packing.mask
            )


def _fill_by_trajectories(
    policy: "Policy",
    everything: Sequence[Microbatch],
    charges: Sequence[Tensor | None],
    outcomes: Outcomes,
    algorithm: Algorithm,
) -> None:
    """Give all tokens of a trajectory, or of a turn, its advantage."""
    total = torch.zeros_like(outcomes.rewards)
    for one, charge in zip(everything, charges, strict=True):
        if charge is not None:
            total[one.indices] = one.packing.sums(charge).to(total)
    if algorithm.charges_kl:
        total = algorithm.choice.kl.coefficient * policy.replicas.summed(total)
    charged = replace(outcomes, rewards=outcomes.rewards - total)
    advantages = algorithm.trajectory_advantages(charged)
    for one in everything:
        if algorithm.needs_turn_rewards:
            mine = outcomes.known_turns.of(one.indices, advantages)
            one.advantages = one.packing.turns.spread(one.here(mine))
        else:
            one.advantages = one.packing.spread(one.here(advantages[one.indices]))


def _fill_by_tokens(
    policy: "Policy",
    everything: Sequence[Microbatch],
    charges: Sequence[Tensor | None],
    outcomes: Outcomes,
    algorithm: Algorithm,
) -> None:
    """Give every token an advantage of its own, and its return to the critic."""
    rewarded = [
        algorithm.token_rewards(one.here(rewards), charge, one.packing)
        for one, rewards, charge in zip(
            everything, _rewards_by(everything, outcomes, algorithm), charges, strict=True
        )
    ]
    if algorithm.needs_whole_step:
        _fill_from_whole_step(policy, everything, rewarded, outcomes, algorithm)
        return
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


def _rewards_by(
    everything: Sequence[Microbatch], outcomes: Outcomes, algorithm: Algorithm
) -> list[Tensor]:
    """Return the rewards of each microbatch's trajectories, or of their turns."""
    if algorithm.needs_turn_rewards:
        turns = outcomes.known_turns
        return [turns.of(one.indices, turns.rewards) for one in everything]
    rewards = outcomes.centered() if algorithm.centers_rewards else outcomes.rewards
    return [rewards[one.indices] for one in everything]


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
            packing=joined(everything, [one.packing.mask for one in everything]),
            proximal=torch.cat([known(one.proximal, "proximal") for one in everything]),
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
