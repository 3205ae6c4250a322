"""`summary.json`: the figures of a run, replaced whole at every step and at the end."""

import json
from pathlib import Path
from typing import Any

import msgspec

from slipstream.broker.report.publishes import newest
from slipstream.wire.files.replace import replace_file
from slipstream.wire.messages.status import RunStatus

PUBLISHES = "newest_publishes"
_KEPT_PUBLISHES = 50
_KEPT_MEMBERS = 1_000  # of these publishes together


def summary_of(status: RunStatus) -> dict[str, Any]:
    """Return the figures worth keeping; counts are groups unless named otherwise."""
    plain: dict[str, Any] = msgspec.to_builtins(status)
    plain.pop("steps_history")
    publishes: list[dict[str, Any]] = plain.pop("publish_history")
    plain["last_publish"] = publishes[-1] if publishes else {}
    plain[PUBLISHES] = _newest_publishes(status)
    plain["publish_seconds"] = _publish_seconds(status)
    last = status.steps_history[-1:] or []
    plain["last_step_metrics"] = last[0].metrics if last else {}
    plain["mean_metrics"] = _means(status)
    in_flight = sum(status.in_flight.values())
    plain["equation"] = {
        "issued": status.issued,
        "trained": status.trained,
        "dropped": sum(status.dropped.values()),
        "in_flight": in_flight,
        "unaccounted": status.unaccounted,
    }
    return plain


def _newest_publishes(status: RunStatus) -> list[dict[str, Any]]:
    """Return the newest publishes without the digests of what engines held."""
    kept = newest(status.publish_history, most=_KEPT_PUBLISHES, most_members=_KEPT_MEMBERS)
    plain: list[dict[str, Any]] = msgspec.to_builtins([*kept])
    for record in plain:
        del record["engine_digests"]
    return plain


def _publish_seconds(status: RunStatus) -> dict[str, float]:
    """Return the mean seconds of each phase of a publish, the slowest member counting."""
    sums: dict[str, list[float]] = {}
    for record in status.publish_history:
        for phase, seconds in record.phase_seconds.items():
            sums.setdefault(phase, []).append(seconds)
    return {phase: sum(values) / len(values) for phase, values in sums.items()}


def _means(status: RunStatus) -> dict[str, float]:
    sums: dict[str, list[float]] = {}
    for point in status.steps_history:
        for name, value in point.metrics.items():
            sums.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in sorted(sums.items())}


def write_summary(path: Path, status: RunStatus) -> None:
    """Replace the summary by the figures of this state."""
    replace_figures(path, summary_of(status))


def replace_figures(path: Path, figures: dict[str, Any]) -> None:
    """Replace the summary in one rename, so that a reader never sees half of it."""
    replace_file(path, json.dumps(figures, indent=2).encode() + b"\n", durable=False)
