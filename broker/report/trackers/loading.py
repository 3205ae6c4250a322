"""From logging.trackers to adapters. Only the named ones are imported."""

import importlib
import json
from collections.abc import Mapping

from slipstream.broker.report.trackers.base import TrackedRun, Tracker
from slipstream.broker.report.trackers.verl_names import WithVerlNames
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.replace import replace_file
from slipstream.wire.settings.sections import LoggingSection, RunSection

IDS_FILE = "trackers.json"


def load_trackers(
    logging: LoggingSection,
    run: RunSection,
    settings: Mapping[str, object],
    *,
    resumed_at: int | None,
) -> list[Tracker]:
    """Return the adapters that logging.trackers names.

    A tracker that has runs of its own gets the id it had before a resume, from trackers.json.

    ``settings`` are all of the run, for trackers that show them; ``resumed_at`` is the step that
    the run resumes from, None for a new run.

    Raises:
        ConfigError: a package is not installed, or the tracker refuses its options.
    """
    trackers: list[Tracker] = []
    ids_file = run.folder / IDS_FILE
    ids: dict[str, str] = {}
    if resumed_at is not None and ids_file.is_file():
        ids = json.loads(ids_file.read_text())
    for name in logging.trackers:
        if name == "tensorboard":
            from slipstream.broker.report.trackers.tensorboard import TensorBoardTracker

            trackers.append(TensorBoardTracker(run.folder / "tensorboard", resumed_at=resumed_at))
            continue
        adapter = importlib.import_module(f"slipstream.broker.report.trackers.{name}")
        tracked = TrackedRun(
            project=logging.project,
            name=run.name,
            folder=run.folder,
            options=getattr(logging, name),
            settings=settings,
            run_id=ids.get(name),
        )
        try:
            tracker, ids[name] = adapter.start(tracked)
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
        trackers.append(tracker)
    if ids:
        replace_file(ids_file, json.dumps(ids, indent=2).encode() + b"\n")
    if logging.verl_names:
        return [WithVerlNames(tracker) for tracker in trackers]
    return trackers
