"""Which checkpoint `slipstream run --resume` resumes from."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import (
    checkpoints_in,
    newest_checkpoint,
    read_checkpoint_info,
)
from slipstream.wire.files.run_folder import SUMMARY, TRAIL
from slipstream.wire.settings.load import Table
from slipstream.wire.settings.sections import RunSection

_log = logging.getLogger(__name__)
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A checkpoint, and the run folder that it belongs to."""

    run_folder: Path
    checkpoint: Path | None  # None: there is none yet, the ledger of the run is all there is
    step: int


def find_resume_point(run: RunSection, wanted: str) -> ResumePoint | None:
    """Return what to resume from.

    Args:
        run: the section as the user wrote it.
        wanted: "auto" for the newest of NAME, NAME-2, ... that has started and not ended (None if
            there is none: then a run starts), or a run folder, or a checkpoint folder.

    Raises:
        ConfigError: the folder named holds no checkpoint, or its run is complete.
    """
    if wanted == AUTO:
        folder = _newest_run(run)
        if folder is None:
            return None
        if newest_checkpoint(folder) is None:
            return ResumePoint(folder, None, 0)
        return _point(folder, run)
    return _point(Path(wanted), run)


def _newest_run(run: RunSection) -> Path | None:
    folders = [Path(run.dir) / run.name]
    number = 2
    while (folder := Path(run.dir) / f"{run.name}-{number}").exists():
        folders.append(folder)
        number += 1
    for folder in reversed(folders):
        if newest_checkpoint(folder) is not None or _has_ledger(folder):
            return folder
    return None


def _has_ledger(folder: Path) -> bool:
    """True if a run was cut off before its first checkpoint, so that its store resumes."""
    try:
        outcome = json.loads((folder / SUMMARY).read_text())["outcome"]
    except (OSError, ValueError, KeyError):
        outcome = ""
    return (folder / TRAIL).is_dir() and outcome != "finished"


def _damage_of(checkpoint: Path) -> str:
    from slipstream.learner.checkpoints.digests import (
        damage_of,  # xxhash, which a host without a learner may lack
    )

    return damage_of(checkpoint)


def _newest_whole(folder: Path, checkpoints: Sequence[Path]) -> Path:
    """Return the last of a run's checkpoints that is not damaged.

    Raises:
        ConfigError: all are.
    """
    damaged: list[str] = []
    for checkpoint in reversed(checkpoints):
        if not (damage := _damage_of(checkpoint)):
            return checkpoint
        damaged.append(f"{checkpoint}: {damage}")
        _log.warning("%s is passed over: %s", checkpoint, damage)
    raise ConfigError(f"no checkpoint of {folder} is whole; the newest is {damaged[0]}")


def _point(folder: Path, run: RunSection) -> ResumePoint:
    if own := checkpoints_in(folder / "checkpoints"):
        checkpoint, run_folder = _newest_whole(folder, own), folder
    else:
        checkpoint, run_folder = folder, folder.absolute().parent.parent
        if damage := _damage_of(checkpoint):
            raise ConfigError(f"{checkpoint} is damaged: {damage}; --resume auto takes another one")
    info = read_checkpoint_info(checkpoint)
    if checkpoint.absolute().parent != run_folder.absolute() / "checkpoints":
        raise ConfigError(
            f"--resume {folder}: it lies in no run folder (RUN/checkpoints/step-...); to start a "
            "new run from its weights, export it and name that folder as run.model"
        )
    if info.step >= run.steps:
        raise ConfigError(
            f"{checkpoint} stands at step {info.step} of run.steps = {run.steps}: "
            "raise run.steps to train on"
        )
    return ResumePoint(run_folder, checkpoint, info.step)


def resumed_table(table: Table, point: ResumePoint) -> Table:
    """Return the settings of a run that resumes in its own folder."""
    run = {
        **table.get("run", {}),
        "name": point.run_folder.name,
        "dir": str(point.run_folder.parent),
        "resume_from": str(point.checkpoint or ""),
    }
    return {**table, "run": run}
