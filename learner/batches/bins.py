"""Pure: sequences into bins of a number of tokens. A bin becomes a microbatch.

A sequence longer than a bin's capacity has a bin of its own.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

Bins = list[list[int]]

_LOOKED_AT = 64  # sequences that may fill a bin, or bins that a sequence may go into


def least_bins(num_tokens: Sequence[int], capacity: int) -> int:
    """Return a lower bound of the number of bins."""
    longer = sum(1 for length in num_tokens if length > capacity)
    others = sum(length for length in num_tokens if length <= capacity)
    return longer + -(-others // capacity)


def fewest_bins(indices: Iterable[int], num_tokens: Sequence[int], capacity: int) -> Bins:
    """Pack into few bins: best fit, longest first; bin by bin if best fit may need too many."""
    longest_first = sorted(indices, key=lambda i: (-num_tokens[i], i))
    found = best_fit(longest_first, num_tokens, capacity)
    if len(found) > least_bins([num_tokens[i] for i in longest_first], capacity):
        filled = _fill_each(longest_first, num_tokens, capacity)
        found = min(found, filled, key=len)
    return found


def best_fit(indices: Iterable[int], num_tokens: Sequence[int], capacity: int) -> Bins:
    """Put each sequence where the least room remains, longest first.

    Where lengths are alike, so are the bins.
    """
    bins: Bins = []
    rooms: list[tuple[int, int]] = []  # room, bin; ascending, without full bins
    for index in sorted(indices, key=lambda i: (-num_tokens[i], i)):
        need = num_tokens[index]
        place = bisect_left(rooms, (need, -1))
        if place == len(rooms):
            room, target = capacity, len(bins)
            bins.append([])
        else:
            room, target = rooms.pop(place)
        bins[target].append(index)
        if room > need:
            insort(rooms, (room - need, target))
    return bins


def _fill_each(longest_first: Sequence[int], num_tokens: Sequence[int], capacity: int) -> Bins:
    """Fill one bin after the other: the longest sequence left, and those that leave least room.

    Bit s of an integer is set if some of the sequences considered have s tokens together.
    """
    remaining = list(longest_first)
    negated = [-num_tokens[i] for i in remaining]  # ascending
    bins: Bins = []
    while remaining:
        room = capacity + negated[0]
        start = max(1, bisect_left(negated, -room))
        sums, before = 1, []
        for negative in negated[start : start + _LOOKED_AT]:
            before.append(sums)
            sums |= sums << -negative
            sums &= (2 << room) - 1
            if sums >> room:
                break
        total = sums.bit_length() - 1
        chosen = []
        for place, without in reversed(list(enumerate(before, start))):
            if not without >> total & 1:
                chosen.append(place)
                total += negated[place]
        bins.append([remaining[place] for place in (0, *reversed(chosen))])
        for place in (*chosen, 0):
            del remaining[place], negated[place]
    return bins


def level_bins(
    indices: Iterable[int],
    num_tokens: Sequence[int],
    flops: Sequence[float],
    *,
    capacity: int,
    number: int,
) -> Bins | None:
    """Pack into a number of bins of similar FLOPs: longest first, each into the lightest with room.

    None if a sequence did not fit: another order may work.
    """
    bins: Bins = [[] for _ in range(number)]
    room = [capacity] * number
    lightest = [(0.0, b) for b in range(number)]
    heapify(lightest)
    for index in sorted(indices, key=lambda i: (-num_tokens[i], i)):
        passed = []
        while lightest and num_tokens[index] > room[lightest[0][1]] and bins[lightest[0][1]]:
            passed.append(heappop(lightest))
        if not lightest or len(passed) > _LOOKED_AT:
            return None
        load, target = heappop(lightest)
        bins[target].append(index)
        room[target] -= num_tokens[index]
        for entry in (*passed, (load + flops[index], target)):
            heappush(lightest, entry)
    return bins


def spread(bins: Bins, number: int) -> Bins:
    """Return ``number`` bins: bins with several sequences give some away to new bins.

    There are empty bins only if there are fewer sequences than bins.
    """
    several = [(-len(members), b) for b, members in enumerate(bins) if len(members) > 1]
    heapify(several)
    bins = [list(members) for members in bins]
    while len(bins) < number and several:
        _, fullest = heappop(several)
        bins.append([bins[fullest].pop()])
        if len(bins[fullest]) > 1:
            heappush(several, (-len(bins[fullest]), fullest))
    return bins + [[] for _ in range(number - len(bins))]
