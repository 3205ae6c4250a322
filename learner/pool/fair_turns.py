"""Pure: the tenant whose turn is next, by start-time fair queueing (Goyal, Vin, Cheng 1996).

A turn begins at a start tag S = max(v, F): F is where the tenant's last turn ended, v the start tag
of the turn that began last. A turn of c seconds ends at F = S + c / weight. The smallest start tag
is next. So of tenants that are ready all the time, each gets seconds in proportion to its weight:
for any two, seconds / weight differ by at most the longest turn / weight of both together, over any
time; and one that was idle has saved nothing up.
"""

from collections.abc import Collection, Mapping


class FairTurns:
    """Turns of tenants by name."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Begin with tenants of these weights, all above 0."""
        self._weights = dict(weights)
        self._ended = dict.fromkeys(weights, 0.0)  # F
        self._starts: dict[str, float] = {}  # S of tenants that are ready
        self._begun = 0.0  # v
        self._last = dict.fromkeys(weights, 0)  # number of the last turn, which breaks ties
        self._num_turns = 0

    def next(self, ready: Collection[str]) -> str | None:
        """Return the tenant whose turn is next; None if none is ready."""
        for name in self._starts.keys() - ready:
            del self._starts[name]
        for name in ready:
            self._starts.setdefault(name, max(self._begun, self._ended[name]))
        if not self._starts:
            return None
        return min(self._starts, key=lambda name: (self._starts[name], self._last[name], name))

    def spend(self, name: str, seconds: float) -> None:
        """Record the turn of a ready tenant."""
        start = self._starts.pop(name)
        self._begun = max(self._begun, start)
        self._ended[name] = start + seconds / self._weights[name]
        self._num_turns += 1
        self._last[name] = self._num_turns

    def leave(self, name: str) -> None:
        """Forget a tenant that has ended."""
        self._starts.pop(name, None)
        self._ended.pop(name, None)
