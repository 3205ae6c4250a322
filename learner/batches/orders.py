"""Orders of rank 0 to every rank, and the reasons not to train a batch.

A batch is planned once, by rank 0; the plan travels with the headers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from slipstream.learner.batches.plan import Indices, MinibatchPlan, PromptCost, plan_step
from slipstream.learner.config import LearnerSettings
from slipstream.learner.model.shared_prompts import is_worth_sharing
from slipstream.wire.errors import SlipstreamError
from slipstream.wire.messages.broker import (
    BatchDelivered,
    BatchNotReady,
    DeliveredTrajectory,
    Message,
    RunComplete,
)
from slipstream.wire.messages.trajectory import TrajectoryHeader, TrajectoryKey
from slipstream.wire.models.flops import SequenceCost


class StepPlan(Message, frozen=True):
    """A batch to train, with its split into minibatches, replicas and microbatches."""

    batch: BatchDelivered
    plans: tuple[MinibatchPlan, ...]  # one per minibatch; indices count the batch's trajectories

    @property
    def step(self) -> int:
        """Learner step that trains the batch."""
        return self.batch.step

    @property
    def trajectories(self) -> list[DeliveredTrajectory]:
        """All trajectories of the step, in the order that indices count."""
        return [trajectory for group in self.batch.groups for trajectory in group.trajectories]

    @property
    def headers(self) -> list[TrajectoryHeader]:
        """Headers of all trajectories, in the same order."""
        return [trajectory.header for trajectory in self.trajectories]

    def share(self, replica: int) -> list[tuple[Indices, ...]]:
        """Return a data-parallel replica's share: [minibatch][microbatch] of indices."""
        return [plan.microbatches[replica] for plan in self.plans]

    def wanted(self, replica: int) -> list[int]:
        """Return the indices whose payloads a replica needs, in the order it reads them."""
        return [i for minibatch in self.share(replica) for indices in minibatch for i in indices]

    def keys(self, replica: int) -> tuple[TrajectoryKey, ...]:
        """Return the payloads that a replica needs, in the order of ``wanted``."""
        headers = self.headers
        return tuple((headers[i].group_id, headers[i].sibling) for i in self.wanted(replica))


class StopTraining(Message, frozen=True):
    """Rank 0 was asked to stop before the run is complete."""


Order: TypeAlias = StepPlan | BatchNotReady | RunComplete | StopTraining
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


class NonFiniteError(SlipstreamError):
    """A loss or gradient is NaN or inf; this optimizer update was not made."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A batch that cannot be trained as it is."""

    reason: Literal["nonfinite", "invalid"]
    groups: tuple[int, ...]  # groups to drop
    detail: str


def plan_batch(batch: BatchDelivered, settings: LearnerSettings, *, cost: SequenceCost) -> StepPlan:
    """Plan a batch for a model of this ``cost``.

    Raises:
        ConfigError: the batch holds fewer trajectories than there are replicas.
    """
    headers = [t.header for group in batch.groups for t in group.trajectories]
    learner = settings.learner
    plans = plan_step(
        [header.num_tokens for header in headers],
        [cost.flops_within(header.bounds, header.num_response_tokens) for header in headers],
        replicas=learner.sizes.replicas(learner.ranks),
        minibatches=learner.minibatches,
        max_tokens=learner.max_tokens_per_microbatch,
        coupled=learner.sizes.couples_replicas,
        multiple_of=learner.sizes.microbatch_multiple,
        stages=learner.pipeline_parallel,
        prompts=[
            PromptCost(h.group_id, cost.flops_within((0, h.num_prompt_tokens), 0)) for h in headers
        ]
        if settings.shares_prompts
        else (),
    )
    return StepPlan(batch=batch, plans=plans)


def encode_order(order: Order) -> bytes:
    """Return the bytes that rank 0 broadcasts."""
    return _encoder.encode(order)


def decode_order(data: bytes) -> Order:
    """Return the order that rank 0 broadcast."""
    return _decoder.decode(data)


def num_flops(
    headers: Sequence[TrajectoryHeader], cost: SequenceCost, *, shares_prompts: bool
) -> float:
    """Return the FLOPs of a microbatch; a prompt that is shared counts once."""
    total = sum(cost.flops_within(h.bounds, h.num_response_tokens) for h in headers)
    prompts = {header.group_id: header.num_prompt_tokens for header in headers}
    counts = Counter(header.group_id for header in headers)
    saved = sum((counts[group] - 1) * length for group, length in prompts.items())
    if shares_prompts and is_worth_sharing(saved, sum(header.num_tokens for header in headers)):
        total -= sum(
            (counts[group] - 1) * cost.flops_within((0, length), 0)
            for group, length in prompts.items()
        )
    return total


def groups_of(order: StepPlan, indices: Sequence[int]) -> tuple[int, ...]:
    """Return the groups that trajectories belong to, each once, in order."""
    headers = order.headers
    return tuple(dict.fromkeys(headers[i].group_id for i in indices))
