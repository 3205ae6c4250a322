"""The learner's loop: batch -> train -> commit -> publish -> save, until there are no more steps.

Every rank runs it. Rank 0 sends requests for all of them (coordinator.py); below, the waits of each
process and what ends them.

    waits     for                                    until
    broker    G ready groups within the bound        generators and reward workers deliver;
                                                     until then it answers BatchNotReady
    rank 0    a batch, a commit, the ledger          the broker answers, in run.outage_s
              a slot to write a version into         the relay answers; it always has a free one
    others    rank 0's answers, by broadcast         rank 0 has one, every learner.timeout_s / 4
    replicas  their payloads                         the broker answers; most were prefetched
    all ranks gradients, and whether one has failed  the slowest is there, in learner.timeout_s
    saver     copies of every rank's tensors         all are made, between two steps; no rank waits
                                                     for the disk until the next save, or the end
    relay     a version that all ranks have written  publish(); the loop waits for no transfer
    prefetch  the next batch, during training        the broker answers; nothing waits for it

Order within a step: optimizer, commit, publish, save. The commit comes first, so no token is ever
newer than the broker's learner step. All ranks agree before each of them: a batch is trained or
rejected by all, a version is published whole or not at all.
"""

import secrets
import time
from collections.abc import Callable

from slipstream.algos.compose import Algorithm
from slipstream.learner.batches.links import RankLink
from slipstream.learner.batches.orders import Rejection, StepPlan, StopTraining
from slipstream.learner.checkpoints.files import Stage, ignore
from slipstream.learner.checkpoints.saver import Saver
from slipstream.learner.config import LearnerSettings
from slipstream.learner.coordinator import Coordinator
from slipstream.learner.model import device
from slipstream.learner.model.topology import Topology
from slipstream.learner.model.weights.hf_weights import save_hf_folder
from slipstream.learner.publish.contents import AdaptersAlone, Contents
from slipstream.learner.publish.part_link import PartLink
from slipstream.learner.publishing import Publishing
from slipstream.learner.record.profiling import StepProfiler
from slipstream.learner.record.rollout_log import open_rollout_log
from slipstream.learner.record.throughput import throughput_figures
from slipstream.learner.training.batch import BatchTraining
from slipstream.learner.training.policy import Policy
from slipstream.learner.training.probe import Probe
from slipstream.wire.errors import SlipstreamError
from slipstream.wire.files.checkpoints import read_checkpoint_info
from slipstream.wire.messages.broker import BatchNotReady, RunComplete
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.process.health import Health
from slipstream.wire.process.phases import PHASE_TIME, PhaseClock

VISIT_S = 1.0  # interval of visits to a checkpoint being written, while there is no batch
_ADVICE = {
    "nonfinite": "check learner.lr, the advantages (rewards), and the behavior logprobs",
    "invalid": "check the generators that sampled them",
}


class UntrainableError(SlipstreamError):
    """Batch after batch could not be trained."""


class LearnerLoop:
    """One rank of the learner."""

    def __init__(
        self,
        settings: LearnerSettings,
        topology: Topology,
        policy: Policy,
        algorithm: Algorithm,
        link: RankLink | None,
        coordinator: Coordinator,
        clock: PhaseClock,
        *,
        part: PartLink | None = None,
        is_replay: bool = False,
        observe_saves: Callable[[Stage], None] = ignore,
    ) -> None:
        """Prepare to train; one rank of each replica has a ``link`` that payloads come from.

        The first rank of each host except rank 0's has the relay of its host's ``part``. In a
        replay trajectories may have any number of turns.
        ``observe_saves`` is called at each stage of each checkpoint, also by threads.

        Raises:
            ConfigError: checkpoints cannot be written.
        """
        self._settings = settings
        self._topology = topology
        self._policy = policy
        self._algorithm = algorithm
        self._coordinator = coordinator
        self._clock = clock
        self._rollouts = open_rollout_log(settings) if coordinator.is_leader else None
        self._training = BatchTraining(
            settings, topology, policy, algorithm, link, self._rollouts, clock, is_replay=is_replay
        )
        self._saver = Saver(
            settings,
            topology,
            policy,
            coordinator.ledger_snapshot,
            coordinator.seal,
            run_id=coordinator.run_id,
            observe=observe_saves,
        )
        self._profiler = StepProfiler(
            settings.profile, settings.run.folder / "profile", rank=topology.rank
        )
        self._peak_tflops = settings.learner.peak_tflops or device.peak_tflops(
            policy.model.config.params_dtype
        )
        self._part = part
        self._version = PolicyVersion(0, 0)
        self._last_order: RunComplete | StopTraining | None = None
        self._publishing: Publishing | None = None
        self._probe: Probe | None = None
        self._rejected_in_a_row = 0
        self._num_orders = 0  # orders from rank 0, including "wait longer"
        self._reported_s: dict[str, float] = {}  # seconds by phase, at the last commit

    def run(self, health: Health | None = None) -> None:
        """Train until the run is complete or rank 0 is asked to stop; save as configured.

        Probes receive the ``health`` of this rank.
        """
        health = health or Health()
        health.waits_for("the broker to hand it the run")
        try:
            self.start()
            health.begins(self.signs)
            longest_s = self._settings.learner.timeout_s / 4
            while self.turn(longest_s):
                pass
        finally:
            self.close()
        self.finish()

    @property
    def version(self) -> PolicyVersion:
        """The version of the present weights."""
        return self._version

    @property
    def is_saving(self) -> bool:
        """True while a checkpoint is being written; every rank knows it."""
        return self._saver.is_saving

    def visit(self) -> None:
        """Finish a checkpoint that is written by now; every rank calls this."""
        with self._clock.phase("checkpoint"):
            self._saver.visit(self._version)

    def close(self) -> None:
        """Write what was traced; no turn follows."""
        self._profiler.close()

    def finish(self) -> None:
        """Save as configured, and leave: the run is complete, or stopped."""
        order, version = self._last_order, self._version
        if not isinstance(order, RunComplete):
            self._saver.on_stop(version)
            self._end_relays()
            with self._clock.phase("checkpoint"):
                self._saver.close()
            self._coordinator.leave(is_stopped=True)  # a stop, not a fault of the waiting batch
            return
        with self._clock.phase("checkpoint"):
            self._saver.at_end(version)
        self._saver.note(order.evaluations)
        self._coordinator.leave()  # now the other roles may leave, too
        self._end_relays()
        if self._settings.checkpoint.export_at_end:
            folder = self._settings.run.folder / "model"
            self._policy.bring_weights()
            save_hf_folder(self._policy.model, folder, self._settings.model)
        with self._clock.phase("checkpoint"):
            self._saver.close()

    def signs(self) -> tuple[int, int, int]:
        """Return signs of progress: phases, orders, waits to save."""
        return self._clock.num_changes, self._num_orders, self._saver.num_polls

    def start(self) -> None:
        """Take over the run at the step of the present weights, and publish them."""
        resumed = self._settings.resume_from
        info = read_checkpoint_info(resumed) if resumed is not None else None
        step = info.step if info is not None else 0
        name = resumed.name if resumed is not None else ""
        version = self._coordinator.take_over(step, name, info)
        self._reported_s = self._clock.seconds()
        if self._rollouts is not None:
            self._rollouts.forget_from(step)
        self._publish(version)
        with self._clock.phase("checkpoint"):
            self._saver.started_from(version)
        self._version = version

    def turn(self, longest_s: float) -> bool:
        """Train the next batch, or wait for it so long; return False if no batch will come.

        Every rank gets the same planned batch, or none. Without a batch, rank 0 answers after
        ``longest_s``, and soon enough that a checkpoint written by then is finished. After the last
        step come evaluations: the policy is saved before the loop waits for them.
        """
        version = self._version
        wait_s = min(longest_s, VISIT_S) if self.is_saving else longest_s
        order = self._coordinator.next_order(version, max_wait_s=wait_s)
        self._num_orders += 1
        if self.is_saving:
            self.visit()
        match order:
            case StepPlan():
                self._version = self._step(version, order)
                return True
            case BatchNotReady(last_step=last_step):
                if version.step >= last_step:  # a stop was planned since the commit
                    with self._clock.phase("checkpoint"):
                        self._saver.save_if_due(version, last_step=last_step)
                return True
            case _:
                self._last_order = order
                return False

    def _step(self, version: PolicyVersion, order: StepPlan) -> PolicyVersion:
        """Train one batch, commit, publish, and save if due; return the new version.

        The version stays the same if the batch could not be trained.
        """
        started = time.monotonic()
        self._profiler.before(version.step + 1)
        outcome = self._training.train(order)
        if isinstance(outcome, Rejection):
            self._reject(version, outcome)
            return version
        self._rejected_in_a_row = 0
        self._coordinator.barrier()  # all ranks have trained the batch
        figures = outcome.figures
        figures["policy/lr"] = self._policy.lr
        self._policy.end_step(trained_policy=self._algorithm.trains_policy(version.step))
        version = version.next()
        if self._algorithm.renews_reference(version.step):
            self._policy.renew_reference()
        figures["time/step"] = time.monotonic() - started
        reported, self._reported_s = self._reported_s, self._clock.seconds()
        phase_s = {  # together all the time since the last commit
            name: total - reported.get(name, 0.0) for name, total in self._reported_s.items()
        }
        figures |= {PHASE_TIME + name: seconds for name, seconds in phase_s.items()}
        figures |= throughput_figures(
            outcome.work, phase_s, ranks=self._topology.world_size, peak_tflops=self._peak_tflops
        )
        figures |= self._saver.figures()
        with self._clock.phase("commit"):
            committed = self._coordinator.commit(version, figures, outcome.work.num_trained_tokens)
            self._saver.note(committed.evaluations)
        self._publish(version)
        self._profiler.after(version.step)
        seconds = time.monotonic() - started
        name = "policy/loss" if self._algorithm.imitates else "reward/mean"
        what = "loss" if self._algorithm.imitates else "reward"
        self._coordinator.log(
            "step %d %s %.3f in %.2f s", version.step, what, figures[name], seconds
        )
        with self._clock.phase("checkpoint"):
            self._saver.save_if_due(version, last_step=committed.last_step)
        return version

    def _reject(self, version: PolicyVersion, rejection: Rejection) -> None:
        """Have the batch replaced; the version stays.

        Raises:
            UntrainableError: on every rank, after too many rejections in a row.
        """
        self._rejected_in_a_row += 1
        self._coordinator.reject_batch(version, rejection)
        if self._rejected_in_a_row >= self._settings.learner.max_rejected_batches:
            raise UntrainableError(
                f"step {version.step}: {self._rejected_in_a_row} batches in a row could not be "
                f"trained (learner.max_rejected_batches), the last one because {rejection.detail}; "
                + _ADVICE[rejection.reason]
            )

    def _end_relays(self) -> None:
        self._coordinator.end()
        if self._publishing is not None:
            self._publishing.end()

    def _contents(self) -> Contents:
        model = self._policy.model
        is_named = self._settings.lora.is_named
        if is_named:
            return AdaptersAlone(model)
        return Contents(model, is_fp8=self._settings.weightbus.is_fp8)

    def _publish(self, version: PolicyVersion) -> None:
        """Copy this rank's weights out, with a probe if due; the transfer does not wait.

        Raises:
            PublishError: on every rank, if a tensor holds NaN or inf.
        """
        if not self._coordinator.publishes:
            return
        with self._clock.phase("export"):
            if self._publishing is None:
                bus = self._settings.weightbus
                self._publishing = Publishing(
                    self._policy.model,
                    self._topology,
                    self._coordinator,
                    bucket_bytes=bus.bucket_bytes,
                    contents=self._contents(),
                    in_parts=bus.parts == "auto",
                    part=self._part,
                    epoch=version.epoch,
                )
            self._policy.bring_weights()
            slot = self._publishing.write(version)
        if self._probe is None:
            seed = self._coordinator.agreed(secrets.token_hex(16), str)
            self._probe = Probe(self._policy, self._settings.weightbus, seed=seed)
        with self._clock.phase("probe"):
            probe = self._probe.logprobs()
        with self._clock.phase("export"):
            self._publishing.publish(version, slot, probe)
