"""From logging.trackers to adapters. Only the named ones are imported."""

import importlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from slipstream.broker.report.metrics_file import steps_in
from slipstream.broker.report.trackers.background import BackgroundTrackers
from slipstream.broker.report.trackers.base import Logged, TrackedRun, Tracker
from slipstream.broker.report.trackers.verl_names import WithVerlNames
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.replace import replace_file
from slipstream.wire.files.run_folder import METRICS
from slipstream.wire.settings.sections import LoggingSection, RunSection
from slipstream.wire.unreadable import UNREADABLE

IDS_FILE = "trackers.json"
LOGGED_FILE = "tracked.json"
T = TypeVar("T")


def load_trackers(
    logging: LoggingSection,
    run: RunSection,
    settings: Mapping[str, object],
    *,
    resumed_at: int | None = None,
) -> BackgroundTrackers:
    """Start the adapters that logging.trackers names, after what earlier lives logged.

    A tracker that has runs of its own gets the id it had in an earlier life, from trackers.json.
    ``settings`` are all of the run, for trackers that show them; ``resumed_at`` is the step of the
    checkpoint that it resumes from, where neither tracked.json nor metrics.jsonl tells a step.

    Raises:
        ConfigError: a package is not installed, the tracker refuses its options, or trackers.json
            or tracked.json cannot be read.
    """
    ids_file = run.folder / IDS_FILE
    ids = _read(ids_file, dict[str, str | None]) or {}
    logged = _logged_before(run, resumed_at)
    trackers: list[Tracker] = []
    for name in logging.trackers:
        if name == "tensorboard":
            trackers.append(_tensorboard(run, logged))
            continue
        tracked = TrackedRun(
            project=logging.project,
            name=run.name,
            folder=run.folder,
            options=getattr(logging, name),
            settings=settings,
            run_id=ids.get(name),
            logged=Logged(logged.step, set(logged.evaluated)),
        )
        tracker, ids[name] = _started(name, tracked)
        trackers.append(tracker)
    if ids:
        replace_file(ids_file, json.dumps(ids, indent=2).encode() + b"\n")
    if logging.verl_names:
        trackers = [WithVerlNames(tracker) for tracker in trackers]
    return BackgroundTrackers(trackers, logged, write=partial(write_logged, run.folder))


def _logged_before(run: RunSection, resumed_at: int | None) -> Logged:
    """Return the points of earlier lives, and have them in tracked.json."""
    logged = _read(run.folder / LOGGED_FILE, Logged)
    if logged is None:  # a new run, or of a version that wrote metrics.jsonl alone
        logged = Logged(*steps_in(run.folder / METRICS))
        if logged.step < 0 and resumed_at is not None:
            logged.step = resumed_at
        if logged != Logged():
            write_logged(run.folder, logged)  # before what is repeated is cut off there
    return logged


def _tensorboard(run: RunSection, logged: Logged) -> Tracker:
    from slipstream.broker.report.trackers.tensorboard import TensorBoardTracker

    begun = logged.step if logged.step >= 0 else None
    shown = logged.evaluated - logged.taken_back
    return TensorBoardTracker(run.folder / "tensorboard", resumed_at=begun, evaluated=shown)


def _started(name: str, run: TrackedRun) -> tuple[Tracker, str]:
    """Start an adapter; return it and its id."""
    adapter = importlib.import_module(f"slipstream.broker.report.trackers.{name}")
    try:
        started: tuple[Tracker, str] = adapter.start(run)
    except ImportError as error:
        raise ConfigError(
            f"logging.trackers names {name}, which is not installed ({error}): "
            f"pip install {adapter.PACKAGE}"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"logging.trackers: {name} does not start (logging.{name}): "
            f"{' '.join(str(error).split())[:300] or type(error).__name__}"
        ) from error
    return started


def _read(path: Path, content: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=content)
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"cannot read {path}: {error}; put it back, or remove it") from error


def write_logged(run_folder: Path, logged: Logged) -> None:
    """Replace the file of what was handed to the trackers; on return it is on disk."""
    replace_file(run_folder / LOGGED_FILE, msgspec.json.encode(logged) + b"\n")
