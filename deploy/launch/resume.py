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
from slipstream.wire.files.remote import StorageError
from slipstream.wire.files.remote_checkpoints import RemoteCheckpoints, refuse_other_run
from slipstream.wire.files.run_folder import SETTINGS, SUMMARY, TRAIL
from slipstream.wire.settings.load import Table, load_table
from slipstream.wire.settings.sections import RunSection, run_section

_log = logging.getLogger(__name__)
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A checkpoint and its run folder."""

    run_folder: Path
    checkpoint: Path | None  # None: no checkpoint yet, only the run's ledger


def find_resume_point(
    run: RunSection, wanted: str, upload: str = "", *, is_tenant: bool = False
) -> ResumePoint | None:
    """Return the point to resume from.

    With "auto" a checkpoint that is newer in remote storage is fetched into its run folder.

    Args:
        run: The section as the user wrote it.
        upload: URL of the run's checkpoints in remote storage; empty without.
        wanted: A run folder, a checkpoint folder, or "auto": the newest of NAME, NAME-2, ... that
            has started and not ended. With "auto" and no such run, returns None: a run starts.
        is_tenant: True if NAME-2 is another tenant's folder.

    Raises:
        ConfigError: the folder named holds no checkpoint, or its run is complete.
    """
    if wanted != AUTO:
        return _point(Path(wanted), run)
    if upload and (folder := _fetch_newer(run, upload)) is not None:
        return _point(folder, run)
    folders = [Path(run.dir) / run.name]
    if not is_tenant:
        folders += _of_later_starts(run)
    for folder in reversed(folders):
        if newest_checkpoint(folder) is not None:
            return _point(folder, run)
        if unreadable := sorted((folder / "checkpoints").glob("step-*")):
            raise ConfigError(
                f"no checkpoint of {folder} can be read, not even {unreadable[-1].name}: restore "
                f"{INFO_FILE} in one, or choose another run.name to start again"
            )
        is_finished = _outcome_of(folder) == "finished"
        if (folder / TRAIL).is_dir() and not is_finished:  # cut off before a checkpoint
            return ResumePoint(folder, None)
    return None


def _of_later_starts(run: RunSection) -> list[Path]:
    """Return the folders NAME-2, NAME-3, ... that are there."""
    found = list[Path]()
    while (folder := Path(run.dir) / f"{run.name}-{len(found) + 2}").exists():
        found.append(folder)
    return found


def newest_pool(run: RunSection) -> str:
    """Return the name of the newest of NAME, NAME-2, ... that has a folder, or NAME."""
    return [run.name, *(folder.name for folder in _of_later_starts(run))][-1]


def is_complete(run: RunSection) -> bool:
    """Return True if a tenant's run has finished, and its settings do not make it longer now."""
    newest = newest_checkpoint(run.folder)
    if newest is not None and read_checkpoint_info(newest).step >= run.steps:
        return True
    if _outcome_of(run.folder) != "finished":
        return False
    return newest is None or _limits_of(run) == _limits_of(_as_started(run.folder))


def _limits_of(run: RunSection) -> tuple[float, ...]:
    return run.steps, run.epochs, run.max_hours


def _as_started(folder: Path) -> RunSection:
    """Return [run] as it was when the run in a folder last started."""
    return run_section(load_table(folder / SETTINGS))


def _outcome_of(folder: Path) -> str:
    """Return how the run in a folder ended; empty if it has not."""
    try:
        return str(json.loads((folder / SUMMARY).read_text())["outcome"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def refuse_taken(upload: str) -> None:
    """Refuse to start a new run over another run's checkpoints, or without its storage.

    Raises:
        ConfigError: naming the setting.
    """
    try:
        if upload:
            refuse_other_run(RemoteCheckpoints(upload).known(), "", upload)
    except StorageError as error:
        raise ConfigError(str(error)) from error


def _fetch_newer(run: RunSection, upload: str) -> Path | None:
    """Fetch the newest remote checkpoint, unless the folder of its run has a newer one.

    Returns:
        The run folder; None if neither it nor remote storage has checkpoints.

    Raises:
        ConfigError: the folder belongs to another run, or the remote checkpoints cannot be used.
    """
    try:
        remote = RemoteCheckpoints(upload)
        if not (known := remote.known()):
            return None
        name = run_section({"run": {"name": known[-1].info.run_name}}).name  # checks the name
        folder = Path(run.dir) / name
        own = _newest_whole(folder)[0]
        info = read_checkpoint_info(own) if own is not None else None
        if info is not None:
            refuse_other_run(known, info.run_id, upload)
        newer_than = info.version if info is not None else None
        remote.fetch_newest(folder / "checkpoints", newer_than=newer_than)
    except StorageError as error:
        raise ConfigError(f"{error}; without checkpoint.upload local ones are enough") from error
    except OSError as error:
        raise ConfigError(f"cannot fetch a checkpoint to {run.dir} (run.dir): {error}") from error
    return folder if newest_checkpoint(folder) is not None else None


def _newest_whole(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest undamaged checkpoint of a run, and the damage of newer ones."""
    damaged: list[str] = []
    for checkpoint in reversed(checkpoints_in(folder / "checkpoints")):
        if not (damage := _damage_of(checkpoint)):
            return checkpoint, damaged
        damaged.append(f"{checkpoint}: {damage}")
        _log.warning("%s is passed over: %s", checkpoint, damage)
    return None, damaged


def _damage_of(checkpoint: Path) -> str:
    from slipstream.learner.checkpoints.digests import (
        damage_of,  # xxhash, which a host without a learner may lack
    )

    return damage_of(checkpoint)


def _point(folder: Path, run: RunSection) -> ResumePoint:
    whole, damaged = _newest_whole(folder)
    if whole is not None:
        checkpoint, run_folder = whole, folder
    elif damaged:
        raise ConfigError(f"no checkpoint of {folder} is whole; the newest is {damaged[0]}")
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
    return ResumePoint(run_folder, checkpoint)


def resumed_table(table: Table, point: ResumePoint) -> Table:
    """Return the settings of a run that resumes in its own folder with its former content."""
    try:
        known = run_section(load_table(point.run_folder / SETTINGS)).contents
    except ConfigError as error:
        _log.info("the content of URLs is not compared with that of before: %s", error)
        known = {}
    run = {
        **({"contents": known} if known else {}),
        **table.get("run", {}),
        "name": point.run_folder.name,
        "dir": str(point.run_folder.parent),
        "resume_from": str(point.checkpoint or ""),
    }
    return {**table, "run": run}
