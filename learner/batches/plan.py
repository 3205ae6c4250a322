"""Pure: which replica trains which trajectories, packed into which microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from slipstream.wire.errors import ConfigError

Indices = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MinibatchPlan:
    """One optimizer update: microbatches of trajectory indices, by data-parallel rank."""

    microbatches: tuple[tuple[Indices, ...], ...]  # [replica][microbatch]

    @property
    def members(self) -> list[int]:
        """The trajectories of all its microbatches."""
        return [i for share in self.microbatches for indices in share for i in indices]


def plan_step(
    num_tokens: Sequence[int], *, replicas: int, minibatches: int, max_tokens: int
) -> tuple[MinibatchPlan, ...]:
    """Split trajectories into minibatches in order, balance each over replicas, and pack it.

    No sequence is split: one that is longer than ``max_tokens`` has a microbatch to itself. A batch
    too small for ``minibatches``, as the last one of a run may be, is split into fewer, so that
    every replica has a part of each.

    Raises:
        ConfigError: there are fewer trajectories than replicas.
    """
    count = len(num_tokens)
    if count < replicas:
        raise ConfigError(
            f"a batch of {count} trajectories cannot be split over {replicas} data-parallel "
            "replicas, each needs one: raise run.min_groups or lower learner.ranks"
        )
    minibatches = min(minibatches, count // replicas)
    bounds = [count * i // minibatches for i in range(minibatches + 1)]
    plans = []
    for start, end in pairwise(bounds):
        shares = _balance(range(start, end), num_tokens, replicas)
        plans.append(MinibatchPlan(tuple(_pack(share, num_tokens, max_tokens) for share in shares)))
    return tuple(plans)


def _balance(indices: Sequence[int], cost: Sequence[int], replicas: int) -> list[list[int]]:
    """Give the longest first to the replica with the least; each gets at least one."""
    shares: list[list[int]] = [[] for _ in range(replicas)]
    load = [0] * replicas
    for index in sorted(indices, key=lambda i: (-cost[i], i)):
        target = min(range(replicas), key=lambda r: (load[r], r))
        shares[target].append(index)
        load[target] += cost[index]
    return shares


def _pack(share: Sequence[int], num_tokens: Sequence[int], max_tokens: int) -> tuple[Indices, ...]:
    """First fit, longest first."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in share:
        need = num_tokens[index]
        fitting = next((b for b, free in enumerate(room) if free >= need), None)
        if fitting is None:
            bins.append([])
            room.append(max_tokens)
            fitting = len(bins) - 1
        bins[fitting].append(index)
        room[fitting] -= need
    return tuple(tuple(sorted(indices)) for indices in bins)
