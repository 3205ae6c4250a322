"""This rank's share of a delivered batch: fetch -> unpack -> pack -> train -> record.

Either all ranks train a batch or none does: failures are agreed on before a weight changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.algos.compose import Algorithm
from slipstream.algos.kernels import replaced_calls
from slipstream.learner.batches.images import ImageReader, law_of
from slipstream.learner.batches.links import RankLink
from slipstream.learner.batches.orders import (
    NonFiniteError,
    Rejection,
    StepPlan,
    groups_of,
    num_flops,
)
from slipstream.learner.batches.packing import ExpertSizes, PackedBatch, pack
from slipstream.learner.batches.share import fetch_images, fetch_payloads, unpack_share
from slipstream.learner.config import LearnerSettings
from slipstream.learner.model.collectives import total
from slipstream.learner.model.device import device
from slipstream.learner.model.topology import Topology
from slipstream.learner.record.rollout_log import RolloutLog, TrainedPart
from slipstream.learner.record.throughput import StepWork
from slipstream.learner.training.policy import Policy
from slipstream.learner.training.step import TrainedMinibatch, train_step
from slipstream.learner.training.step_data import batch_figures, step_data
from slipstream.wire.messages.codec import Frame
from slipstream.wire.messages.trajectory import MAX_TOKENS
from slipstream.wire.models.flops import ImageCost, SequenceCost
from slipstream.wire.models.hf_config import HfConfig
from slipstream.wire.process.phases import PhaseClock


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """The result of a batch that was trained."""

    figures: dict[str, float]
    work: StepWork


def expert_sizes(hf: HfConfig) -> ExpertSizes:
    """Return the numbers of experts in a model."""
    return ExpertSizes(
        layers=hf.num_sparse_layers, experts=hf.num_routed_experts, of_token=hf.experts_per_token
    )


class BatchTraining:
    """Trains one batch after another on this rank."""

    def __init__(
        self,
        settings: LearnerSettings,
        topology: Topology,
        policy: Policy,
        algorithm: Algorithm,
        link: RankLink | None,
        rollouts: RolloutLog | None,
        clock: PhaseClock,
        *,
        is_replay: bool = False,
    ) -> None:
        """Prepare to train; one rank of each replica has a ``link`` that payloads come from.

        In a replay trajectories may have any number of turns.
        """
        self._settings = settings
        self._topology = topology
        self._policy = policy
        self._algorithm = algorithm
        self._link = link
        self._rollouts = rollouts
        self._clock = clock
        acts = settings.environment
        self._max_turns = MAX_TOKENS if is_replay else acts.max_turns if acts.is_named else 0
        self._cost = SequenceCost.of(policy.model.hf_config, settings.adapters)
        self._image_cost = ImageCost.of(policy.model.hf_config)
        self._law = law_of(policy.model.hf_config, settings.model)

    def train(self, order: StepPlan) -> TrainedBatch | Rejection:
        """Train a batch. A rejection holds on every rank, and no weight has changed then.

        Raises:
            SlipstreamError: on every rank, if the payloads cannot be fetched.
        """
        num_lags = self._settings.run.staleness_bound + 1
        packed = self._fetch_and_pack(order)
        if isinstance(packed, Rejection):
            return packed
        try:
            figures, trained = train_step(
                self._policy,
                packed,
                order.plans,
                step_data(order.batch.groups, step=order.step, seed=self._settings.run.seed),
                self._algorithm,
                self._clock,
                num_lags=num_lags,
            )
        except NonFiniteError as error:
            self._policy.pipeline_figures()  # drop this batch's: the next starts anew
            everything = groups_of(order, range(len(order.headers)))
            return Rejection("nonfinite", everything, str(error))
        figures |= batch_figures(order.batch.groups, order.step, num_lags=num_lags)
        figures |= self._policy.pipeline_figures()
        figures["throughput/replaced_kernels"] = float(replaced_calls())
        if self._rollouts is not None:
            share = order.share(self._topology.data_parallel_rank)
            parts = [  # empty microbatches come last
                TrainedPart(*part)
                for minibatch in trained
                for part in zip(
                    share[minibatch.number],
                    packed[minibatch.number],
                    minibatch.proximal,
                    strict=False,
                )
            ]
            self._rollouts.record(order.step, order.trajectories, parts)
        return TrainedBatch(figures, self._work(order, trained, self._flops_of_images(packed)))

    def _flops_of_images(self, packed: Sequence[Sequence[PackedBatch]]) -> float:
        """Return the operations of all replicas' images; every rank calls this."""
        cost = self._image_cost
        if cost is None or self._law is None:
            return 0.0
        shown = [batch.images for batches in packed for batch in batches if batch.images]
        mine = sum(cost.flops(*grid) for images in shown for grid in images.grids)
        return total(mine) / self._topology.sizes.per_replica

    def _work(
        self, order: StepPlan, trained: Sequence[TrainedMinibatch], flops_of_images: float
    ) -> StepWork:
        updates = trained if self._algorithm.trains_policy(order.step) else []
        headers, shares_prompts = order.headers, self._settings.shares_prompts
        microbatches = [
            [headers[i] for i in indices]
            for minibatch in updates
            for share in order.plans[minibatch.number].microbatches
            for indices in share
        ]
        return StepWork(
            num_tokens=sum(header.num_tokens for header in headers),
            num_trained_tokens=sum(header.num_response_tokens for header in headers),
            flops=sum(
                num_flops(members, self._cost, shares_prompts=shares_prompts)
                for members in microbatches
            )
            + flops_of_images * bool(updates),
        )

    def _images(self, frames: Sequence[Frame]) -> ImageReader | None:
        """Return what reads the images of payloads; None for a policy that sees none."""
        if self._law is None:
            return None
        contents = fetch_images(frames, self._topology, self._link)
        has_tower = self._policy.model.first is not None
        return ImageReader(self._law, contents if has_tower else None)

    def _fetch_and_pack(self, order: StepPlan) -> list[list[PackedBatch]] | Rejection:
        """Return this rank's microbatches by minibatch, and prefetch the next batch."""
        with self._clock.phase("fetch"):
            frames = fetch_payloads(order, self._topology, self._link)
            images = self._images(frames)
        if self._link is not None and self._settings.learner.prefetch:
            self._link.begin_prefetch(order.step + 1)
        with self._clock.phase("pack"):
            hf, settings = self._policy.model.hf_config, self._settings
            sequences = unpack_share(
                order,
                self._topology,
                frames,
                vocab_size=hf.vocab_size,
                longest=settings.environment.longest(settings.sampling),
                max_turns=self._max_turns,
                experts=expert_sizes(hf) if settings.run.routing_replay == "R3" else None,
                images=images,
            )
            if isinstance(sequences, Rejection):
                return sequences
            return [
                [
                    pack(
                        [sequences[i] for i in indices],
                        device(),
                        shares_prompts=settings.shares_prompts,
                    )
                    for indices in minibatch
                ]
                for minibatch in order.share(self._topology.data_parallel_rank)
            ]
