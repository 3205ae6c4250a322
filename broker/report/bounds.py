"""Bounds on clients' reports about themselves, which may hold anything."""

import re
from collections.abc import Mapping
from itertools import islice
from typing import TypeVar

N = TypeVar("N", int, float)
MAX_CHARS = 100  # characters of a name
MAX_NAMES = 256  # figures of a report
MAX_REASON_CHARS = 500
_WORD = re.compile(r"[a-z][a-z0-9_]{0,39}")  # a phase or counter
_MOST = 1e15  # largest figure; a sum of some is still finite
_LAST_MOMENT_S = 1e11  # unix time; calendars end later


def figures(values: Mapping[str, N], *, most: int = MAX_NAMES) -> dict[str, N]:
    """Keep the figures that can be summed and shown."""
    sane = ((name[:MAX_CHARS], value) for name, value in values.items() if 0 <= value <= _MOST)
    return dict(islice(sane, most))


def by_phase(values: Mapping[str, N]) -> dict[str, N]:
    """Return figures of phases or counters, whose names are words of lower case."""
    return figures({name: value for name, value in values.items() if _WORD.fullmatch(name)})


def texts(values: Mapping[str, str], *, most: int) -> dict[str, str]:
    """Return texts by name that a person can read."""
    return {
        name[:MAX_CHARS]: text[:MAX_REASON_CHARS] for name, text in islice(values.items(), most)
    }


def moment(unix_s: float) -> float:
    """Clamp to a valid Unix time; invalid values become 0."""
    return unix_s if 0 <= unix_s <= _LAST_MOMENT_S else 0.0
