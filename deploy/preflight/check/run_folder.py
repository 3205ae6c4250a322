"""The name and folder of a run, its model's name, and the names of its processes."""

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slipstream.deploy.config import DeploySection, free_name, nearest_folder
from slipstream.deploy.preflight.check.facts import Fact, fail, ok, warn
from slipstream.wire.files.checkpoints import newest_checkpoint, read_checkpoint_info
from slipstream.wire.files.fetched import is_hub_name
from slipstream.wire.files.run_folder import RUN_LOCK, TRAIL
from slipstream.wire.models.shelf import refuse_listed, shelf
from slipstream.wire.process.processes import is_locked
from slipstream.wire.settings.sections import RunSection

_MODEL = "run.model"
KINDS = ("broker", "generator", "learner", "reward-worker")


@dataclass(frozen=True, slots=True)
class SeenFolder:
    """The planned folder of a run."""

    folder: Path
    exists: bool
    is_running: bool
    free_name: str  # name that a new run would get
    step: int | None  # step of the newest checkpoint; None without one
    has_ledger: bool
    unwritable: str = ""  # required folder that cannot be written; else empty


def judge_listed(run: Mapping[str, object]) -> list[Fact]:
    """Return that a model of the hub can be trained, by its name, before anything is fetched.

    Args:
        run: The table [run], as it is written.

    Raises:
        ConfigError: it cannot; whatever else is wrong with the settings.
    """
    name = run.get("model")
    if not isinstance(name, str) or not is_hub_name(name):
        return []
    refuse_listed(name, _MODEL)
    found = shelf().get(name)
    if found is None:
        return []
    size = f"{found.billions:g} billion parameters"
    return [ok("model", f"{name} is known: {found.model_type}, {size}, can be trained", _MODEL)]


def see_folder(run: RunSection) -> SeenFolder:
    """Look at the folder of a run without writing."""
    folder, parent = run.folder, nearest_folder(run.folder)
    newest = newest_checkpoint(folder)
    return SeenFolder(
        folder=folder,
        exists=folder.exists(),
        is_running=is_locked(folder / RUN_LOCK),
        free_name=free_name(run),
        step=read_checkpoint_info(newest).step if newest is not None else None,
        has_ledger=(folder / TRAIL).is_dir(),
        unwritable="" if os.access(parent, os.W_OK | os.X_OK) else str(parent),
    )


def judge_folder(seen: SeenFolder) -> Fact:
    """Return whether a new run gets its name, and what can be resumed under it."""
    name = "run folder"
    if seen.unwritable:
        return fail(name, f"{seen.folder}: {seen.unwritable} cannot be written", "run.dir")
    if not seen.exists:
        return ok(name, f"{seen.folder} is free", "run.name")
    taken = f"{seen.folder} is taken: a new run would be {seen.free_name}"
    if seen.is_running:
        return warn(name, f"{taken}; the run in it is under way", "run.name")
    if seen.step is not None:
        taken += f"; --resume auto resumes it from step {seen.step}"
    elif seen.has_ledger:
        taken += "; --resume auto resumes it from its ledger"
    return warn(name, taken, "run.name")


def judge_roles(names: Iterable[str], deploy: DeploySection) -> Fact:
    """Return the processes of a run, and unknown ones named in settings.

    Args:
        names: Names of its processes.
        deploy: section with tables by role or process.
    """
    found = list(names)
    by_role: dict[str, Mapping[str, object]] = {
        "deploy.ray.cpus": deploy.ray.cpus,
        "deploy.ray.resources": deploy.ray.resources,
        "deploy.ray.labels": deploy.ray.labels,
    }
    unknown = _unknown("deploy.cores", deploy.cores, {*KINDS, *found})
    for setting, table in by_role.items():
        unknown += _unknown(setting, table, KINDS)
    if unknown:
        return warn("roles", f"there is no {', '.join(unknown)}: expected {', '.join(found)}")
    return ok("roles", ", ".join(found), "generators.count, reward.workers, learner.ranks_per_node")


def _unknown(setting: str, table: Iterable[str], known: Collection[str]) -> list[str]:
    return [f"{name} ({setting})" for name in table if name not in known]
