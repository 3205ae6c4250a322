"""The complete checkpoints of a run, on rank 0; the decisions are in retention.py."""

import logging
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from slipstream.learner.checkpoints.retention import Resumption, best_of, evaluation_of, to_remove
from slipstream.learner.checkpoints.uploader import Uploader
from slipstream.learner.config import LearnerSettings
from slipstream.wire.files.checkpoints import (
    BEST_FILE,
    INFO_FILE,
    BestCheckpoint,
    CheckpointInfo,
    checkpoint_name,
    encode_info,
    read_best,
)
from slipstream.wire.files.replace import replace_file
from slipstream.wire.messages.status import EvalPoint

_log = logging.getLogger(__name__)


class RetainedCheckpoints:
    """Complete checkpoints: their evaluations, the best one, and which to remove.

    A checkpoint being replaced is left out: at any time its name may lead to the old or the new.
    """

    def __init__(self, settings: LearnerSettings, uploader: Uploader | None) -> None:
        """Begin without checkpoints."""
        self._settings = settings
        self._uploader = uploader
        self._folder = settings.run.checkpoints
        self._evaluations: Sequence[EvalPoint] = ()
        self.infos: dict[Path, CheckpointInfo] = {}
        self.resumption: Resumption | None = None

    def add(self, path: Path, info: CheckpointInfo) -> None:
        """Add a complete checkpoint, with its evaluation if that is known by now."""
        self.infos[path] = info
        self._write_evaluations()
        self._settle()

    def note(self, evaluations: Sequence[EvalPoint]) -> None:
        """Write evaluations to their checkpoints, and mark the best checkpoint."""
        self._evaluations = evaluations
        if self._write_evaluations():
            self._settle()

    def _write_evaluations(self) -> bool:
        """Write known evaluations to checkpoints that lack theirs; return True if any did."""
        noted = False
        try:
            for path, info in self.infos.items():
                if info.evaluation is not None:
                    continue
                point = evaluation_of(info, self._evaluations, self.resumption)
                if point is not None:
                    self.infos[path] = msgspec.structs.replace(info, evaluation=point)
                    replace_file(path / INFO_FILE, encode_info(self.infos[path]))
                    noted = True
        except OSError as error:
            _log.warning("cannot note evaluations in %s: %s", self._folder, error.strerror)
        return noted

    def _settle(self) -> None:
        """Remove checkpoints that no rule keeps. best.json is updated first, to name a kept one."""
        old = to_remove(
            list(self.infos.values()),
            self._settings.checkpoint,
            self._settings.eval,
            resumption=self.resumption,
        )
        versions = {info.version for info in old}
        doomed = [path for path, info in self.infos.items() if info.version in versions]
        for path in doomed:
            del self.infos[path]
        try:
            self._mark_best()
        except OSError as error:
            _log.warning("cannot mark the best in %s: %s", self._folder, error.strerror)
            with suppress(OSError):
                (self._folder / BEST_FILE).unlink(missing_ok=True)
        for path in doomed:
            unfinished = path.with_name(f".{path.name}.unfinished")
            try:  # renamed first: no half of a checkpoint is ever found
                path.rename(unfinished)
                shutil.rmtree(unfinished)
            except OSError as error:
                _log.warning("cannot remove the old checkpoint %s: %s", path, error.strerror)

        self.upload()

    def upload(self) -> None:
        """Have remote storage hold the checkpoints of now."""
        if self._uploader is not None:
            self._uploader.offer(self.infos, self.resumption)

    def _mark_best(self) -> None:
        metric = self._settings.eval.metric
        best = best_of(sorted(self.infos.values(), key=lambda info: info.version), metric)
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
