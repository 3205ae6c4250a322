"""The learner's loop: batch -> train -> commit -> publish -> save, until there are no more steps.

Consumes: delivered groups. Produces: commits, versioned weights, checkpoints. Waits for: G ready
groups within the staleness bound. Order within a step: optimizer, then commit, then publish, so
that no token is ever newer than the broker's learner step.
"""

import logging
import time
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from tokenizers import Tokenizer

from slipstream.algos.compose import Algorithm
from slipstream.learner.batches.links import LeadingLink, RankLink
from slipstream.learner.batches.orders import (
    NonFiniteError,
    Order,
    Rejection,
    StepOrder,
    StopTraining,
    decode_order,
    encode_order,
    groups_of,
)
from slipstream.learner.batches.packing import PackedBatch, pack
from slipstream.learner.batches.share import fetch_share, unpack_share
from slipstream.learner.checkpoints.saver import Saver
from slipstream.learner.config import LearnerSettings
from slipstream.learner.model.collectives import any_rank, broadcast_bytes
from slipstream.learner.model.device import device
from slipstream.learner.model.hf_weights import save_hf_folder
from slipstream.learner.model.topology import Topology
from slipstream.learner.publish.weight_writer import WeightWriter
from slipstream.learner.record.profiling import StepProfiler
from slipstream.learner.record.rollout_log import RolloutLog, TrainedPart
from slipstream.learner.stop import StopRequest
from slipstream.learner.training.policy import Policy
from slipstream.learner.training.step import TrainedMinibatch, train_step
from slipstream.learner.training.step_data import batch_figures, step_data
from slipstream.wire.errors import PublishError, SlipstreamError
from slipstream.wire.files.checkpoints import read_checkpoint_info
from slipstream.wire.messages.broker import BatchNotReady, RunComplete
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.process.phases import PHASE_TIME, PhaseClock

_log = logging.getLogger(__name__)
T = TypeVar("T")
_ADVICE = {
    "nonfinite": "look at learner.lr, at the advantages (rewards), and at the behavior logprobs",
    "invalid": "look at the generators that sampled them",
}


class UntrainableError(SlipstreamError):
    """Batch after batch could not be trained."""


@dataclass(frozen=True, slots=True)
class _Trained:
    """What the training of one batch came to."""

    figures: dict[str, float]
    num_tokens: int


class LearnerLoop:
    """One rank of the learner. Rank 0 alone talks control; the others follow its broadcasts."""

    def __init__(
        self,
        settings: LearnerSettings,
        topology: Topology,
        policy: Policy,
        algorithm: Algorithm,
        link: RankLink | None,
        leader: LeadingLink | None,
        clock: PhaseClock,
        stop: StopRequest,
    ) -> None:
        """Prepare to train.

        Args:
            settings: the learner's.
            topology: this rank's place.
            policy: what is trained, with the weights to start from.
            algorithm: of the run.
            link: where payloads come from, on one rank of each replica; None on the others.
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
        self._writer: WeightWriter | None = None
        self._publishes = False  # known when the run is taken over
        self._rejected_in_a_row = 0
        self._told_s: dict[str, float] = {}  # by phase, as of the last commit
        run_id = leader.run_id if leader is not None else ""
        self._saver = Saver(settings, topology, policy, self._ledger, self._seal, run_id=run_id)
        self._algorithm = algorithm
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
            if self._leader is not None:
                self._leader.end()
            return
        with self._clock.phase("checkpoint"):
            self._saver.at_end(version)
        if self._leader is not None:
            self._saver.note(answer.evaluations)
            self._leader.leave()
            self._leader.end()
        if self._settings.checkpoint.export_at_end:
            folder = self._settings.run.folder / "model"
            save_hf_folder(self._policy.model, folder, self._settings.model)

    def _run(self) -> tuple[PolicyVersion, RunComplete | StopTraining]:
        """Train step after step; return the version at the end and why it ended."""
        version = self._begin()
        while True:
            order = self._next_order(version)
            if not isinstance(order, StepOrder):
                return version, order
            version = self._step(version, order)

    def _begin(self) -> PolicyVersion:
        """Take over the run at the step of the weights held, and publish them."""
        resumed = self._settings.resume_from
        info = read_checkpoint_info(resumed) if resumed is not None else None
        step = info.step if info is not None else 0
        version = PolicyVersion(0, step)
        if self._leader is not None:
            name = resumed.name if resumed is not None else ""
            version = self._leader.take_over(step, name, info)
            self._publishes = self._leader.publishes
            self._told_s = self._clock.seconds()
            _log.info("took over as %s", version.label)
        if self._rollouts is not None:
            self._rollouts.forget_from(step)
        version = self._agreed(version, PolicyVersion)
        self._publishes = self._agreed(self._publishes, bool)
        self._publish(version)
        with self._clock.phase("checkpoint"):
            self._saver.started_from(version)
        return version

    def _step(self, version: PolicyVersion, order: StepOrder) -> PolicyVersion:
        """Train one batch, commit, publish, and save if it is due; return the new version.

        It is the old one if the batch could not be trained.
        """
        started = time.monotonic()
        self._profiler.before(version.step + 1)
        outcome = self._train(version, order)
        if isinstance(outcome, Rejection):
            self._reject(version, outcome)
            return version
        self._rejected_in_a_row = 0
        any_rank(False, world_size=self._topology.world_size)  # all of them have trained it
        figures = outcome.figures
        figures["policy/lr"] = self._policy.lr
        self._policy.end_step(trained_policy=self._algorithm.trains_policy(version.step))
        version = version.next()
        if self._algorithm.renews_reference(version.step):
            self._policy.renew_reference()
        last_step = 0
        if self._leader is not None:
            figures["time/step"] = time.monotonic() - started
            figures |= self._phase_figures()
            figures |= self._saver.figures()
            with self._clock.phase("commit"):
                committed = self._leader.commit(version, figures, outcome.num_tokens)
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

    def _phase_figures(self) -> dict[str, float]:
        """Return the seconds in each phase since the last commit: together all of that time."""
        seconds = self._clock.seconds()
        told, self._told_s = self._told_s, seconds
        return {PHASE_TIME + name: seconds[name] - told.get(name, 0.0) for name in seconds}

    def _reject(self, version: PolicyVersion, rejection: Rejection) -> None:
        """Have the batch replaced; the version stays. Every rank calls this.

        Raises:
            UntrainableError: on every rank, if this was one too many in a row.
        """
        self._rejected_in_a_row += 1
        if self._leader is not None:
            _log.error("the batch of step %d is not trained: %s", version.step, rejection.detail)
            self._leader.reject_batch(version, rejection)
        if self._rejected_in_a_row >= self._settings.learner.max_rejected_batches:
            raise UntrainableError(
                f"step {version.step}: {self._rejected_in_a_row} batches in a row could not be "
                f"trained (learner.max_rejected_batches), the last one because {rejection.detail}; "
                + _ADVICE[rejection.reason]
            )

    def _next_order(self, version: PolicyVersion) -> StepOrder | RunComplete | StopTraining:
        """Return the same planned batch on every rank, or why there will be none.

        While there is none, rank 0 says so often enough that no rank takes it for dead. What comes
        after the last step are evaluations: the policy is saved before they are waited for.
        """
        while True:
            order = decode_order(self._broadcast(self._asked(version)))
            if not isinstance(order, BatchNotReady):
                return order
            if version.step >= order.last_step:  # a stop was planned since the commit
                with self._clock.phase("checkpoint"):
                    self._saver.save_if_due(version, last_step=order.last_step)

    def _asked(self, version: PolicyVersion) -> bytes | None:
        """Return what rank 0 says comes next, encoded; None on the others."""
        if self._leader is None:
            return None
        order: Order = StopTraining()
        if not self._stop.requested:
            wait_s = self._settings.learner.timeout_s / 4
            order = self._leader.next_order(version, max_wait_s=wait_s)
        return encode_order(order)

    def _agreed(self, value: T, kind: type[T]) -> T:
        """Return rank 0's value on every rank."""
        return msgspec.msgpack.decode(self._broadcast(msgspec.msgpack.encode(value)), type=kind)

    def _broadcast(self, data: bytes | None) -> bytes:
        topology = self._topology
        return broadcast_bytes(data, rank=topology.rank, world_size=topology.world_size)

    def _ledger(self, version: PolicyVersion) -> bytes:
        return self._leader.ledger_snapshot(version) if self._leader is not None else b""

    def _seal(self, version: PolicyVersion, step: int, oldest_kept: int) -> None:
        if self._leader is not None:
            self._leader.seal(version, step=step, oldest_kept=oldest_kept)

    def _train(self, version: PolicyVersion, order: StepOrder) -> _Trained | Rejection:
        """Train a batch; every rank returns a rejection, and no weight has changed, or none."""
        with self._clock.phase("fetch"):
            frames = fetch_share(order, self._topology, self._link)
        if self._link is not None and self._settings.learner.prefetch:
            self._link.begin_prefetch(version.step + 1)
        with self._clock.phase("pack"):
            vocab_size = self._policy.model.hf_config.vocab_size
            sequences = unpack_share(order, self._topology, frames, vocab_size=vocab_size)
            if isinstance(sequences, Rejection):
                return sequences
            batches = [
                [pack([sequences[i] for i in indices], device()) for indices in minibatch]
                for minibatch in order.share(self._topology.data_parallel_rank)
            ]
        num_lags = self._settings.run.staleness_bound + 1
        try:
            figures, trained = train_step(
                self._policy,
                batches,
                order.plans,
                step_data(order.batch.groups, step=order.step, seed=self._settings.run.seed),
                self._algorithm,
                self._clock,
                num_lags=num_lags,
            )
        except NonFiniteError as error:
            everything = groups_of(order, range(len(order.headers)))
            return Rejection("nonfinite", everything, str(error))
        figures |= batch_figures(order.batch.groups, order.step, num_lags=num_lags)
        self._record(order, batches, trained)
        return _Trained(figures, sum(header.num_response_tokens for header in order.headers))

    def _record(
        self, order: StepOrder, batches: list[list[PackedBatch]], trained: list[TrainedMinibatch]
    ) -> None:
        if self._rollouts is None:
            return
        share = order.share(self._topology.data_parallel_rank)
        parts = [
            TrainedPart(*part)
            for one in trained
            for part in zip(share[one.number], batches[one.number], one.proximal, strict=True)
        ]
        self._rollouts.record(order.step, order.trajectories, parts)

    def _publish(self, version: PolicyVersion) -> None:
        """Copy this rank's weights out; the transfer does not wait.

        Raises:
            PublishError: on every rank, if a tensor holds NaN or inf.
        """
        if not self._publishes:
            return
        with self._clock.phase("export"):
            writer = self._writer or self._open_weights()
            slot = self._agreed(self._leader.reserve() if self._leader else 0, int)
            bad = writer.write(slot)
            if any_rank(bool(bad), world_size=self._topology.world_size):
                name = bad or "a tensor that another learner rank's log names"
                raise PublishError(f"{version.label} is not published: {name} holds NaN or inf")
            if self._leader is not None:
                self._leader.publish(version, slot)

    def _open_weights(self) -> WeightWriter:
        self._writer = writer = WeightWriter(
            self._policy.model,
            self._topology,
            bucket_bytes=self._settings.weightbus.bucket_bytes,
            agree=lambda path: self._agreed(path, str),
        )
        if self._leader is not None:
            self._leader.open_weights(writer.path, writer.layout)
        return writer
