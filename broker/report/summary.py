"""`summary.json`: the figures of a run, replaced whole at every step and at the end."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from slipstream.broker.report.publishes import newest
from slipstream.wire.files.replace import replace_file
from slipstream.wire.messages.status import RunStatus

PUBLISHES = "newest_publishes"
_KEPT_PUBLISHES = 50
_KEPT_MEMBERS = 1_000  # members of these publishes together


def summary_of(status: RunStatus) -> dict[str, Any]:
    """Return the figures worth keeping; counts are groups unless named otherwise."""
    plain: dict[str, Any] = msgspec.to_builtins(status)
    plain.pop("steps_history")
    publishes: list[dict[str, Any]] = plain.pop("publish_history")
    plain["last_publish"] = publishes[-1] if publishes else {}
    kept = newest(status.publish_history, most=_KEPT_PUBLISHES, most_members=_KEPT_MEMBERS)
    plain[PUBLISHES] = msgspec.to_builtins([*kept])
    for record in plain[PUBLISHES]:
        del record["engine_digests"]
    # The seconds of a phase are those of the slowest member.
    plain["publish_seconds"] = means_of(record.phase_seconds for record in status.publish_history)
    last = status.steps_history[-1:] or []
    plain["last_step_metrics"] = last[0].metrics if last else {}
    plain["mean_metrics"] = dict(
        sorted(means_of(point.metrics for point in status.steps_history).items())
    )
    in_flight = sum(status.in_flight.values())
    plain["equation"] = {
        "issued": status.issued,
        "trained": status.trained,
        "dropped": sum(status.dropped.values()),
        "in_flight": in_flight,
        "unaccounted": status.unaccounted,
    }
    return plain


def means_of(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each name over the rows that have it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: sum(known) / len(known) for name, known in values.items()}


def write_summary(path: Path, status: RunStatus) -> None:
    """Replace the summary by the figures of this state."""
    replace_figures(path, summary_of(status))


def replace_figures(path: Path, figures: dict[str, Any]) -> None:
    """Replace the summary in one rename, so that a reader never sees half of it."""
    replace_file(path, json.dumps(figures, indent=2).encode() + b"\n", durable=False)
