"""Rewards of turns: what the policy earned each time that it spoke.

Shapes: K turns of N trajectories of a step, those of one trajectory after those of another.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from slipstream.algos.scans import scan_backward


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRewards:
    """Rewards of the turns of all trajectories of a step.

    Turns are in the order of a trajectory's tokens: that of time in a branch, and one branch after
    the other.

    Raises:
        ValueError: there are not as many rewards as turns, or a trajectory has no turn.
    """

    rewards: Tensor  # [K], held as float64; 0.0 where none was given
    counts: Tensor  # [N] int64, turns of each trajectory
    tokens: Tensor  # [K] int64, that the policy chose in each

    def __post_init__(self) -> None:
        """Reject rewards of other turns."""
        count = int(self.counts.sum())
        if self.rewards.shape != (count,) or self.tokens.shape != (count,):
            raise ValueError(
                f"{tuple(self.rewards.shape)} rewards and {tuple(self.tokens.shape)} lengths came "
                f"with {count} turns"
            )
        if bool((self.counts < 1).any()):
            raise ValueError("a trajectory has no turn")
        object.__setattr__(self, "rewards", self.rewards.double())

    @property
    def trajectory(self) -> Tensor:
        """The trajectory of each turn, [K] int64."""
        return torch.arange(len(self.counts)).repeat_interleave(self.counts)

    @property
    def number(self) -> Tensor:
        """Which turn of its trajectory each is, from 0, [K] int64."""
        return torch.arange(len(self.rewards)) - self._starts[self.trajectory]

    @property
    def sums(self) -> Tensor:
        """What the turns of each trajectory add up to, [N] float64."""
        zeros = torch.zeros(len(self.counts), dtype=torch.float64)
        return zeros.index_add(0, self.trajectory, self.rewards)

    def returns(self, discount: float) -> Tensor:
        """Return G_k = r_k + discount * G_(k+1): the rewards from each turn on. Shapes [K]."""
        trajectory = self.trajectory
        goes_on = torch.zeros_like(trajectory, dtype=torch.bool)
        goes_on[:-1] = trajectory[1:] == trajectory[:-1]
        return scan_backward(self.rewards, discount * goes_on.double())

    def adding_up_to(self, totals: Tensor, *, scale: float = 1.0) -> Self:
        """Return them scaled, with what a trajectory's total has beyond their sum in its last turn.

        Args:
            totals: [N].
            scale: factor of the rewards of turns.
        """
        rewards = scale * self.rewards
        lasts = self.counts.cumsum(0) - 1
        rewards[lasts] += totals.double() - scale * self.sums
        return type(self)(rewards=rewards, counts=self.counts, tokens=self.tokens)

    def of(self, trajectories: Tensor, per_turn: Tensor) -> Tensor:
        """Return the values of the turns of some trajectories, in their order. Shapes [K] -> [k].

        Args:
            trajectories: int64.
            per_turn: [K].

        Raises:
            ValueError: there are not as many values as turns.
        """
        if per_turn.shape != self.rewards.shape:
            raise ValueError(f"{len(per_turn)} values of turns came with {len(self.rewards)} turns")
        counts = self.counts[trajectories]
        before = counts.cumsum(0) - counts
        place = torch.arange(int(counts.sum())) - before.repeat_interleave(counts)
        return per_turn[self._starts[trajectories].repeat_interleave(counts) + place]

    @property
    def _starts(self) -> Tensor:
        return self.counts.cumsum(0) - self.counts
