"""Pure: which replica trains which trajectories, packed into which microbatches.

Three numbers say how good a plan is: the FLOPs of the heaviest replica over the mean, which all
others wait for; the number of microbatches, each of which costs something beside its tokens; and,
where replicas are coupled, how unlike their k-th microbatches are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from slipstream.learner.batches.balance import Trading, deal
from slipstream.learner.batches.bins import Bins, fewest_bins, least_bins, level_bins, spread
from slipstream.learner.model.flops import SequenceCost
from slipstream.wire.errors import ConfigError

Indices = tuple[int, ...]

_BALANCED = 1.01  # FLOPs of the heaviest replica, over the least there can be
_FEW = 1.02  # microbatches, over the least there can be
_MICROBATCH = 0.02  # what one more costs, as a share of a mean one's FLOPs
_TOKENS = SequenceCost()


@dataclass(frozen=True, slots=True)
class MinibatchPlan:
    """One optimizer update: microbatches of trajectory indices, by data-parallel rank."""

    microbatches: tuple[tuple[Indices, ...], ...]  # [replica][microbatch]

    @property
    def members(self) -> list[int]:
        """The trajectories of all its microbatches."""
        return [i for share in self.microbatches for indices in share for i in indices]


def plan_step(
    num_tokens: Sequence[int],
    *,
    replicas: int,
    minibatches: int,
    max_tokens: int,
    cost: SequenceCost = _TOKENS,
    coupled: bool = False,
    multiple_of: int = 1,
) -> tuple[MinibatchPlan, ...]:
    """Split trajectories into minibatches in order, balance each over replicas, and pack it.

    ``num_tokens`` are positive, and as sequences are packed: aligned, where they must be. Replicas
    are balanced by ``cost``, microbatches bounded by tokens. No sequence is split, that is for
    context parallelism within a replica; one that is longer than ``max_tokens`` has a microbatch to
    itself. Equal arguments give equal plans.

    Replicas are ``coupled`` where one cannot train a microbatch while another has none: by expert
    parallelism, which exchanges tokens between them in every layer, or a pipeline, whose schedule
    is of one number of microbatches. Then each has the same number in a minibatch, a multiple of
    ``multiple_of`` (an interleaved pipeline wants one of its stages); those that find no trajectory
    are empty and come last. Otherwise numbers may differ, and none is empty.

    Microbatches of a replica are in an order of FLOPs: the smallest first and last, the largest in
    the middle. While a pipeline fills, its later stages wait for the first microbatches; while it
    drains, its earlier stages wait for the last ones. Small ones make both short. Equal ranks stand
    in equal places, so that what coupled replicas train at one time is alike.

    A batch too small for ``minibatches``, as the last one of a run may be, is split into fewer, so
    that every replica has a part of each.

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
        lengths = [int(length) for length in num_tokens[start:end]]
        minibatch = _Minibatch(
            num_tokens=lengths,
            flops=[cost.flops(length) for length in lengths],
            replicas=replicas,
            max_tokens=max_tokens,
            coupled=coupled,
            multiple_of=multiple_of,
        )
        shares = [
            tuple(tuple(start + i for i in one) for one in minibatch.in_order(share))
            for share in minibatch.shares()
        ]
        plans.append(MinibatchPlan(tuple(shares)))
    return tuple(plans)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Minibatch:
    """The trajectories of one optimizer update, and ways to divide them."""

    num_tokens: Sequence[int]
    flops: Sequence[float]
    replicas: int
    max_tokens: int
    coupled: bool
    multiple_of: int

    def shares(self) -> list[Bins]:
        """Return the microbatches of each replica.

        Ways of more microbatches are tried only until the balance is good. The one taken has the
        least FLOPs of the heaviest replica, with a price on each microbatch.
        """
        goal = _BALANCED * max(sum(self.flops) / self.replicas, max(self.flops))
        tried: list[tuple[float, list[Bins]]] = []
        for shares in self._ways():
            heaviest = max(sum(self.flops[i] for one in share for i in one) for share in shares)
            number = sum(map(len, shares))
            fewest = sum(map(len, tried[0][1])) if tried else number
            tried.append((heaviest * (1 + _MICROBATCH * (number / fewest - 1)), shares))
            if heaviest <= goal:
                break
        return min(tried, key=lambda priced: priced[0])[1]

    def in_order(self, share: Bins) -> Bins:
        """Return a replica's microbatches, small ones at both ends, empty ones after all others."""
        ordered = sorted(
            (sorted(one) for one in share if one),
            key=lambda one: (-sum(self.flops[i] for i in one), one),
        )
        return ordered[::2][::-1] + ordered[1::2] + [[]] * (len(share) - len(ordered))

    def _ways(self) -> Iterator[list[Bins]]:
        """Pack everything and deal the bins; at last, divide first and pack each share."""
        everything = range(len(self.num_tokens))
        packed = fewest_bins(everything, self.num_tokens, self.max_tokens)
        for number in self._numbers_of_bins(len(packed)):
            yield self._dealt(packed, number)
        yield self._divided()

    def _numbers_of_bins(self, fewest: int) -> list[int]:
        if self.coupled:
            return [_rounded_up(fewest, self.replicas * self.multiple_of)]
        fewest = max(fewest, self.replicas)
        few = int(_FEW * least_bins(self.num_tokens, self.max_tokens))
        return sorted({fewest, max(few, fewest), _rounded_up(fewest, self.replicas)})

    def _dealt(self, packed: Bins, number: int) -> list[Bins]:
        everything = range(len(self.num_tokens))
        bins = self._level(everything, number) or spread(packed, number)
        replica_of = deal([sum(self.flops[i] for i in one) for one in bins], self.replicas)
        shares = self._traded(bins, replica_of, self.max_tokens)
        if not self.coupled:
            return [[one for one in share if one] for share in shares]
        return [self._leveled(share) for share in shares]

    def _divided(self) -> list[Bins]:
        everything, unlimited = range(len(self.num_tokens)), sum(self.num_tokens)
        parts = level_bins(
            everything, self.num_tokens, self.flops, capacity=unlimited, number=self.replicas
        )
        traded = self._traded(parts or [], range(self.replicas), unlimited)
        shares = [fewest_bins(part, self.num_tokens, self.max_tokens) for (part,) in traded]
        if not self.coupled:
            return shares
        number = _rounded_up(max(map(len, shares)), self.multiple_of)
        return [self._leveled(spread(share, number)) for share in shares]

    def _level(self, indices: Sequence[int], number: int) -> Bins | None:
        return level_bins(
            indices, self.num_tokens, self.flops, capacity=self.max_tokens, number=number
        )

    def _leveled(self, share: Bins) -> Bins:
        """Return a replica's microbatches with FLOPs more alike, as far as tokens allow."""
        trading = Trading(
            share,
            range(len(share)),
            self.num_tokens,
            self.flops,
            capacity=self.max_tokens,
            equal_counts=True,
        )
        trading.run(all_alike=True)
        return [one for (one,) in trading.shares()]

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


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
