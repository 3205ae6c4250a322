"""Saves and prunes the learner's checkpoints; the decisions are in retention.py."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version as package_version
from pathlib import Path

from slipstream.learner.checkpoints.files import Save, Stage, ignore, prepare_folder
from slipstream.learner.checkpoints.identity import architecture_of, dtype_name, parameters_hash
from slipstream.learner.checkpoints.rank_agreement import CheckpointError, CheckpointStuckError
from slipstream.learner.checkpoints.retained_checkpoints import RetainedCheckpoints
from slipstream.learner.checkpoints.retention import (
    Resumption,
    is_final_save_due,
    is_overtaken,
    is_save_due,
)
from slipstream.learner.checkpoints.staging import TensorStaging
from slipstream.learner.checkpoints.uploader import Uploader
from slipstream.learner.config import LearnerSettings
from slipstream.learner.model.collectives import any_rank
from slipstream.learner.model.topology import Topology
from slipstream.learner.training.policy import Policy
from slipstream.wire.errors import SlipstreamError
from slipstream.wire.files.checkpoints import (
    FORMAT_REVISION,
    LEDGER_FILE,
    UPLOAD_FILE,
    CheckpointInfo,
    checkpoint_name,
    ledger_file,
    read_checkpoint_info,
    readable_checkpoints,
)
from slipstream.wire.files.fetched import is_fetched
from slipstream.wire.files.replace import replace_file
from slipstream.wire.messages.status import EvalPoint
from slipstream.wire.messages.versions import PolicyVersion

_log = logging.getLogger(__name__)
_PACKAGES = ("torch", "megatron-core")


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A checkpoint that is being written."""

    save: Save
    info: CheckpointInfo
    replaced: CheckpointInfo | None  # complete one of the same name, until this is complete; rank 0
    started_s: float


class Saver:
    """The checkpoints of one run. Every rank has one; rank 0 alone touches finished checkpoints.

    At most one checkpoint is written at a time. All ranks know if one is, and finish it together
    at the next call of a method that says so.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        topology: Topology,
        policy: Policy,
        ledger: Callable[[PolicyVersion], bytes],
        seal: Callable[[PolicyVersion, int, int], None],
        *,
        run_id: str = "",
        observe: Callable[[Stage], None] = ignore,
    ) -> None:
        """Prepare the run's folder.

        Rank 0 calls ``ledger`` for the broker's ledger, and ``seal`` to report its own version, the
        step of a durable checkpoint, and the step of the oldest one kept. ``observe`` is called at
        each stage of each save.

        Raises:
            ConfigError: on rank 0, if the folder cannot be written.
        """
        self._settings = settings
        self._topology = topology
        self._policy = policy
        self._ledger = ledger
        self._report_sealed = seal
        self._run_id = run_id
        self._folder = settings.run.checkpoints
        self._observe = observe
        self._staging = TensorStaging()
        self._in_flight: _InFlight | None = None
        self._num_failed = 0
        self._num_polls = 0
        self._figures: dict[str, float] = {}  # figures since the last request
        self._saved = PolicyVersion(0, 0)  # weights that a run starts from need no save
        self._current = self._saved  # version that the broker wants with every request
        resumed = settings.resume_from
        self._resumed = read_checkpoint_info(resumed) if resumed is not None else None
        uploads = topology.rank == 0 and bool(settings.checkpoint.upload)
        if topology.rank == 0:
            prepare_folder(self._folder)
        self._uploader = Uploader(settings, run_id) if uploads else None
        self._retained = RetainedCheckpoints(settings, self._uploader)
        if topology.rank == 0:
            self._retained.infos = readable_checkpoints(self._folder)
            if not uploads:  # state of a start with other settings
                (self._folder / UPLOAD_FILE).unlink(missing_ok=True)

    def figures(self) -> dict[str, float]:
        """Return the figures of saves since the last call, for a step's metrics."""
        figures, self._figures = self._figures, {}
        figures["checkpoint/failed"] = float(self._num_failed)
        figures["checkpoint/staged_bytes"] = float(self._staging.num_bytes)
        return figures | (self._uploader.figures() if self._uploader is not None else {})

    @property
    def num_polls(self) -> int:
        """Number of polls in waits for saves and uploads."""
        saving = self._in_flight.save.num_polls if self._in_flight is not None else 0
        uploading = self._uploader.num_polls if self._uploader is not None else 0
        return self._num_polls + saving + uploading

    @property
    def is_saving(self) -> bool:
        """True if a checkpoint is being written; the same on every rank."""
        return self._in_flight is not None

    def visit(self, version: PolicyVersion) -> None:
        """Finish a save that is written by now; a failure is a warning. Every rank calls this.

        ``version`` is the learner's present version, here and in the other methods.
        """
        self._current = version
        if self._in_flight is None:
            return
        try:
            if self._in_flight.save.advance():
                self._complete()
        except CheckpointError as error:
            self._give_up()
            self._warn(error)

    def close(self) -> None:
        """Wait until the upload of the newest checkpoint has succeeded or failed."""
        if self._uploader is not None:
            self._uploader.close()

    def started_from(self, version: PolicyVersion) -> None:
        """Remember the weights that training starts from: they are saved already, or given.

        If a checkpoint of an abandoned life would otherwise be the newest, they are saved again
        under the new version. Every rank calls this.

        Raises:
            CheckpointError: they could not be saved.
        """
        self._saved = self._current = version
        if self._resumed is None:
            self._retained.upload()
            return
        resumption = self._retained.resumption = Resumption(self._resumed.version, version.epoch)
        overtaken = self._topology.rank == 0 and is_overtaken(
            list(self._retained.infos.values()), resumption
        )
        if any_rank(overtaken):
            self._begin(version, self._resumed.evaluation)
            self._wait()
        else:
            self._retained.upload()
            self._seal(version.step)

    def save_if_due(self, version: PolicyVersion, *, last_step: int) -> None:
        """Save if this step is due or the last; a failure is a warning. Every rank calls this.

        With checkpoint.asynchronous this returns once the policy is copied, unless training has
        ended. The last save is tried again by ``at_end``.

        Raises:
            CheckpointStuckError: a save is still in flight, and reads what the next step changes.
        """
        self.visit(version)
        checkpoint, evaluation = self._settings.checkpoint, self._settings.eval
        is_last = version.step >= last_step
        due = is_save_due(version.step, checkpoint, evaluation)
        due = due or (is_last and is_final_save_due(checkpoint, evaluation))
        if not due:
            return
        is_beside = checkpoint.asynchronous and not is_last
        try:
            if not self._has_begun(version):
                self._wait_for_earlier()
                self._begin(version, is_beside=is_beside)
            if not is_beside:
                self._wait()
        except CheckpointStuckError as error:
            if not (checkpoint.asynchronous or is_last):
                raise
            self._warn(error)
        except CheckpointError as error:
            self._warn(error)

    def at_end(self, version: PolicyVersion) -> None:
        """Save the policy that the run ends with, if asked and not done. Every rank calls this.

        If it was saved before the last evaluations ended, its ledger is replaced by one that has
        them. Nothing is being written after this.

        Raises:
            CheckpointError: the policy could not be saved.
        """
        self._current = version
        self._wait_for_earlier()
        due = is_final_save_due(self._settings.checkpoint, self._settings.eval)
        if due and version != self._saved:
            self._begin(version)
            self._wait()
        elif self._topology.rank == 0:
            path = self._folder / checkpoint_name(version.step)
            if path not in self._retained.infos or self._retained.infos[path].version != version:
                return
            try:
                replace_file(path / LEDGER_FILE, ledger_file(self._ledger(version)))
            except (OSError, SlipstreamError) as error:  # a resume needs no newer ledger
                _log.warning("cannot renew the ledger of %s: %s", path, error)

    def on_stop(self, version: PolicyVersion) -> None:
        """Save before an early end, if not done. Every rank calls this.

        Nothing is being written after this.

        Raises:
            CheckpointError: the policy could not be saved.
        """
        self._current = version
        self._wait_for_earlier()
        if version != self._saved:
            self._begin(version)
            self._wait()

    def note(self, evaluations: Sequence[EvalPoint]) -> None:
        """Write evaluations to their checkpoints, and mark the best checkpoint; rank 0.

        A checkpoint being written gets its evaluation when it is complete.
        """
        self._retained.note(evaluations)

    # ---- one save --------------------------------------------------------------

    def _has_begun(self, version: PolicyVersion) -> bool:
        in_flight = self._in_flight
        return version == self._saved or (
            in_flight is not None and version == in_flight.info.version
        )

    def _begin(
        self,
        version: PolicyVersion,
        evaluation: EvalPoint | None = None,
        *,
        is_beside: bool = False,
    ) -> None:
        """Begin to save, while no other save is in flight.

        Raises:
            CheckpointError: the save could not begin.
        """
        started_s = time.monotonic()
        model, run = self._policy.model, self._settings.run
        content = run.contents.get(run.model, "")
        info = CheckpointInfo(
            format_revision=FORMAT_REVISION,
            run_name=run.name,
            run_id=self._run_id,
            version=version,
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            model=run.model if is_fetched(run.model, content) else str(Path(run.model).resolve()),
            content=content,
            architecture=architecture_of(model.hf_config),
            parameters=parameters_hash(model),
            dtype=dtype_name(model),
            ranks=self._topology.world_size,
            tensor_parallel=self._topology.sizes.tensor,
            parallel=self._topology.sizes.others(),
            packages={name: package_version(name) for name in _PACKAGES},
            evaluation=evaluation,
            has_critic=self._policy.critic is not None,
            has_reference=self._policy.renews_reference,
            has_digests=True,
            has_divided_optimizer=self._policy.divides_optimizer,
            has_places=self._policy.divides_optimizer,
            adapters=model.adapters.facts if model.adapters is not None else None,
        )
        save = Save(
            self._policy,
            self._topology,
            self._folder,
            info,
            lambda: self._ledger(version),
            timeout_s=self._settings.learner.timeout_s,
            staging=self._staging if is_beside else None,
            observe=self._observe,
        )
        # The save's thread may rename at any time: take a checkpoint of that name off the list.
        replaced = self._retained.infos.pop(save.path, None)
        self._in_flight = _InFlight(save, info, replaced, started_s)
        if is_beside:
            self._add("time/stage_checkpoint", time.monotonic() - started_s)

    def _wait(self) -> None:
        """Wait until the save in flight, if any, is complete.

        Raises:
            CheckpointError: the save failed.
            CheckpointStuckError: the save is still in flight.
        """
        if self._in_flight is None:
            return
        try:
            self._in_flight.save.wait()
        except CheckpointStuckError:
            raise
        except CheckpointError:
            self._give_up()
            raise
        self._complete()

    def _wait_for_earlier(self) -> None:
        """Wait for the save in flight; a failure is a warning.

        Raises:
            CheckpointStuckError: the save is still in flight.
        """
        if self._in_flight is None:
            return
        started_s = time.monotonic()
        try:
            self._wait()
        except CheckpointStuckError:
            raise
        except CheckpointError as error:
            self._warn(error)
        finally:
            self._add("time/save_checkpoint_stall", time.monotonic() - started_s)

    def _complete(self) -> None:
        """Add the save in flight, which has its name now, and report it to the broker."""
        done = self._end_flight()
        self._saved = done.info.version
        seconds = time.monotonic() - done.started_s
        self._add("time/save_checkpoint", seconds)
        if self._topology.rank == 0:
            _log.info("saved %s in %.2f s", done.save.path, seconds)
            self._retained.add(done.save.path, done.info)
            self._seal(done.info.step)

    def _give_up(self) -> None:
        """Drop the save in flight, which has failed: the checkpoint to replace is still there."""
        failed = self._end_flight()
        if failed.replaced is not None and failed.save.path.is_dir():
            self._retained.infos[failed.save.path] = failed.replaced

    def _end_flight(self) -> _InFlight:
        ended = self._in_flight
        if ended is None:
            raise ValueError("no checkpoint is being written")
        self._num_polls += ended.save.num_polls
        self._in_flight = None
        return ended

    def _warn(self, error: CheckpointError) -> None:
        self._num_failed += 1
        _log.warning("%s; training continues", error)

    def _add(self, figure: str, seconds: float) -> None:
        self._figures[figure] = self._figures.get(figure, 0.0) + seconds

    def _seal(self, step: int) -> None:
        """Report to the broker that a durable checkpoint holds the steps before this one.

        A failure is a warning: the next report includes it.
        """
        if self._topology.rank != 0:
            return
        oldest = min((info.step for info in self._retained.infos.values()), default=step)
        try:
            self._report_sealed(self._current, step, min(oldest, step))
        except SlipstreamError as error:
            _log.warning("cannot seal the steps before %d: %s", step, error)
