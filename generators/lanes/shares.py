"""The lanes of an engine that several tenants share: weighted max-min fairness, in whole groups.

A tenant that wants more than it has gets its weighted share at least; what others leave is divided
among those that want it. Nothing is taken back: a share that fell is reached as answers end. A
tenant whose broker gave out no work keeps one group's lanes to ask for more with. Those count in
no share: when it is given work again, the engine has a group too many until answers of others end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.generators.engine import EngineLoad
from slipstream.generators.lanes.lanes import Lanes


@dataclass(frozen=True, slots=True)
class LaneDemand:
    """What one tenant wants."""

    weight: float
    group: int  # lanes of one group
    wanted: int | None  # lanes it can use; None for as many as there are


def divided(limit: int, demands: Sequence[LaneDemand], owed: Sequence[float]) -> list[int]:
    """Return the lanes of each tenant; of one that wants more, in whole groups, and at least one.

    ``owed`` are lanes that earlier divisions rounded away, which decide where a group goes that
    is left.
    """
    exact = fair_shares(limit, demands)
    lanes = [
        max(demand.group, int(share // demand.group) * demand.group)
        if demand.wanted is None
        else int(share)
        for share, demand in zip(exact, demands, strict=True)
    ]
    hungry = [i for i, demand in enumerate(demands) if demand.wanted is None]
    for i in sorted(hungry, key=lambda i: (lanes[i] - exact[i] - owed[i], -exact[i], i)):
        if sum(lanes) + demands[i].group <= limit:
            lanes[i] += demands[i].group
    return lanes


def fair_shares(limit: float, demands: Sequence[LaneDemand]) -> list[float]:
    """Return weighted max-min fair shares of the lanes: no one's can rise but by a poorer one's."""
    shares = [0.0] * len(demands)
    hungry = [i for i, demand in enumerate(demands) if demand.wanted is None or demand.wanted > 0]
    left = float(limit)
    while hungry:
        level = left / sum(demands[i].weight for i in hungry)
        sated = [
            i
            for i in hungry
            if (wanted := demands[i].wanted) is not None and wanted <= level * demands[i].weight
        ]
        if not sated:
            for i in hungry:
                shares[i] = level * demands[i].weight
            break
        for i in sated:
            shares[i] = float(demands[i].wanted or 0)
            left -= shares[i]
        hungry = [i for i in hungry if i not in sated]
    return shares


@dataclass(slots=True)
class _Share:
    lanes: Lanes
    weight: float
    group: int
    owed: float = 0.0

    def demand(self) -> LaneDemand:
        lanes = self.lanes
        return LaneDemand(self.weight, self.group, lanes.booked if lanes.is_sated else None)


class SharedLanes:
    """Divides one engine's lanes among its tenants, whenever its load is observed."""

    def __init__(self, engine: Lanes) -> None:
        """Take the lanes of the engine, whose limit follows its load."""
        self._engine = engine
        self._shares: dict[str, _Share] = {}

    def open(self, name: str, lanes: Lanes, *, weight: float, group: int) -> None:
        """Give a tenant a share; ``lanes`` are its own, whose limit is set here."""
        lanes.shared = self
        self._shares[name] = _Share(lanes, weight, group)
        self._divide()

    def close(self, name: str) -> None:
        """Give a tenant's share to the others."""
        self._shares.pop(name, None)
        self._divide()

    def share_of(self, lanes: Lanes) -> float:
        """Return a tenant's share of the engine's limit."""
        return lanes.limit / max(1, self._engine.limit)

    def observe(self, load: EngineLoad) -> None:
        """Adjust the engine's limit to its load, and all shares to demands."""
        engine, shares = self._engine, self._shares.values()
        engine.in_flight = sum(share.lanes.in_flight for share in shares)
        engine.num_finished = sum(share.lanes.num_finished for share in shares)
        engine.observe(load)
        self._divide(settles=True)

    def fair_share(self, lanes: Lanes) -> float:
        """Return the lanes that a tenant would have if all wanted as many as there are."""
        total = sum(share.weight for share in self._shares.values())
        own = sum(share.weight for share in self._shares.values() if share.lanes is lanes)
        return self._engine.limit * own / total if total else 0.0

    def _divide(self, *, settles: bool = False) -> None:
        shares = list(self._shares.values())
        demands = [share.demand() for share in shares]
        owed = [share.owed for share in shares]
        limits = divided(self._engine.limit, demands, owed)
        exact = fair_shares(self._engine.limit, demands)
        for share, limit, fair in zip(shares, limits, exact, strict=True):
            if settles:
                share.owed = max(-share.group, min(share.group, share.owed + fair - limit))
            share.lanes.set_limit(limit + share.group * share.lanes.is_sated)
