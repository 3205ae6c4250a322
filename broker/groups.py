"""One item of the ledger: a prompt group, its siblings and where it stands."""

from dataclasses import dataclass, field
from typing import Literal

from wire.control import DeliveredGroup, DeliveredTrajectory
from wire.trajectory import ItemKind, Prompt, Score, TrajectoryHeader

GroupState = Literal["issued", "leased", "generated", "ready", "delivered"]
STATES: tuple[GroupState, ...] = ("issued", "leased", "generated", "ready", "delivered")


@dataclass(slots=True)
class Group:
    """A group that has neither been trained (or evaluated) nor dropped."""

    group_id: int
    item: ItemKind
    prompt: Prompt
    size: int
    position: int = 0  # of the prompt in its source
    eval_step: int = -1
    adopted_step: int = -1  # of the generator that leased it first
    attempts: int = 0  # leases that were granted
    lease_id: int | None = None
    headers: dict[int, TrajectoryHeader] = field(default_factory=dict)
    scores: dict[int, Score] = field(default_factory=dict)
    failed_scorings: dict[int, int] = field(default_factory=dict)
    delivered: bool = False

    @property
    def missing(self) -> tuple[int, ...]:
        """Return the siblings that nobody has generated yet."""
        return tuple(sibling for sibling in range(self.size) if sibling not in self.headers)

    @property
    def state(self) -> GroupState:
        """Return where the group stands."""
        if self.delivered:
            return "delivered"
        if len(self.scores) == self.size:
            return "ready"
        if len(self.headers) == self.size:
            return "generated"
        return "issued" if self.lease_id is None else "leased"

    @property
    def rewards(self) -> list[float]:
        """Return the rewards there are, in the order of the siblings."""
        scores = (self.scores[sibling] for sibling in sorted(self.scores))
        return [score.reward for score in scores if score.reward is not None]


@dataclass(slots=True)
class Lease:
    """Temporary ownership of generation work."""

    lease_id: int
    group_id: int
    holder: str
    expires_s: float


def as_delivered(group: Group) -> DeliveredGroup:
    """Return a scored group as the learner gets it."""
    rewards = group.rewards
    return DeliveredGroup(
        group_id=group.group_id,
        trajectories=tuple(
            DeliveredTrajectory(
                header=group.headers[sibling],
                reward=rewards[sibling],
                parts=group.scores[sibling].parts,
            )
            for sibling in range(group.size)
        ),
    )
