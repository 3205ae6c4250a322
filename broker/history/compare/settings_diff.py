"""Settings of runs, flat, and those that differ."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.wire.files.run_folder import SETTINGS

OF_EVERY_RUN = frozenset({"run.name", "run.socket_dir"})  # differ, and say nothing
_MAX_CHARS = 500


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A setting that is not the same in all runs; None where a run does not have it."""

    setting: str
    values: tuple[str | None, ...]  # one per run


def read_settings(folder: Path) -> dict[str, str]:
    """Return the settings of a run by their full names, as text; none if they cannot be read."""
    try:
        table = tomllib.loads((folder / SETTINGS).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return dict(_flat(table, ""))


def differences(runs: Sequence[Mapping[str, str]]) -> list[SettingDifference]:
    """Return the settings that differ between runs, in the order of the first that has them."""
    names = dict.fromkeys(name for settings in runs for name in settings)
    found = [
        SettingDifference(name, tuple(settings.get(name) for settings in runs))
        for name in names
        if name not in OF_EVERY_RUN
    ]
    return [difference for difference in found if len(set(difference.values)) > 1]


def _flat(table: Mapping[str, Any], prefix: str) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            text = json.dumps(value, ensure_ascii=False, default=str)
            rows.append((f"{prefix}{key}", text[:_MAX_CHARS]))
    return rows
