"""When the learner saves, and which checkpoints it keeps; the decisions are in retention.py."""

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version as package_version
from pathlib import Path

import msgspec

from learner.checkpoint import (
    CheckpointError,
    architecture_of,
    dtype_name,
    encode_info,
    parameters_hash,
    prepare_folder,
    save_checkpoint,
)
from learner.config import LearnerSettings
from learner.policy import Policy
from learner.retention import best_of, evaluation_of, is_final_save_due, is_save_due, to_remove
from learner.topology import Topology
from wire.checkpoints import (
    BEST_FILE,
    FORMAT_REVISION,
    INFO_FILE,
    BestCheckpoint,
    CheckpointInfo,
    checkpoint_name,
    checkpoints_in,
    read_best,
    read_checkpoint_info,
)
from wire.status import EvalPoint
from wire.versions import PolicyVersion

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
    ) -> None:
        """Prepare the run's folder.

        Args:
            settings: the learner's.
            topology: this rank's place.
            policy: what is saved.
            ledger: gives the broker's ledger; rank 0 calls it.

        Raises:
            ConfigError: on rank 0, if the folder cannot be written.
        """
        self._settings = settings
        self._topology = topology
        self._policy = policy
        self._ledger = ledger
        self._folder = settings.run.checkpoints
        self._num_failed = 0
        self._seconds: float | None = None
        self._infos: dict[Path, CheckpointInfo] = {}
        self._saved = PolicyVersion(0, 0)  # nothing is lost with the weights a run starts from
        resumed = settings.resume_from
        self._resumed_from = read_checkpoint_info(resumed).version if resumed is not None else None
        if topology.rank == 0:
            prepare_folder(self._folder)
            self._infos = {p: read_checkpoint_info(p) for p in checkpoints_in(self._folder)}

    def figures(self) -> dict[str, float]:
        """Return what a step's metrics say about the save before it."""
        figures = {"checkpoint/failed": float(self._num_failed)}
        if self._seconds is not None:
            figures["time/save_checkpoint"] = self._seconds
            self._seconds = None
        return figures

    def started_from(self, version: PolicyVersion) -> None:
        """Remember the weights that training starts from: they are saved already, or given."""
        self._saved = version

    def after_step(self, version: PolicyVersion) -> None:
        """Save if this step is due; a failure is a warning. Every rank calls this."""
        if not is_save_due(version.step, self._settings.checkpoint, self._settings.eval):
            return
        try:
            self._save(version)
        except CheckpointError as error:
            self._num_failed += 1
            _log.warning("%s; training goes on", error)

    def at_end(self, version: PolicyVersion) -> None:
        """Save the policy that the run ends with, if asked and not done. Every rank calls this.

        Raises:
            CheckpointError: it could not be saved.
        """
        due = is_final_save_due(self._settings.checkpoint, self._settings.eval)
        if due and version != self._saved:
            self._save(version)

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
                point = evaluation_of(info, evaluations) if info.evaluation is None else None
                if point is not None:
                    self._infos[path] = msgspec.structs.replace(info, evaluation=point)
                    _replace_file(path / INFO_FILE, encode_info(self._infos[path]))
                    noted = True
            if noted:
                self._mark_best()
                self._remove_old()
        except OSError as error:
            _log.warning("cannot note evaluations in %s: %s", self._folder, error.strerror)

    def _save(self, version: PolicyVersion) -> None:
        started = time.monotonic()
        info = self._describe(version)
        path = save_checkpoint(
            self._policy, self._topology, self._folder, info, lambda: self._ledger(version)
        )
        self._saved = version
        self._seconds = time.monotonic() - started
        if self._topology.rank == 0:
            _log.info("saved %s in %.2f s", path, self._seconds)
            self._infos[path] = info
            self._remove_old()

    def _describe(self, version: PolicyVersion) -> CheckpointInfo:
        model = self._policy.model
        return CheckpointInfo(
            format_revision=FORMAT_REVISION,
            run_name=self._settings.run.name,
            version=version,
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            model=str(self._settings.model.resolve()),
            architecture=architecture_of(model.hf_config),
            parameters=parameters_hash(model),
            dtype=dtype_name(model),
            ranks=self._topology.world_size,
            tensor_parallel=self._topology.tensor_parallel,
            packages={name: package_version(name) for name in _PACKAGES},
        )

    def _remove_old(self) -> None:
        old = to_remove(
            list(self._infos.values()),
            self._settings.checkpoint,
            self._settings.eval,
            resumed_from=self._resumed_from,
        )
        versions = {info.version for info in old}
        for path, info in list(self._infos.items()):
            if info.version in versions:
                del self._infos[path]
                _remove(path)

    def _mark_best(self) -> None:
        metric = self._settings.eval.metric
        best = best_of(sorted(self._infos.values(), key=lambda info: info.version), metric)
        if best is None:
            return
        info, value = best
        name = checkpoint_name(info.step)
        marked = BestCheckpoint(checkpoint=name, metric=metric, value=value)
        if read_best(self._folder) != marked:
            _replace_file(self._folder / BEST_FILE, msgspec.json.encode(marked))
            _log.info("%s is the best so far: %s %.4f", name, metric, value)


def _remove(path: Path) -> None:
    """Take a checkpoint away under another name first, so that no half of it is ever found."""
    doomed = path.with_name(f".{path.name}.unfinished")
    try:
        path.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        _log.warning("cannot remove the old checkpoint %s: %s", path, error.strerror)


def _replace_file(path: Path, data: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_bytes(data)
    unfinished.replace(path)
