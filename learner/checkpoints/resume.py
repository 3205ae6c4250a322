"""Finds the checkpoint that a restarted learner resumes from."""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path

from slipstream.learner.config import LearnerSettings
from slipstream.wire.files.checkpoints import CheckpointInfo, readable_checkpoints
from slipstream.wire.files.remote import StorageError
from slipstream.wire.files.remote_checkpoints import RemoteCheckpoints

_log = logging.getLogger(__name__)


def fetch_newer(settings: LearnerSettings) -> None:
    """Fetch a newer checkpoint than the run folder's; if storage fails, those are enough."""
    if not settings.checkpoint.upload:
        return
    folder = settings.run.checkpoints
    infos = readable_checkpoints(folder)
    newest = max((info.version for info in infos.values()), default=None)
    try:
        RemoteCheckpoints(settings.checkpoint.upload).fetch_newest(folder, newer_than=newest)
    except (StorageError, OSError) as error:
        _log.warning("no newer checkpoint is fetched: %s", error)


def resume_order(
    infos: Mapping[Path, CheckpointInfo], named: Path | None, *, begun_after: int | None = None
) -> list[Path]:
    """Return the run's own checkpoints that a restarted learner may resume from, best first.

    The newest by policy version is the best. A checkpoint counts only if the run did not go back
    behind it since: a checkpoint of a newer version with fewer steps has abandoned it, and so has
    a run started from the named one, even if that run has saved nothing yet.

    Args:
        infos: readable checkpoints in RUN/checkpoints.
        named: checkpoint that the run was started from (run.resume_from).
        begun_after: newest epoch of a checkpoint at that time; checkpoints of newer epochs were
            saved since, also an overwritten named one. None is the epoch of the named one.
    """
    began_at = infos[named].version if named is not None and named in infos else None
    if began_at is not None and begun_after is None:
        begun_after = began_at.epoch
    usable: list[Path] = []
    fewest = sys.maxsize
    for path in sorted(infos, key=lambda path: infos[path].version, reverse=True):
        version = infos[path].version
        is_older = begun_after is not None and version.epoch <= begun_after
        is_abandoned = is_older and began_at is not None and version > began_at
        if version.step <= fewest and not is_abandoned:
            usable.append(path)
            fewest = version.step
    return usable
