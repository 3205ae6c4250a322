"""Pure: sequences that lie on several rings of context parallelism.

The tokens of a microbatch are cut into 2 r runs; ring i of r has run i from the front and run i
from the back (context.py). A query sees keys of its own run, and of earlier runs if its sequence
reaches back there. One sequence at most does: it has the first queries of the one run, the last
keys of the other, and everything between. So what the queries of a ring see of another ring's keys
is one block in which all see all, or nothing.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

Run = tuple[int, int]  # first and last token (exclusive)


class Crossing(NamedTuple):
    """Rows of queries of one ring that all see these rows of keys of another; rows of the rings."""

    queries: tuple[Run, ...] = ()
    keys: tuple[Run, ...] = ()

    @property
    def num_keys(self) -> int:
        """Number of the rows of keys."""
        return sum(end - first for first, end in self.keys)


def crossing(bounds: Sequence[int], queries: Sequence[Run], keys: Sequence[Run]) -> Crossing:
    """Return what the queries of one ring see of the keys of a ring in other runs.

    Args:
        bounds: [B + 1] first token of each sequence, and the last token (exclusive) of all.
        queries: The runs of the ring with the queries, in order; none is empty.
        keys: The runs of the ring with the keys, in order.
    """
    asking: dict[Run, None] = {}
    seen: dict[Run, None] = {}
    for (first, end), row in zip(queries, _rows(queries), strict=True):
        sequence = bisect_right(bounds, first) - 1
        start, stop = bounds[sequence], bounds[sequence + 1]
        for (first_key, end_key), key_row in zip(keys, _rows(keys), strict=True):
            if end_key <= first and start < end_key:
                asking[row, row + min(end, stop) - first] = None
                seen[key_row + max(start - first_key, 0), key_row + end_key - first_key] = None
    return Crossing(tuple(asking), tuple(sorted(seen)))


def _rows(runs: Sequence[Run]) -> list[int]:
    """Return the row of the first token of each run among those of its ring."""
    rows = [0]
    for first, end in runs[:-1]:
        rows.append(rows[-1] + end - first)
    return rows
