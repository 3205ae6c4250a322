"""A learner's source of batches and sink of results: the broker, or a file."""

from collections.abc import Sequence
from typing import Protocol

from slipstream.learner.batches.orders import Rejection, StepPlan
from slipstream.wire.files.checkpoints import CheckpointInfo
from slipstream.wire.messages.broker import BatchNotReady, RunComplete, StepCommitted
from slipstream.wire.messages.codec import Frame
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.probe import ProbeLogprobs
from slipstream.wire.messages.trajectory import TrajectoryKey
from slipstream.wire.messages.versions import PolicyVersion


class RankLink(Protocol):
    """Interface for the rank of a replica that fetches its payloads."""

    def fetch(self, step: int, keys: Sequence[TrajectoryKey]) -> list[Frame]:
        """Return the payloads of delivered trajectories unchanged, in the requested order.

        Payloads prefetched for this step are used and the rest requested; payloads prefetched for
        another step are discarded.
        """

    def begin_prefetch(self, step: int) -> None:
        """Find the batch of a coming step in the background, and fetch its payloads.

        At most one step is prefetched: an earlier one is discarded. Nothing depends on it.
        """

    def close(self) -> None:
        """Close connections, and stop background tasks."""


class LeadingLink(RankLink, Protocol):
    """Further interface of rank 0."""

    publishes: bool  # whole weights are wanted after each step

    @property
    def run_id(self) -> str:
        """The identity of the run, for its checkpoints; empty without a broker."""

    def take_over(
        self, step: int, checkpoint: str, resumed: CheckpointInfo | None
    ) -> PolicyVersion:
        """Become the run's learner at ``step``; return the version of the weights held.

        ``checkpoint`` is the name of the checkpoint resumed from, ``resumed`` its description;
        empty and None for the policy that the run started with.
        """

    def next_order(
        self, version: PolicyVersion, *, max_wait_s: float
    ) -> StepPlan | BatchNotReady | RunComplete:
        """Return the planned batch of the step that starts from ``version``, or why not.

        News of the run's last step come at once, not after ``max_wait_s``.
        """

    def reject_batch(self, version: PolicyVersion, rejection: Rejection) -> None:
        """Report that the step that starts from ``version`` was not trained; its batch changes."""

    def commit(
        self, version: PolicyVersion, metrics: dict[str, float], num_tokens: int
    ) -> StepCommitted:
        """Record that a step is trained; return all evaluations so far and the last step."""

    def open_weights(
        self, path: str, layout: WeightManifest, *, part_keys: Sequence[str] = ()
    ) -> None:
        """Announce where versions will be written, before the first is.

        ``part_keys`` are the public keys of the relays of the learner's other hosts.
        """

    def reserve(self) -> int:
        """Return the slot to write the next version into."""

    def publish(self, version: PolicyVersion, slot: int, probe: ProbeLogprobs | None) -> None:
        """Hand out a version that was written whole, with its probe; returns at once."""

    def ledger_snapshot(self, version: PolicyVersion) -> bytes:
        """Return the broker's part of a checkpoint of ``version``."""

    def leave(self, *, is_stopped: bool = False) -> None:
        """Report that this learner has no more requests: the run is complete, or it is stopped."""

    def end(self) -> None:
        """Stop the relay: this learner ends as planned and no other follows it."""

    def seal(self, version: PolicyVersion, *, step: int, oldest_kept: int) -> None:
        """Report that a durable checkpoint holds every step before ``step``."""
