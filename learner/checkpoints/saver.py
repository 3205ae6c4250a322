"""Saves and prunes the learner's checkpoints; the decisions are in retention.py."""

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version as package_version
from pathlib import Path

import msgspec

from slipstream.learner.checkpoints.files import CheckpointError, prepare_folder, save_checkpoint
from slipstream.learner.checkpoints.identity import architecture_of, dtype_name, parameters_hash
from slipstream.learner.checkpoints.retention import (
    Resumption,
    best_of,
    evaluation_of,
    is_final_save_due,
    is_overtaken,
    is_save_due,
    to_remove,
)
from slipstream.learner.checkpoints.uploader import Uploader
from slipstream.learner.config import LearnerSettings
from slipstream.learner.model.collectives import any_rank
from slipstream.learner.model.topology import Topology
from slipstream.learner.training.policy import Policy
from slipstream.wire.errors import SlipstreamError
from slipstream.wire.files.checkpoints import (
    BEST_FILE,
    FORMAT_REVISION,
    INFO_FILE,
    LEDGER_FILE,
    UPLOAD_FILE,
    BestCheckpoint,
    CheckpointInfo,
    checkpoint_name,
    encode_info,
    ledger_file,
    read_best,
    read_checkpoint_info,
    readable_checkpoints,
)
from slipstream.wire.files.remote import is_url
from slipstream.wire.files.replace import replace_file
from slipstream.wire.messages.status import EvalPoint
from slipstream.wire.messages.versions import PolicyVersion

_log = logging.getLogger(__name__)
_PACKAGES = ("torch", "megatron-core")


class Saver:
    """The checkpoints of one run. Every rank has one; rank 0 alone touches finished checkpoints."""

    def __init__(
        self,
        settings: LearnerSettings,
        topology: Topology,
        policy: Policy,
        ledger: Callable[[PolicyVersion], bytes],
        seal: Callable[[PolicyVersion, int, int], None],
        *,
        run_id: str = "",
    ) -> None:
        """Prepare the run's folder.

        Rank 0 calls ``ledger`` for that of the broker, and ``seal`` to report its own version, the
        step of a durable checkpoint, and that of the oldest one that is kept.

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
        self._num_failed = 0
        self._seconds: float | None = None
        self._infos: dict[Path, CheckpointInfo] = {}
        self._saved = PolicyVersion(0, 0)  # nothing is lost with the weights a run starts from
        resumed = settings.resume_from
        self._resumed = read_checkpoint_info(resumed) if resumed is not None else None
        self._resumption: Resumption | None = None
        if topology.rank == 0:
            prepare_folder(self._folder)
            self._infos = readable_checkpoints(self._folder)
        uploads = topology.rank == 0 and bool(settings.checkpoint.upload)
        self._uploader = Uploader(settings, run_id) if uploads else None
        if topology.rank == 0 and not uploads:
            (self._folder / UPLOAD_FILE).unlink(missing_ok=True)  # of a start with other settings

    def figures(self) -> dict[str, float]:
        """Return the figures of the last save, for a step's metrics."""
        figures = {"checkpoint/failed": float(self._num_failed)}
        if self._seconds is not None:
            figures["time/save_checkpoint"] = self._seconds
            self._seconds = None
        return figures | (self._uploader.figures() if self._uploader is not None else {})

    @property
    def num_polls(self) -> int:
        """How often ``close`` has looked whether it may end."""
        return self._uploader.num_polls if self._uploader is not None else 0

    def close(self) -> None:
        """Wait until the newest checkpoint is uploaded, or has failed to be."""
        if self._uploader is not None:
            self._uploader.close()

    def started_from(self, version: PolicyVersion) -> None:
        """Remember the weights that training starts from: they are saved already, or given.

        They are saved again under the new version where a checkpoint of an abandoned life would
        otherwise be the newest. Every rank calls this.

        Raises:
            CheckpointError: that could not be done.
        """
        self._saved = version
        if self._resumed is None:
            self._upload()
            return
        self._resumption = Resumption(self._resumed.version, version.epoch)
        overtaken = self._topology.rank == 0 and is_overtaken(
            list(self._infos.values()), self._resumption
        )
        if any_rank(overtaken, world_size=self._topology.world_size):
            self._save(version, self._resumed.evaluation)
        else:
            self._upload()
            self._seal(version)

    def save_if_due(self, version: PolicyVersion, *, last_step: int) -> None:
        """Save if this step is due or the last; a failure is a warning. Every rank calls this.

        The last one is tried again ``at_end``.
        """
        checkpoint, evaluation = self._settings.checkpoint, self._settings.eval
        is_last = version.step >= last_step
        due = is_save_due(version.step, checkpoint, evaluation)
        due = due or (is_last and is_final_save_due(checkpoint, evaluation))
        if not due or version == self._saved:
            return
        try:
            self._save(version)
        except CheckpointError as error:
            self._num_failed += 1
            _log.warning("%s; training continues", error)

    def at_end(self, version: PolicyVersion) -> None:
        """Save the policy that the run ends with, if asked and not done. Every rank calls this.

        If it was saved before the last evaluations ended, its ledger is replaced by one that has
        them.

        Raises:
            CheckpointError: it could not be saved.
        """
        due = is_final_save_due(self._settings.checkpoint, self._settings.eval)
        if due and version != self._saved:
            self._save(version)
        elif self._topology.rank == 0:
            path = self._folder / checkpoint_name(version.step)
            if path not in self._infos or self._infos[path].version != version:
                return
            try:
                replace_file(path / LEDGER_FILE, ledger_file(self._ledger(version)))
            except (OSError, SlipstreamError) as error:  # the older one is as good to resume from
                _log.warning("cannot renew the ledger of %s: %s", path, error)

    def on_stop(self, version: PolicyVersion) -> None:
        """Save before an early end, if not done. Every rank calls this.

        Raises:
            CheckpointError: it could not be saved.
        """
        if version != self._saved:
            self._save(version)

    def note(self, evaluations: Sequence[EvalPoint]) -> None:
        """Write evaluations to the checkpoints they belong to, and which is the best; rank 0."""
        try:
            noted = False
            for path, info in self._infos.items():
                if info.evaluation is not None:
                    continue
                point = evaluation_of(info, evaluations, self._resumption)
                if point is not None:
                    self._infos[path] = msgspec.structs.replace(info, evaluation=point)
                    replace_file(path / INFO_FILE, encode_info(self._infos[path]))
                    noted = True
            if noted:
                self._settle()
        except OSError as error:
            _log.warning("cannot note evaluations in %s: %s", self._folder, error.strerror)

    def _save(self, version: PolicyVersion, evaluation: EvalPoint | None = None) -> None:
        started = time.monotonic()
        model, run = self._policy.model, self._settings.run
        info = CheckpointInfo(
            format_revision=FORMAT_REVISION,
            run_name=run.name,
            run_id=self._run_id,
            version=version,
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            model=run.model if is_url(run.model) else str(self._settings.model.resolve()),
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
        )
        path = save_checkpoint(
            self._policy, self._topology, self._folder, info, lambda: self._ledger(version)
        )
        self._saved = version
        self._seconds = time.monotonic() - started
        if self._topology.rank == 0:
            _log.info("saved %s in %.2f s", path, self._seconds)
            self._infos[path] = info
            self._settle()
            self._seal(version)

    def _seal(self, version: PolicyVersion) -> None:
        """Report to the broker that a durable checkpoint holds the steps before this version.

        A failure is a warning: the next report includes it.
        """
        if self._topology.rank != 0:
            return
        oldest = min((info.step for info in self._infos.values()), default=version.step)
        try:
            self._report_sealed(version, version.step, min(oldest, version.step))
        except SlipstreamError as error:
            _log.warning("cannot seal the steps before %d: %s", version.step, error)

    def _settle(self) -> None:
        """Remove checkpoints that no rule keeps. best.json is updated first, to name a kept one."""
        old = to_remove(
            list(self._infos.values()),
            self._settings.checkpoint,
            self._settings.eval,
            resumption=self._resumption,
        )
        versions = {info.version for info in old}
        doomed = [path for path, info in self._infos.items() if info.version in versions]
        for path in doomed:
            del self._infos[path]
        try:
            self._mark_best()
        except OSError as error:
            _log.warning("cannot mark the best in %s: %s", self._folder, error.strerror)
            with suppress(OSError):
                (self._folder / BEST_FILE).unlink(missing_ok=True)
        for path in doomed:
            unfinished = path.with_name(f".{path.name}.unfinished")
            try:  # under another name first, so that no half of it is ever found
                path.rename(unfinished)
                shutil.rmtree(unfinished)
            except OSError as error:
                _log.warning("cannot remove the old checkpoint %s: %s", path, error.strerror)

        self._upload()

    def _upload(self) -> None:
        if self._uploader is not None:
            self._uploader.offer(self._infos, self._resumption)

    def _mark_best(self) -> None:
        metric = self._settings.eval.metric
        best = best_of(sorted(self._infos.values(), key=lambda info: info.version), metric)
        if best is None:
            (self._folder / BEST_FILE).unlink(missing_ok=True)
            return
        info, value = best
        name = checkpoint_name(info.step)
        answered = sorted(info.evaluation.versions) if info.evaluation is not None else []
        marked = BestCheckpoint(
            checkpoint=name,
            metric=metric,
            value=value,
            oldest_version=answered[0].label if answered else "",
            newest_version=answered[-1].label if answered else "",
        )
        if read_best(self._folder) != marked:
            replace_file(self._folder / BEST_FILE, msgspec.json.encode(marked))
            _log.info("%s is the best so far: %s %.4f", name, metric, value)
