"""Facts from the headers of a step, equal on all ranks. Shapes: N trajectories."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from slipstream.algos.advantages import Outcomes
from slipstream.algos.turns import TurnRewards
from slipstream.wire.messages.broker import DeliveredGroup, DeliveredTrajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class StepData:
    """Outcomes of a learner step, and its algorithm's inputs besides tokens."""

    outcomes: Outcomes
    is_truncated: Tensor  # [N] bool
    step: int  # learner step, which the age of tokens is relative to
    seed: int  # the run's seed

    def step_generator(self) -> torch.Generator:
        """Random generator of this step: equal on all ranks, and when the step is trained again."""
        text = hashlib.blake2b(f"{self.seed}/{self.step}".encode(), digest_size=7).digest()
        return torch.Generator().manual_seed(int.from_bytes(text, "little"))


def step_data(groups: Sequence[DeliveredGroup], *, step: int, seed: int) -> StepData:
    """Return the outcomes of delivered trajectories, in the order of groups and siblings."""
    trajectories = [t for group in groups for t in group.trajectories]
    sizes = torch.tensor([len(group.trajectories) for group in groups])
    return StepData(
        outcomes=Outcomes(
            rewards=torch.tensor([t.reward for t in trajectories], dtype=torch.float64),
            groups=torch.arange(len(groups)).repeat_interleave(sizes),
            num_groups=len(groups),
            lengths=torch.tensor([t.header.num_response_tokens for t in trajectories]),
            parts={
                name: torch.tensor(
                    [t.parts.get(name, math.nan) for t in trajectories], dtype=torch.float64
                )
                for name in sorted({name for t in trajectories for name in t.parts})
            },
            turns=_turn_rewards(trajectories),
        ),
        is_truncated=torch.tensor([t.header.finish_reason == "length" for t in trajectories]),
        step=step,
        seed=seed,
    )


def _turn_rewards(trajectories: Sequence[DeliveredTrajectory]) -> TurnRewards | None:
    """Return the rewards of all turns, 0 for a trajectory without; None if all are without."""
    if not any(t.turn_rewards for t in trajectories):
        return None
    turns = [t.header.chosen for t in trajectories]
    rewards = [t.turn_rewards or (0.0,) * len(t.header.chosen) for t in trajectories]
    return TurnRewards(
        rewards=torch.tensor(list(chain.from_iterable(rewards)), dtype=torch.float64),
        counts=torch.tensor([len(trajectory_turns) for trajectory_turns in turns]),
        tokens=torch.tensor([turn.num_tokens for turn in chain.from_iterable(turns)]),
    )


def batch_figures(
    groups: Sequence[DeliveredGroup], step: int, *, num_lags: int = 0
) -> dict[str, float]:
    """Return the figures that need only the headers of a batch.

    The variance of rewards within a group (population) is also given by the lag of the group's
    oldest token; larger lags count as the largest.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    count = len(trajectories)
    headers = [t.header for t in trajectories]
    tokens = sum(h.num_response_tokens for h in headers)
    lag_sum = sum(
        (step - version.step) * n for h in headers for version, n in h.tokens_by_version()
    )
    variances: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        rewards = torch.tensor([t.reward for t in group.trajectories], dtype=torch.float64)
        variance = float(rewards.var(unbiased=False))
        variances["reward/group_variance"].append(variance)
        oldest = max(step - t.header.oldest_version.step for t in group.trajectories)
        if num_lags:
            variances[f"reward/group_variance@lag{min(oldest, num_lags - 1)}"].append(variance)
    return {
        "reward/mean": sum(t.reward for t in trajectories) / count,
        "response/tokens": tokens / count,
        "response/truncated": sum(h.finish_reason == "length" for h in headers) / count,
        "turns/mean": sum(len(h.chosen) for h in headers) / count,
        "turns/max": float(max(len(h.chosen) for h in headers)),
        "turns/branched": sum(bool(h.branches) for h in headers) / count,
        "staleness/mean": lag_sum / tokens,
        "staleness/oldest": float(max(step - h.oldest_version.step for h in headers)),
        **{name: sum(values) / len(values) for name, values in variances.items()},
        **_part_means(trajectories),
    }


def _part_means(trajectories: Sequence[DeliveredTrajectory]) -> dict[str, float]:
    """Return the mean of each number in rewards' parts, over the answers that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.parts.items():
            if name != "score":  # the reward itself
                values[f"reward/part/{name}"].append(value)
    return {name: math.fsum(each) / len(each) for name, each in sorted(values.items())}
