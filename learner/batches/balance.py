"""Pure: bins dealt to data-parallel replicas, then traded between them until FLOPs are equal."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.learner.batches.bins import Bins

_CLOSE = 1e-3  # max / mean - 1 at which nothing more is traded
_LOOKED_AT = 64  # sequences compared, of each of two replicas
_ENOUGH = 0.25  # share of its excess that a replica may keep if a trade is taken at once
_MOST_PAIRS = 40  # pairs of replicas compared, per replica; fewer than 64 replicas count as 64
_PARTNERS = 16  # lightest replicas that the heaviest one may trade with


def deal(loads: Sequence[float], replicas: int) -> list[int]:
    """Return the replica of each bin: rounds of one bin for each, the heaviest bins first.

    In a round the heaviest bin goes to the least loaded replica. So numbers of bins differ by one
    at most, and the k-th heaviest bins of all replicas are alike.
    """
    replica_of = [0] * len(loads)
    total = [0.0] * replicas
    heaviest_first = sorted(range(len(loads)), key=lambda b: (-loads[b], b))
    for start in range(0, len(loads), replicas):
        in_need = sorted(range(replicas), key=lambda r: (total[r], r))
        for bin_index, replica in zip(
            heaviest_first[start : start + replicas], in_need, strict=False
        ):
            replica_of[bin_index] = replica
            total[replica] += loads[bin_index]
    return replica_of


@dataclass(frozen=True, slots=True)
class _Trade:
    """An exchange by the heaviest replica: sequences, or whole bins."""

    heaviest: float  # FLOPs of the heavier of the two replicas after it
    of_bins: bool
    given: int
    taken: int  # -1 takes nothing
    into: int = -1  # bin of a sequence given for nothing


class Trading:
    """Bins of replicas, while sequences and bins change hands.

    Shapes: N sequences, B bins, R replicas.
    """

    def __init__(
        self,
        bins: Bins,
        replica_of: Sequence[int],
        num_tokens: Sequence[int],
        flops: Sequence[float],
        *,
        capacity: int,
        equal_counts: bool,
    ) -> None:
        """Start from a packing; with ``equal_counts`` a bin is given only for a bin."""
        self._members = [i for members in bins for i in members]
        self._tokens = np.array([num_tokens[i] for i in self._members], np.int64)  # [N]
        self._flops = np.array([flops[i] for i in self._members], np.float64)  # [N]
        self._bin_of = np.repeat(np.arange(len(bins)), [len(members) for members in bins])  # [N]
        self._replica_of = np.array(replica_of, np.int64)  # [B]
        self._equal_counts = equal_counts
        self._num_pairs = 0
        used = np.bincount(self._bin_of, self._tokens, len(bins)).astype(np.int64)
        self._room = capacity - used  # [B]
        self._bin_flops = np.bincount(self._bin_of, self._flops, len(bins))  # [B]
        self._load = np.bincount(self._replica_of, self._bin_flops)  # [R]

    def shares(self) -> list[Bins]:
        """Return the bins of each replica, empty ones too."""
        bins: Bins = [[] for _ in self._room]
        for index, number in zip(self._members, self._bin_of.tolist(), strict=True):
            bins[number].append(index)
        return [
            [bins[b] for b in np.flatnonzero(self._replica_of == replica)]
            for replica in range(len(self._load))
        ]

    def run(self) -> None:
        """Trade until the heaviest replica is close to the mean, or finds no better trade.

        Every trade leaves both replicas lighter than the heaviest was, and something in each.
        """
        goal = max((1 + _CLOSE) * self._load.mean(), self._flops.max())
        while self._num_pairs < _MOST_PAIRS * max(len(self._load), 64):
            giver = int(self._load.argmax())
            excess = self._load[giver] - goal
            if excess <= 0:
                return
            found = self._best_partner(giver, goal + _ENOUGH * excess)
            if found is None:
                return
            self._make(*found)

    def _best_partner(self, giver: int, enough: float) -> tuple[_Trade, int, int] | None:
        """Return the best trade with a light replica, or the first that is good ``enough``."""
        found: tuple[_Trade, int, int] | None = None
        for taker in np.argsort(self._load, kind="stable")[:_PARTNERS].tolist():
            trade = self._best_trade(giver, taker)
            if trade is not None and (found is None or trade.heaviest < found[0].heaviest):
                found = trade, giver, taker
                if trade.heaviest <= enough:
                    break
        return found

    def _best_trade(self, giver: int, taker: int) -> _Trade | None:
        """Return the trade that makes two replicas most alike, if any makes them more alike."""
        self._num_pairs += 1
        gap = self._load[giver] - self._load[taker]
        if gap <= 0:
            return None
        given, taken = self._sequences(giver), self._sequences(taker)
        own_bins = np.flatnonzero(self._replica_of == giver)
        their_bins = np.flatnonzero(self._replica_of == taker)
        roomiest = their_bins[self._room[their_bins].argmax()]

        swapped = self._flops[given][:, None] - self._flops[taken]
        longer = self._tokens[given][:, None] - self._tokens[taken]
        swapped[longer > self._room[self._bin_of[taken]]] = np.inf
        # Siblings that share a prompt may have more tokens and fewer FLOPs.
        swapped[-longer > self._room[self._bin_of[given]][:, None]] = np.inf
        moved = np.where(self._tokens[given] <= self._room[roomiest], self._flops[given], np.inf)
        bins_swapped = self._bin_flops[own_bins][:, None] - self._bin_flops[their_bins]
        bins_moved = self._bin_flops[own_bins]
        if self._equal_counts:
            bins_moved = np.full(len(own_bins), np.inf)
        nothing = np.array([-1])
        choices = [
            (bins_swapped, True, own_bins, their_bins),
            (bins_moved[:, None], True, own_bins, nothing),
            (swapped, False, given, taken),
            (moved[:, None], False, given, nothing),
        ]
        best: _Trade | None = None
        least = (1 - 1e-9) * self._load[giver]
        for gains, of_bins, ours, theirs in choices:
            if not gains.size:
                continue
            distance = np.abs(gains - gap / 2)
            row, column = divmod(int(distance.argmin()), gains.shape[1])
            heaviest = float(self._load[taker] + gap / 2 + distance[row, column])
            if heaviest < least:
                into = int(roomiest) if not of_bins and theirs[column] == -1 else -1
                best = _Trade(heaviest, of_bins, int(ours[row]), int(theirs[column]), into)
                least = heaviest
        return best

    def _sequences(self, replica: int) -> NDArray[np.int64]:
        """Return the sequences of a replica; if there are many, a sample over all lengths."""
        members = np.flatnonzero(self._replica_of[self._bin_of] == replica)
        if len(members) <= _LOOKED_AT:
            return members
        by_length = members[np.argsort(self._tokens[members], kind="stable")]
        return by_length[np.linspace(0, len(members) - 1, _LOOKED_AT).astype(np.int64)]

    def _make(self, trade: _Trade, giver: int, taker: int) -> None:
        if trade.of_bins:
            self._replica_of[trade.given] = taker
            gained = self._bin_flops[trade.given]
            if trade.taken >= 0:
                self._replica_of[trade.taken] = giver
                gained -= self._bin_flops[trade.taken]
        else:
            source = self._bin_of[trade.given]
            target = trade.into if trade.taken < 0 else self._bin_of[trade.taken]
            tokens, gained = self._tokens[trade.given], self._flops[trade.given]
            self._bin_of[trade.given] = target
            if trade.taken >= 0:
                self._bin_of[trade.taken] = source
                tokens = tokens - self._tokens[trade.taken]
                gained = gained - self._flops[trade.taken]
            self._room[source] += tokens
            self._room[target] -= tokens
            self._bin_flops[source] -= gained
            self._bin_flops[target] += gained
        self._load[giver] -= gained
        self._load[taker] += gained
