"""Which of its run's checkpoints a restarted learner resumes from."""

import sys
from collections.abc import Mapping
from pathlib import Path

from slipstream.wire.files.checkpoints import CheckpointInfo


def resume_order(infos: Mapping[Path, CheckpointInfo], named: Path | None) -> list[Path]:
    """Return the run's own checkpoints that a restarted learner may resume from, best first.

    The newest by policy version is the best. A checkpoint counts only if the run did not go back
    behind it since: one of a newer version that has fewer steps has abandoned it, and so has a
    life that started at the named one, even where it has saved nothing yet.

    Args:
        infos: what can be read in RUN/checkpoints.
        named: what this life of the run started from (run.resume_from).
    """
    began_at = infos[named].version if named is not None and named in infos else None
    usable: list[Path] = []
    fewest = sys.maxsize
    for path in sorted(infos, key=lambda path: infos[path].version, reverse=True):
        version = infos[path].version
        is_abandoned = (
            began_at is not None and version.epoch == began_at.epoch and version > began_at
        )
        if version.step <= fewest and not is_abandoned:
            usable.append(path)
            fewest = version.step
    return usable
