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
                known(microbatch.proximal, "proximal"),
                known(microbatch.reference, "reference") if to_reference else microbatch.behavior,
                microbatch.packing.mask,
            )
            for microbatch in everything
        ]
    fill = _fill_by_tokens if algorithm.is_token_level else _fill_by_trajectories
    fill(policy, everything, charges, outcomes, algorithm)
    _whiten(policy.replicas.summed, everything, outcomes, algorithm)
    for microbatch in everything:
        if microbatch.teacher is not None:
            proximal = known(microbatch.proximal, "proximal")
            microbatch.advantages = microbatch.advantages + algorithm.taught(
                proximal, microbatch.teacher, microbatch.packing.mask
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
    for microbatch, charge in zip(everything, charges, strict=True):
        if charge is not None:
            total[microbatch.indices] = microbatch.packing.sums(charge).to(total)
    if algorithm.charges_kl:
        total = algorithm.choice.kl.coefficient * policy.replicas.summed(total)
    charged = replace(outcomes, rewards=outcomes.rewards - total)
    advantages = algorithm.trajectory_advantages(charged)
    for microbatch in everything:
        if algorithm.needs_turn_rewards:
            mine = outcomes.known_turns.of(microbatch.indices, advantages)
            microbatch.advantages = microbatch.packing.turns.spread(microbatch.here(mine))
        else:
            microbatch.advantages = microbatch.packing.spread(
                microbatch.here(advantages[microbatch.indices])
            )


def _fill_by_tokens(
    policy: "Policy",
    everything: Sequence[Microbatch],
    charges: Sequence[Tensor | None],
    outcomes: Outcomes,
    algorithm: Algorithm,
) -> None:
    """Give every token an advantage of its own, and its return to the critic."""
    rewarded = [
        algorithm.token_rewards(microbatch.here(rewards), charge, microbatch.packing)
        for microbatch, rewards, charge in zip(
            everything, _rewards_by(everything, outcomes, algorithm), charges, strict=True
        )
    ]
    if algorithm.needs_whole_step:
        _fill_from_whole_step(policy, everything, rewarded, outcomes, algorithm)
        return
    for microbatch, per_token in zip(everything, rewarded, strict=True):
        result = algorithm.token_advantages(
            TokenOutcomes(
                rewards=per_token,
                values=microbatch.values,
                packing=microbatch.packing,
                proximal=microbatch.proximal,
                squares=microbatch.squares,
            )
        )
        microbatch.advantages, microbatch.returns = result.advantages, result.returns


def _rewards_by(
    everything: Sequence[Microbatch], outcomes: Outcomes, algorithm: Algorithm
) -> list[Tensor]:
    """Return the rewards of each microbatch's trajectories, or of their turns."""
    if algorithm.needs_turn_rewards:
        turns = outcomes.known_turns
        return [turns.of(microbatch.indices, turns.rewards) for microbatch in everything]
    rewards = outcomes.centered() if algorithm.centers_rewards else outcomes.rewards
    return [rewards[microbatch.indices] for microbatch in everything]


def _fill_from_whole_step(
    policy: "Policy",
    everything: Sequence[Microbatch],
    rewarded: Sequence[Tensor],
    outcomes: Outcomes,
    algorithm: Algorithm,
) -> None:
    """Give every token its advantage if that depends on tokens of other microbatches."""
    device = everything[0].packing.mask.device
    numbers = torch.cat([microbatch.indices for microbatch in everything])
    values = [microbatch.values for microbatch in everything if microbatch.values is not None]
    squares = [microbatch.squares for microbatch in everything if microbatch.squares is not None]
    result = algorithm.token_advantages(
        TokenOutcomes(
            rewards=torch.cat(list(rewarded)),
            values=torch.cat(values) if values else None,
            packing=joined(everything, [microbatch.packing.mask for microbatch in everything]),
            proximal=torch.cat(
                [known(microbatch.proximal, "proximal") for microbatch in everything]
            ),
            squares=torch.cat(squares) if squares else None,
            groups=Groups(
                of_sequence=outcomes.groups[numbers].to(device),
                num_groups=outcomes.num_groups,
                longest=max(1, int(outcomes.lengths.max())),
                summed=policy.replicas.summed,
            ),
        )
    )
    sizes = [len(microbatch.packing.mask) for microbatch in everything]
    for microbatch, mine in zip(everything, torch.split(result.advantages, sizes), strict=True):
        microbatch.advantages = mine
    if result.returns is not None:
        for microbatch, mine in zip(everything, torch.split(result.returns, sizes), strict=True):
            microbatch.returns = mine


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
    for microbatch in everything:
        index = microbatch.packing.spread(
            number[microbatch.indices].to(microbatch.batch.loss_mask.device)
        )
        spread.append(index)
        copies = None if microbatch.copies is None else microbatch.packing.spread(microbatch.copies)
        mine = moments(microbatch.advantages, microbatch.packing.mask, index, count, copies)
        total = mine if total is None else total + mine
    if total is None:
        return
    total = summed(total)
    for microbatch, index in zip(everything, spread, strict=True):
        microbatch.advantages = whiten(
            microbatch.advantages,
            microbatch.packing.mask,
            index,
            total,
            divide_by_std=not how,
            leave_one_out=how == "leave-one-out",
        )
