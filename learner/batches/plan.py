"""Pure: which replica trains which trajectories, packed into which microbatches.

A plan is good if the heaviest replica, which all others wait for, has at most 1% more FLOPs than
the mean or than the heaviest trajectory, and if there are at most 2% more microbatches than tokens
(and the coupling of replicas) need. Among good plans the quickest is taken, by an estimate of the
step's time; if no plan is good, as with two or three trajectories per replica, the quickest of all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from slipstream.learner.batches.balance import Trading, deal
from slipstream.learner.batches.bins import (
    Bins,
    best_fit,
    fewest_bins,
    least_bins,
    level_bins,
    spread,
)
from slipstream.learner.batches.schedule import pipeline_span
from slipstream.wire.errors import ConfigError

Indices = tuple[int, ...]


class PromptCost(NamedTuple):
    """Work on the prompt of a trajectory, which siblings in one microbatch do once."""

    group: int
    flops: float  # FLOPs that each further sibling saves


class _Unit(NamedTuple):
    """Trajectories that stay in one microbatch."""

    members: Indices
    num_tokens: int
    flops: float


_BALANCED = 1.01  # FLOPs of the heaviest replica, over the least there can be
_FEW = 1.02  # microbatches, over the least there can be
_OVERHEAD = 0.02  # time of a microbatch besides its FLOPs, as a share of a mean microbatch's


@dataclass(frozen=True, slots=True)
class MinibatchPlan:
    """One optimizer update: microbatches of trajectory indices, by data-parallel replica."""

    microbatches: tuple[tuple[Indices, ...], ...]  # [replica][microbatch]

    @property
    def members(self) -> list[int]:
        """Trajectories of all its microbatches."""
        return [i for share in self.microbatches for indices in share for i in indices]


def plan_step(
    num_tokens: Sequence[int],
    flops: Sequence[float],
    *,
    replicas: int,
    minibatches: int,
    max_tokens: int,
    coupled: bool = False,
    multiple_of: int = 1,
    stages: int = 1,
    prompts: Sequence[PromptCost] = (),
) -> tuple[MinibatchPlan, ...]:
    """Split trajectories into minibatches in order, balance each over replicas, and pack it.

    ``num_tokens`` are positive, and include the alignment of packed sequences. Replicas are
    balanced by ``flops``; microbatches are bounded by tokens. No trajectory is split: context
    parallelism does that within a replica. A trajectory longer than ``max_tokens`` has a
    microbatch to itself. Equal arguments give equal plans.

    Replicas are ``coupled`` if one cannot train a microbatch while another has none: by expert
    parallelism, which exchanges tokens between them in every layer, or by a pipeline, whose
    schedule has a single number of microbatches. Then all replicas have the same number in a
    minibatch, a multiple of ``multiple_of`` (for an interleaved pipeline, of its stages);
    microbatches left without a trajectory are empty and come last. Otherwise numbers may differ,
    and no microbatch is empty.

    With ``prompts``, one for each trajectory, siblings stay together where the step is quicker so:
    less is computed, and replicas and microbatches are less equal.

    Microbatches of a replica are ordered by FLOPs: the smallest first and last, the largest in
    the middle. While a pipeline of ``stages`` stages fills, its later stages wait for the first
    microbatches; while it drains, its earlier stages wait for the last. Small ones make both waits
    short. The n-th largest microbatch has the same place in every replica, so coupled replicas
    train similar ones at a time: in every layer of experts all replicas wait for the largest.

    A batch too small for ``minibatches``, as the last of a run may be, is split into fewer, so
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
        alone = [_Unit((i,), int(num_tokens[i]), flops[i]) for i in range(start, end)]
        ways = [alone]
        together = _together(alone, prompts, max_tokens) if prompts else alone
        if replicas <= len(together) < len(alone):
            ways.append(together)
        divided = [
            _Minibatch(
                units=units,
                replicas=replicas,
                max_tokens=max_tokens,
                coupled=coupled,
                multiple_of=multiple_of,
                stages=stages,
            ).plan()
            for units in ways
        ]
        plans.append(min(divided, key=itemgetter(0))[1])
    return tuple(plans)


def _together(
    alone: Sequence[_Unit], prompts: Sequence[PromptCost], max_tokens: int
) -> list[_Unit]:
    """Return units of siblings, as many of a group as a microbatch takes."""
    units: list[_Unit] = []
    newest: dict[int, int] = {}  # group -> its unit with room
    for trajectory in alone:
        group, saved = prompts[trajectory.members[0]]
        at = newest.get(group)
        if at is None or units[at].num_tokens + trajectory.num_tokens > max_tokens:
            newest[group] = len(units)
            units.append(trajectory)
            continue
        siblings = units[at]
        units[at] = _Unit(
            siblings.members + trajectory.members,
            siblings.num_tokens + trajectory.num_tokens,
            siblings.flops + trajectory.flops - saved,
        )
    return units


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to divide a minibatch."""

    shares: list[Bins]  # [replica][microbatch], in order
    is_good: bool
    time: float  # duration of the step, in FLOPs of a replica


@dataclass(frozen=True, kw_only=True)
class _Minibatch:
    """The trajectories of one optimizer update, and ways to divide them."""

    units: Sequence[_Unit]
    replicas: int
    max_tokens: int
    coupled: bool
    multiple_of: int
    stages: int

    @cached_property
    def num_tokens(self) -> list[int]:
        """Tokens of each unit."""
        return [unit.num_tokens for unit in self.units]

    @cached_property
    def flops(self) -> list[float]:
        """FLOPs of each unit."""
        return [unit.flops for unit in self.units]

    def plan(self) -> tuple[float, MinibatchPlan]:
        """Return the duration of the step, in FLOPs of a replica, and its microbatches."""
        way = self._divided()

        def members(units: Sequence[int]) -> Indices:
            return tuple(sorted(i for unit in units for i in self.units[unit].members))

        shares = tuple(tuple(members(units) for units in share) for share in way.shares)
        return way.time, MinibatchPlan(shares)

    def _divided(self) -> _Way:
        tried: list[_Way] = []
        for shares in self._ways():
            fewest = sum(map(len, tried[0].shares if tried else shares))
            tried.append(self._judged([self._in_order(share) for share in shares], fewest))
            if tried[-1].is_good and not self.coupled:  # other ways are no quicker
                break
        candidates = [way for way in tried if way.is_good] or tried
        return min(candidates, key=lambda way: way.time)

    def _in_order(self, share: Bins) -> Bins:
        """Return a replica's microbatches, small ones at both ends, empty ones after all others."""
        ordered = sorted(
            (sorted(members) for members in share if members),
            key=lambda members: (-sum(self.flops[i] for i in members), members),
        )
        return ordered[::2][::-1] + ordered[1::2] + [[]] * (len(share) - len(ordered))

    def _judged(self, shares: list[Bins], fewest: int) -> _Way:
        work = [[sum(self.flops[i] for i in members) for members in share] for share in shares]
        heaviest, total, number = max(map(sum, work)), sum(self.flops), sum(map(len, shares))
        allowed = max(fewest, _FEW * self._rounded(least_bins(self.num_tokens, self.max_tokens)))
        overhead = _OVERHEAD * total / fewest
        if self.coupled:
            together = [max(place) + overhead for place in zip(*work, strict=True)]
            time = pipeline_span(together, self.stages)
        else:
            time = max(sum(flops) + overhead * len(flops) for flops in work)
        is_balanced = heaviest <= _BALANCED * max(total / self.replicas, max(self.flops))
        return _Way(shares, is_balanced and number <= allowed, time)

    def _rounded(self, number: int) -> int:
        """Return the least number >= ``number`` of microbatches that replicas can have."""
        unit = self.replicas * self.multiple_of if self.coupled else 1
        return max(-(-number // unit) * unit, self.replicas)

    def _ways(self) -> Iterator[list[Bins]]:
        """Pack everything and deal the bins, or divide first and pack each share."""
        everything = range(len(self.num_tokens))
        packed = fewest_bins(everything, self.num_tokens, self.max_tokens)
        fewest = self._rounded(len(packed))
        numbers = {fewest}
        if not self.coupled:
            few = int(_FEW * least_bins(self.num_tokens, self.max_tokens))
            numbers |= {max(few, fewest), -(-fewest // self.replicas) * self.replicas}
        for number in sorted(numbers):
            bins = self._level(everything, number) or spread(packed, number)
            replica_of = deal(
                [sum(self.flops[i] for i in members) for members in bins], self.replicas
            )
            shares = self._traded(bins, replica_of, self.max_tokens)
            yield from self._coupled(shares) if self.coupled else (_without_empty(shares),)
        unlimited = sum(self.num_tokens)
        parts = level_bins(
            everything, self.num_tokens, self.flops, capacity=unlimited, number=self.replicas
        )
        traded = self._traded(parts or [], range(self.replicas), unlimited)
        if self.coupled:
            shares = [best_fit(part, self.num_tokens, self.max_tokens) for (part,) in traded]
            yield from self._coupled(shares)
        shares = [fewest_bins(part, self.num_tokens, self.max_tokens) for (part,) in traded]
        yield from self._coupled(shares) if self.coupled else (shares,)

    def _coupled(self, shares: list[Bins]) -> Iterator[list[Bins]]:
        """Give replicas equal numbers of microbatches: as dealt, and level by FLOPs."""
        number = -(-max(map(len, shares)) // self.multiple_of) * self.multiple_of
        shares = [spread(share, number) for share in _without_empty(shares)]
        yield shares
        yield [
            self._level([i for members in share for i in members], number) or share
            for share in shares
        ]

    def _level(self, indices: Sequence[int], number: int) -> Bins | None:
        return level_bins(
            indices, self.num_tokens, self.flops, capacity=self.max_tokens, number=number
        )

    def _traded(self, bins: Bins, replica_of: Sequence[int], capacity: int) -> list[Bins]:
        trading = Trading(
            bins,
            replica_of,
            self.num_tokens,
            self.flops,
            capacity=capacity,
            equal_counts=self.coupled,
        )
        trading.run()
        return trading.shares()


def _without_empty(shares: list[Bins]) -> list[Bins]:
    return [[members for members in share if members] for share in shares]
