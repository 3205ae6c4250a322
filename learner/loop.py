"""The learner's loop: batch -> train -> commit -> publish, until the broker has no more steps.

Consumes: delivered groups. Produces: commits and versioned weights. Waits for: G ready groups
within the staleness bound. Order within a step: optimizer, then commit, then publish, so that no
token is ever newer than the broker's learner step.
"""

import logging
import time

import msgspec

from learner.background import BackgroundLoop
from learner.broadcast import any_rank, broadcast_bytes
from learner.broker_link import LeaderLink, PayloadLink
from learner.collate import TrainSequence, pack, unpack
from learner.config import LearnerSettings
from learner.device import device
from learner.hf_weights import export_hf_weights, save_hf_folder
from learner.plan import plan_step
from learner.policy import Policy
from learner.rollout_log import RolloutLog
from learner.step import Minibatch, advantages_of, batch_figures, train_step
from learner.topology import Topology
from weightbus.snapshot import WeightSnapshot
from wire.control import BatchDelivered, BatchNotReady, RunComplete
from wire.errors import PeerLostError, SlipstreamError
from wire.phases import PhaseClock
from wire.trajectory import TrajectoryHeader
from wire.versions import PolicyVersion

_log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[BatchDelivered | BatchNotReady | RunComplete] = (
    msgspec.msgpack.Decoder(BatchDelivered | BatchNotReady | RunComplete)
)


class LearnerLoop:
    """One rank of the learner. Rank 0 alone talks control; the others follow its broadcasts."""

    def __init__(
        self,
        settings: LearnerSettings,
        topology: Topology,
        policy: Policy,
        loop: BackgroundLoop,
    ) -> None:
        self._settings = settings
        self._topology = topology
        self._policy = policy
        self._clock = PhaseClock()
        rank = topology.rank
        self._leader = LeaderLink(loop, settings, self._clock) if rank == 0 else None
        self._link: PayloadLink = self._leader or PayloadLink(
            loop, settings, f"learner-rank-{rank}"
        )
        self._rollouts = RolloutLog(
            settings.run.folder / "rollouts", max_bytes=settings.learner.max_rollout_bytes
        )

    def run(self) -> None:
        """Train until the run is complete."""
        try:
            self._run()
        finally:
            self._link.close()

    def _run(self) -> None:
        version = PolicyVersion(0, 0)
        if self._leader is not None:
            version = self._leader.take_over(0)
            _log.info("took over as %s", version.label)
        self._publish(version)
        while (batch := self._next_batch(version)) is not None:
            started = time.monotonic()
            figures, num_tokens = self._train(batch)
            version = version.next()
            if self._leader is not None:
                figures["time/step"] = time.monotonic() - started
                with self._clock.phase("commit"):
                    self._leader.commit(version, figures, num_tokens)
            self._publish(version)
            _log.info(
                "step %d reward %.3f in %.2f s",
                version.step,
                figures["reward/mean"],
                time.monotonic() - started,
            )
        if self._settings.learner.save_final:
            folder = self._settings.run.folder / "model"
            save_hf_folder(self._policy.model, folder, self._settings.model)

    def _next_batch(self, version: PolicyVersion) -> BatchDelivered | None:
        """Return the same batch on every rank, None at the end.

        While there is none, rank 0 says so often enough that no rank takes it for dead.
        """
        topology = self._topology
        while True:
            answer = None
            if self._leader is not None:
                answer = _encoder.encode(
                    self._leader.next_batch(
                        version, max_wait_s=self._settings.learner.timeout_s / 4
                    )
                )
            data = broadcast_bytes(answer, rank=topology.rank, world_size=topology.world_size)
            match _decoder.decode(data):
                case BatchDelivered() as batch:
                    return batch
                case RunComplete():
                    return None
                case BatchNotReady():
                    continue

    def _train(self, batch: BatchDelivered) -> tuple[dict[str, float], int]:
        settings = self._settings.learner
        trajectories = [t for group in batch.groups for t in group.trajectories]
        headers = [t.header for t in trajectories]
        advantages = advantages_of(batch.groups, self._settings.algo)
        plans = plan_step(
            [header.num_tokens for header in headers],
            replicas=self._topology.data_parallel,
            minibatches=settings.minibatches,
            max_tokens=settings.max_tokens_per_microbatch,
        )
        replica = self._topology.data_parallel_rank
        mine = [plan.microbatches[replica] for plan in plans]
        with self._clock.phase("fetch"):
            wanted = [i for minibatch in mine for indices in minibatch for i in indices]
            sequences = self._fetch(headers, advantages, wanted)
        with self._clock.phase("pack"):
            minibatches = [
                Minibatch(
                    [pack([sequences[i] for i in indices], device()) for indices in minibatch],
                    sum(
                        headers[i].num_response_tokens
                        for share in plan.microbatches
                        for indices in share
                        for i in indices
                    ),
                )
                for plan, minibatch in zip(plans, mine, strict=True)
            ]
        figures, proximal = train_step(self._policy, minibatches, self._settings.algo, self._clock)
        figures |= batch_figures(trajectories, batch.step)
        if self._leader is not None and settings.rollouts_per_step:
            recorded = [trajectories[i] for i in mine[0][0][: settings.rollouts_per_step]]
            self._rollouts.record(batch.step, recorded, minibatches[0].batches[0], proximal[0][0])
        return figures, sum(header.num_response_tokens for header in headers)

    def _fetch(
        self, headers: list[TrajectoryHeader], advantages: list[float], wanted: list[int]
    ) -> dict[int, TrainSequence]:
        """Return this rank's sequences by index; if any rank fails, all do, before the step."""
        failure: SlipstreamError | None = None
        sequences: dict[int, TrainSequence] = {}
        try:
            keys = [(headers[i].group_id, headers[i].sibling) for i in wanted]
            for i, payload in zip(wanted, self._link.fetch(keys), strict=True):
                sequences[i] = unpack(headers[i], payload, advantage=advantages[i])
        except SlipstreamError as error:
            failure = error
        if any_rank(failure is not None, world_size=self._topology.world_size):
            raise failure or PeerLostError("another learner rank could not fetch its payloads")
        return sequences

    def _publish(self, version: PolicyVersion) -> None:
        """Copy this rank's weights out, whole tensors to rank 0; the transfer does not wait."""
        with self._clock.phase("export"):
            tensors = {}
            for name, tensor in export_hf_weights(self._policy.model):  # all ranks gather
                if self._leader is not None:
                    tensors[name] = tensor.detach().clone()
            if self._leader is not None:
                self._leader.publish(WeightSnapshot(version, tensors))
