"""The learner's loop: batch -> train -> commit -> publish -> save, until there are no more steps.

Consumes: delivered groups. Produces: commits, versioned weights, checkpoints. Waits for: G ready
groups within the staleness bound. Order within a step: optimizer, then commit, then publish, so
that no token is ever newer than the broker's learner step.
"""

import logging
import time
from typing import TypeVar

import msgspec
from tokenizers import Tokenizer

from learner.broadcast import any_rank, broadcast_bytes
from learner.collate import TrainSequence, pack, unpack
from learner.config import LearnerSettings
from learner.device import device
from learner.hf_weights import export_hf_weights, save_hf_folder
from learner.links import LeadingLink, RankLink
from learner.plan import plan_step
from learner.policy import Policy
from learner.profiling import StepProfiler
from learner.rollout_log import RolloutLog, TrainedPart
from learner.saver import Saver
from learner.step import Minibatch, advantages_of, batch_figures, train_step
from learner.stop import StopRequest
from learner.topology import Topology
from weightbus.snapshot import WeightSnapshot
from wire.checkpoints import read_checkpoint_info
from wire.control import BatchDelivered, BatchNotReady, Message, RunComplete
from wire.errors import PeerLostError, SlipstreamError
from wire.phases import PhaseClock
from wire.trajectory import TrajectoryHeader
from wire.versions import PolicyVersion

_log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


class StopTraining(Message, frozen=True):
    """Rank 0 to the other ranks: asked to end before the run is complete."""


_Answer = BatchDelivered | BatchNotReady | RunComplete | StopTraining
_decoder: msgspec.msgpack.Decoder[_Answer] = msgspec.msgpack.Decoder(_Answer)


class LearnerLoop:
    """One rank of the learner. Rank 0 alone talks control; the others follow its broadcasts."""

    def __init__(
        self,
        settings: LearnerSettings,
        topology: Topology,
        policy: Policy,
        link: RankLink,
        leader: LeadingLink | None,
        clock: PhaseClock,
        stop: StopRequest,
    ) -> None:
        """Prepare to train.

        Args:
            settings: the learner's.
            topology: this rank's place.
            policy: what is trained, with the weights to start from.
            link: where this rank's payloads come from.
            leader: where batches come from and results go, on rank 0 alone.
            clock: what this rank spends its time on.
            stop: whether rank 0 has been asked to end.

        Raises:
            ConfigError: checkpoints cannot be written.
        """
        self._settings = settings
        self._topology = topology
        self._policy = policy
        self._link = link
        self._leader = leader
        self._clock = clock
        self._stop = stop
        folder = settings.run.folder
        self._saver = Saver(settings, topology, policy, self._ledger)
        self._profiler = StepProfiler(settings.profile, folder / "profile", rank=topology.rank)
        self._rollouts: RolloutLog | None = None
        if leader is not None and settings.learner.rollouts_per_step:
            self._rollouts = RolloutLog(
                folder / "rollouts",
                per_step=settings.learner.rollouts_per_step,
                seed=settings.run.seed,
                max_bytes=settings.learner.max_rollout_bytes,
                tokenizer=Tokenizer.from_file(str(settings.model / "tokenizer.json")),
            )

    def run(self) -> None:
        """Train until the run is complete or rank 0 is asked to end; save what is to be saved."""
        try:
            version, answer = self._run()
        finally:
            self._profiler.close()
        if isinstance(answer, StopTraining):
            self._saver.on_stop(version)
            return
        with self._clock.phase("checkpoint"):
            self._saver.at_end(version)
        if self._leader is not None:
            self._saver.note(answer.evaluations)
        if self._settings.checkpoint.export_at_end:
            folder = self._settings.run.folder / "model"
            save_hf_folder(self._policy.model, folder, self._settings.model)

    def _run(self) -> tuple[PolicyVersion, RunComplete | StopTraining]:
        """Train step after step; return the version at the end and why it ended."""
        version = self._begin()
        while True:
            answer = self._next_batch(version)
            if not isinstance(answer, BatchDelivered):
                return version, answer
            version = self._step(version, answer)

    def _begin(self) -> PolicyVersion:
        """Take over the run at the step of the weights held, and publish them."""
        resumed = self._settings.resume_from
        step = read_checkpoint_info(resumed).step if resumed is not None else 0
        version = PolicyVersion(0, step)
        if self._leader is not None:
            version = self._leader.take_over(step)
            _log.info("took over as %s", version.label)
        version = self._agreed(version, PolicyVersion)
        self._publish(version)
        with self._clock.phase("checkpoint"):
            self._saver.started_from(version)
        return version

    def _step(self, version: PolicyVersion, batch: BatchDelivered) -> PolicyVersion:
        """Train one batch, commit, publish, and save if it is due; return the new version."""
        started = time.monotonic()
        self._profiler.before(version.step + 1)
        figures, num_tokens = self._train(batch)
        figures["policy/lr"] = self._policy.lr
        self._policy.end_step()
        version = version.next()
        last_step = 0
        if self._leader is not None:
            figures["time/step"] = time.monotonic() - started
            figures |= self._saver.figures()
            with self._clock.phase("commit"):
                committed = self._leader.commit(version, figures, num_tokens)
                last_step = committed.last_step
                self._saver.note(committed.evaluations)
        last_step = self._agreed(last_step, int)
        self._publish(version)
        self._profiler.after(version.step)
        if self._leader is not None:
            _log.info(
                "step %d reward %.3f in %.2f s",
                version.step,
                figures["reward/mean"],
                time.monotonic() - started,
            )
        with self._clock.phase("checkpoint"):
            self._saver.save_if_due(version, last_step=last_step)
        return version

    def _next_batch(self, version: PolicyVersion) -> BatchDelivered | RunComplete | StopTraining:
        """Return the same batch on every rank, or why there will be none.

        While there is none, rank 0 says so often enough that no rank takes it for dead. What comes
        after the last step are evaluations: the policy is saved before they are waited for.
        """
        while True:
            answer = self._decoded(self._asked(version))
            if not isinstance(answer, BatchNotReady):
                return answer
            if version.step >= answer.last_step:  # a stop was planned since the commit
                with self._clock.phase("checkpoint"):
                    self._saver.save_if_due(version, last_step=answer.last_step)

    def _asked(self, version: PolicyVersion) -> bytes | None:
        """Return what rank 0 says comes next, encoded; None on the others."""
        if self._leader is None:
            return None
        answer: _Answer = StopTraining()
        if not self._stop.requested:
            wait_s = self._settings.learner.timeout_s / 4
            answer = self._leader.next_batch(version, max_wait_s=wait_s)
        return _encoder.encode(answer)

    def _decoded(self, answer: bytes | None) -> _Answer:
        return _decoder.decode(self._broadcast(answer))

    def _agreed(self, value: T, kind: type[T]) -> T:
        """Return rank 0's value on every rank."""
        return msgspec.msgpack.decode(self._broadcast(_encoder.encode(value)), type=kind)

    def _broadcast(self, data: bytes | None) -> bytes:
        topology = self._topology
        return broadcast_bytes(data, rank=topology.rank, world_size=topology.world_size)

    def _ledger(self, version: PolicyVersion) -> bytes:
        return self._leader.ledger_snapshot(version) if self._leader is not None else b""

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
        if self._rollouts is not None:
            parts = [
                TrainedPart(*part)
                for indices, minibatch, anchors in zip(mine, minibatches, proximal, strict=True)
                for part in zip(indices, minibatch.batches, anchors, strict=True)
            ]
            self._rollouts.record(batch.step, trajectories, parts)
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
        if not self._link.publishes:
            return
        with self._clock.phase("export"):
            tensors = {}
            for name, tensor in export_hf_weights(self._policy.model):  # all ranks gather
                if self._leader is not None:
                    tensors[name] = tensor.detach().clone()
            if self._leader is not None:
                self._leader.publish(WeightSnapshot(version, tensors))
