"""The lanes of an engine that several tenants share: a free group's lanes go where least is held.

Lanes are given out by whole groups, whenever some become free, to the tenant that holds the fewest
for its weight among those whose brokers have work: weighted max-min fairness in steps of a group.
Nothing is taken back; what a tenant has no work for, others get. A tenant whose broker gave out no
work keeps one group's lanes to ask for more with, which count only once it is given work.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.generators.engine import EngineLoad
from slipstream.generators.lanes.lanes import Lanes


@dataclass(frozen=True, slots=True)
class LaneDemand:
    """One tenant's lanes."""

    weight: float
    group: int  # lanes of one group
    held: int  # lanes of leased work, and of requests for work under way
    wants: bool  # its broker has work for more, as far as is known


def granted(limit: int, demands: Sequence[LaneDemand]) -> list[int]:
    """Return how many more lanes each tenant gets, in whole groups.

    One that holds none gets a group in any case, even beyond the limit. Groups count by their
    middle: so shares round to the nearest group, for large and small weights alike.
    """
    given = [demand.group if demand.wants and not demand.held else 0 for demand in demands]
    free = limit - sum(demand.held for demand in demands) - sum(given)
    while True:
        needy = [
            ((demand.held + given[i] + demand.group / 2) / demand.weight, i)
            for i, demand in enumerate(demands)
            if demand.wants
        ]
        if not needy or demands[(neediest := min(needy)[1])].group > free:
            return given
        given[neediest] += demands[neediest].group
        free -= demands[neediest].group


@dataclass(slots=True)
class _Share:
    lanes: Lanes
    weight: float
    group: int

    def demand(self) -> LaneDemand:
        lanes = self.lanes
        held = lanes.booked + lanes.asked
        return LaneDemand(self.weight, self.group, held, wants=not lanes.is_sated)


class SharedLanes:
    """Divides one engine's lanes among its tenants, at each change."""

    def __init__(self, engine: Lanes) -> None:
        """Take the lanes of the engine, whose limit follows its load."""
        self._engine = engine
        self._shares: dict[str, _Share] = {}

    def open(self, name: str, lanes: Lanes, *, weight: float, group: int) -> None:
        """Give a tenant a share; ``lanes`` are its own, whose limit is set here."""
        lanes.shared = self
        self._shares[name] = _Share(lanes, weight, group)
        self.divide()

    def close(self, name: str) -> None:
        """Give a tenant's share to the others."""
        self._shares.pop(name, None)
        self.divide()

    def share_of(self, lanes: Lanes) -> float:
        """Return a tenant's share of the engine's limit."""
        return min(1.0, lanes.limit / max(1, self._engine.limit))

    def fair_share(self, lanes: Lanes) -> float:
        """Return the lanes that a tenant would have if all wanted as many as there are."""
        total = sum(share.weight for share in self._shares.values())
        own = sum(share.weight for share in self._shares.values() if share.lanes is lanes)
        return self._engine.limit * own / total if total else 0.0

    def observe(self, load: EngineLoad) -> None:
        """Adjust the engine's limit to its load."""
        engine, shares = self._engine, self._shares.values()
        engine.in_flight = sum(share.lanes.in_flight for share in shares)
        engine.num_finished = sum(share.lanes.num_finished for share in shares)
        engine.observe(load)
        self.divide()

    def divide(self) -> None:
        """Give out free lanes."""
        shares = list(self._shares.values())
        demands = [share.demand() for share in shares]
        for share, demand, more in zip(
            shares, demands, granted(self._engine.limit, demands), strict=True
        ):
            asks = 0 if demand.wants else share.group
            share.lanes.set_limit(demand.held + more + asks)
