"""Where a learner's batches come from and where its results go: the broker, or a file."""

from collections.abc import Sequence
from typing import Protocol

from weightbus.snapshot import WeightSnapshot
from wire.control import BatchDelivered, BatchNotReady, RunComplete, StepCommitted
from wire.trajectory import TrajectoryPayload
from wire.versions import PolicyVersion


class RankLink(Protocol):
    """What every rank needs."""

    publishes: bool  # whether whole weights are wanted after each step

    def fetch(self, keys: Sequence[tuple[int, int]]) -> list[TrajectoryPayload]:
        """Return the payloads of delivered trajectories by (group, sibling), in the order asked."""

    def close(self) -> None:
        """Let go of whatever is open."""


class LeadingLink(RankLink, Protocol):
    """What rank 0 needs besides."""

    def take_over(self, step: int) -> PolicyVersion:
        """Become the run's learner at ``step``; return the version of the weights held."""

    def next_batch(
        self, version: PolicyVersion, *, max_wait_s: float
    ) -> BatchDelivered | BatchNotReady | RunComplete:
        """Return the batch of the step that starts from ``version``, or why there is none.

        News of the run's last step come at once, not after ``max_wait_s``.
        """

    def commit(
        self, version: PolicyVersion, metrics: dict[str, float], num_tokens: int
    ) -> StepCommitted:
        """Record that a step is trained; return all evaluations so far and the last step."""

    def publish(self, snapshot: WeightSnapshot) -> None:
        """Hand out a version; returns at once."""

    def ledger_snapshot(self, version: PolicyVersion) -> bytes:
        """Return what a checkpoint of ``version`` keeps of the broker."""
