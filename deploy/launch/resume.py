"""Finds the checkpoint that `slipstream run --resume` resumes from."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import (
    INFO_FILE,
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
    """Return the point to resume from.

    Args:
        run: the section as the user wrote it.
        wanted: "auto" for the newest of NAME, NAME-2, ... that has started and not ended (None if
            there is none: then a run starts), or a run folder, or a checkpoint folder.

    Raises:
        ConfigError: the folder named holds no checkpoint, or its run is complete.
    """
    if wanted != AUTO:
        return _point(Path(wanted), run)
    folders = [Path(run.dir) / run.name]
    while (folder := Path(run.dir) / f"{run.name}-{len(folders) + 1}").exists():
        folders.append(folder)
    for folder in reversed(folders):
        if newest_checkpoint(folder) is not None:
            return _point(folder, run)
        try:
            outcome = json.loads((folder / SUMMARY).read_text())["outcome"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            outcome = ""
        if unreadable := sorted((folder / "checkpoints").glob("step-*")):
            raise ConfigError(
                f"no checkpoint of {folder} can be read, not even {unreadable[-1].name}: restore "
                f"{INFO_FILE} in one, or choose another run.name to start again"
            )
        if (folder / TRAIL).is_dir() and outcome != "finished":  # cut off before a checkpoint
            return ResumePoint(folder, None, 0)
    return None


def _damage_of(checkpoint: Path) -> str:
    from slipstream.learner.checkpoints.digests import (
        damage_of,  # xxhash, which a host without a learner may lack
    )

    return damage_of(checkpoint)


def _point(folder: Path, run: RunSection) -> ResumePoint:
    if own := checkpoints_in(folder / "checkpoints"):
        damaged: list[str] = []
        for checkpoint in reversed(own):
            if not (damage := _damage_of(checkpoint)):
                break
            damaged.append(f"{checkpoint}: {damage}")
            _log.warning("%s is passed over: %s", checkpoint, damage)
        else:
            raise ConfigError(f"no checkpoint of {folder} is whole; the newest is {damaged[0]}")
        run_folder = folder
    else:
        checkpoint, run_folder = folder, folder.absolute().parent.parent
        if damage := _damage_of(checkpoint):
            raise ConfigError(f"{checkpoint} is damaged: {damage}; --resume auto takes another one")
    info = read_checkpoint_info(checkpoint)
    if checkpoint.absolute().parent != run_folder.absolute() / "checkpoints":
        raise ConfigError(
            f"--resume {folder}: it is not in a run folder (RUN/checkpoints/step-...); to start a "
            "new run from its weights, export it and set run.model to that folder"
        )
    if info.step >= run.steps:
        raise ConfigError(
            f"{checkpoint} is at step {info.step} of run.steps = {run.steps}: "
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
