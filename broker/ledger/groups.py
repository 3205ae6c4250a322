"""One item of the ledger: a prompt group, its siblings and its state."""

from typing import Literal

import msgspec

from slipstream.broker.ledger.admission import StalenessBound
from slipstream.wire.messages.broker import DeliveredGroup, DeliveredTrajectory
from slipstream.wire.messages.dead_letters import Failure
from slipstream.wire.messages.trajectory import ItemKind, Prompt, Score, TrajectoryHeader

GroupState = Literal["issued", "leased", "generated", "ready", "delivered"]
STATES: tuple[GroupState, ...] = ("issued", "leased", "generated", "ready", "delivered")
NOBODY = -1
_MAX_FAILURES = 8  # newest failures of a group
_MAX_LESSEES = 16  # the newest, whose answers may still come


class Group(msgspec.Struct, kw_only=True):
    """A group that has neither been trained (or evaluated) nor dropped."""

    group_id: int
    item: ItemKind
    prompt: Prompt
    size: int
    position: int = 0  # position of the prompt in its source
    eval_step: int = -1
    adopted_step: int = -1  # step of the generator that leased it first
    bound: int = -1  # bound in force at its first lease, in learner steps; -1 is the run's own
    attempts: int = 0  # leases that ended without all siblings, by a fault
    deaths: int = 0  # attempts that ended by the death of the holder
    strandings: int = 0  # leases that ended because the host of its environment was lost
    lease_id: int = NOBODY
    bound_to: int = NOBODY  # learner step whose batch it is in
    num_bytes: int = 0  # size of its payloads and transcripts
    headers: dict[int, TrajectoryHeader] = msgspec.field(default_factory=dict)
    scores: dict[int, Score] = msgspec.field(default_factory=dict)
    failed_scorings: dict[int, int] = msgspec.field(default_factory=dict)
    failures: list[Failure] = msgspec.field(default_factory=list)  # the last ones
    retry_of: int = NOBODY  # the dead letter that it repeats
    lessees: dict[int, str] = msgspec.field(default_factory=dict)  # lease -> holder, the newest

    @property
    def missing(self) -> tuple[int, ...]:
        """Siblings not generated yet."""
        return tuple(sibling for sibling in range(self.size) if sibling not in self.headers)

    @property
    def unscored(self) -> tuple[int, ...]:
        """Generated siblings without a reward."""
        return tuple(sibling for sibling in self.headers if sibling not in self.scores)

    @property
    def state(self) -> GroupState:
        """State of the group."""
        if self.bound_to != NOBODY:
            return "delivered"
        if len(self.scores) == self.size:
            return "ready"
        if len(self.headers) == self.size:
            return "generated"
        return "issued" if self.lease_id == NOBODY else "leased"

    @property
    def is_live(self) -> bool:
        """True if it holds a permit: leased before, to be trained, not bound to a batch."""
        return self.item == "train" and self.adopted_step >= 0 and self.bound_to == NOBODY

    def deadline(self, bound: StalenessBound) -> int:
        """Return the last learner step at which it may be trained, under the run's bound."""
        latest = bound.deadline(self.adopted_step)
        return latest if self.bound < 0 else min(latest, self.adopted_step + self.bound)

    @property
    def rewards(self) -> list[float]:
        """Rewards there are, in the order of the siblings."""
        return self.values_of("")

    def values_of(self, metric: str) -> list[float]:
        """Return a named part of the rewards; the reward itself where there is no such part."""
        scores = (self.scores[sibling] for sibling in sorted(self.scores))
        return [s.parts.get(metric, s.reward) for s in scores if s.reward is not None]

    def lease_to(self, lease_id: int, holder: str) -> None:
        """Record its holder, also for answers that come after the lease."""
        self.lease_id = lease_id
        self.lessees[lease_id] = holder
        if len(self.lessees) > _MAX_LESSEES:
            del self.lessees[min(self.lessees)]

    def note(self, failure: Failure) -> None:
        """Remember why an attempt failed."""
        self.failures = [*self.failures, failure][-_MAX_FAILURES:]

    def trajectory_keys(self) -> list[tuple[int, int]]:
        """Return the trajectories that are there."""
        return [(self.group_id, sibling) for sibling in self.headers]

    def prompt_only(self) -> "Group":
        """Return the group as it was when it was issued."""
        return Group(
            group_id=self.group_id,
            item=self.item,
            prompt=self.prompt,
            size=self.size,
            position=self.position,
            eval_step=self.eval_step,
            retry_of=self.retry_of,
        )


class Lease(msgspec.Struct, frozen=True):
    """Temporary ownership of generation work."""

    lease_id: int
    group_id: int
    holder: str


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
                turn_rewards=group.scores[sibling].turn_rewards,
            )
            for sibling in range(group.size)
        ),
    )
